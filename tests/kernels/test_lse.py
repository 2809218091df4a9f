"""Merging rows in place: the log-sum-exp formula, empty sides, half precision."""

import pytest
import torch
from torch import Tensor

from dilabench.kernels.lse import merge_rows_


def parts(dtype: torch.dtype, rows: int = 700) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two results [2, rows, 3, 24] with lse [2, 3, rows] in float32."""
    generator = torch.Generator().manual_seed(0)
    outs = [torch.randn(2, rows, 3, 24, generator=generator).to(dtype) for _ in range(2)]
    wide = torch.promote_types(dtype, torch.float32)
    lses = [8 * torch.randn(2, 3, rows, generator=generator).to(wide) for _ in range(2)]
    return outs[0], lses[0], outs[1], lses[1]


def expected(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.softmax(torch.stack([lse, other_lse]).double(), 0).transpose(-1, -2).unsqueeze(-1)
    return weights[0] * out.double() + weights[1] * other.double(), torch.logaddexp(lse.double(), other_lse.double())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_equals_the_formula_to_one_rounding(dtype: torch.dtype) -> None:
    out, lse, other, other_lse = parts(dtype)
    wanted, wanted_lse = expected(out, lse, other, other_lse)
    merge_rows_(out, lse, other, other_lse)
    # float64 and float32 round the weight as well as the result.
    ulps = 4 if dtype in (torch.float32, torch.float64) else 1
    assert (out.double() - wanted).abs().max() <= ulps * torch.finfo(dtype).eps * wanted.abs().max()
    torch.testing.assert_close(lse, wanted_lse.to(lse.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_empty_side_leaves_the_other_bitwise(dtype: torch.dtype) -> None:
    out, lse, other, other_lse = parts(dtype, rows=8)
    lse[:, :, :2] = other_lse[:, :, 1:3] = float("-inf")
    out[:, :2], other[:, 1:3] = 0, 0
    before = out.clone(), lse.clone()
    merge_rows_(out, lse, other, other_lse)
    assert torch.equal(out[:, 0], other[:, 0])
    assert torch.equal(out[:, 1], torch.zeros_like(out[:, 1]))
    assert bool((lse[:, :, 1] == float("-inf")).all())
    assert torch.equal(out[:, 2], before[0][:, 2])
    assert torch.equal(lse[:, :, 2], before[1][:, :, 2])


def test_weights_far_apart_do_not_overflow() -> None:
    out, lse, other, other_lse = parts(torch.float32, rows=4)
    lse.fill_(-300.0)
    other_lse.fill_(300.0)
    merge_rows_(out, lse, other, other_lse)
    assert torch.equal(out, other)
    assert torch.equal(lse, other_lse)


def test_merges_into_strided_rows_and_leaves_the_rest() -> None:
    whole, lse, other, other_lse = parts(torch.bfloat16)
    wanted, _ = expected(whole[:, 1::3], lse[:, :, 1::3], other[:, :233], other_lse[:, :, :233])
    before = whole.clone()
    merge_rows_(whole[:, 1::3], lse[:, :, 1::3], other[:, :233], other_lse[:, :, :233])
    torch.testing.assert_close(whole[:, 1::3].double(), wanted, rtol=2**-8, atol=2**-8)
    assert torch.equal(whole[:, 0::3], before[:, 0::3])


def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    logits = torch.einsum("glad,gmad->galm", q, k)
    return torch.einsum("galm,gmad->glad", torch.softmax(logits, -1), v), torch.logsumexp(logits, -1)


def test_two_halves_give_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 7, 5, 24, dtype=torch.float64, generator=generator) for _ in range(3))
    whole, whole_lse = attend(q, k, v)
    out, lse = attend(q, k[:, :3], v[:, :3])
    merge_rows_(out, lse, *attend(q, k[:, 3:], v[:, 3:]))
    torch.testing.assert_close(out, whole, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-12, atol=1e-13)
