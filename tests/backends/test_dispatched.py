"""Backend `sdpa`, which is for accelerators that no test has, on the CPU: torch dispatches there as well."""

from __future__ import annotations

import pytest
import torch

from dilabench.backends import math
from dilabench.backends.sdpa import dispatched
from tests.backends.test_contract import FEWER_QUERIES, MASKS, OBLONG, SQUARE, laid_out


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatched, "BLOCK_BYTES", 16000)


@pytest.mark.parametrize("layout", ["contiguous", "diagonal", "every_third"])
@pytest.mark.parametrize(("causal", "window"), MASKS)
@pytest.mark.parametrize("shape", SQUARE + FEWER_QUERIES + OBLONG)
def test_it_agrees_with_plain_products(
    shape: tuple[int, ...], causal: bool, window: tuple[int, int], layout: str
) -> None:
    B, M, L, H, K, D = shape
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        laid_out(torch.randn(B, length, heads, D, generator=generator), layout)
        for length, heads in ((M, H), (L, K), (L, K))
    )
    out, lse = dispatched.attend(q, k, v, causal=causal, window=window, scale=0.3)
    wanted_out, wanted_lse = math.attend(q, k, v, causal=causal, window=window, scale=0.3)
    torch.testing.assert_close((out, lse), (wanted_out, wanted_lse), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes_and_those_of_lse(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 40, 2, 16).to(dtype) for _ in range(3))
    out, lse = dispatched.attend(q, k, v, causal=True, scale=0.25)
    wanted_out, wanted_lse = math.attend(q, k, v, causal=True, scale=0.25)
    assert (out.dtype, lse.dtype) == (dtype, wanted_lse.dtype)
    torch.testing.assert_close(lse, wanted_lse)
    # Torch's kernels round the weights to the dtype of v.
    torch.testing.assert_close(out, wanted_out, rtol=0, atol=1e-12 + torch.finfo(dtype).eps)


def test_autocast_rounds_nothing() -> None:
    q, k, v = (torch.randn(1, 24, 2, 16) for _ in range(3))
    plain = dispatched.attend(q, k, v, causal=True, scale=0.25)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(dispatched.attend(q, k, v, causal=True, scale=0.25), plain, rtol=0, atol=0)


def test_no_query_or_key() -> None:
    q, k = torch.randn(1, 3, 2, 4), torch.randn(1, 0, 2, 4)
    out, lse = dispatched.attend(q, k, k, causal=False, scale=1.0)
    assert not out.any()
    assert (lse == float("-inf")).all()
