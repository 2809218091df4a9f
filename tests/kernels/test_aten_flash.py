"""torch's CPU kernel in the dtype in which it is faster, against float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from dilabench.kernels.cpu import aten_flash

HALF = (torch.bfloat16, torch.float16)


@pytest.fixture(params=[False, True], ids=["without instructions for it", "with them"])
def native(request, monkeypatch) -> bool:
    """Whether the processor is taken for one that multiplies half precision."""
    monkeypatch.setattr(aten_flash, "_multiplies", lambda _dtype: request.param)
    return request.param


def exact(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    logits = (q @ k.transpose(-1, -2) * scale).masked_fill(hidden, -torch.inf)
    return torch.softmax(logits, -1) @ v, torch.logsumexp(logits, -1)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("dtype", "rows"), [*itertools.product(HALF, (40, 200))])
def test_results_are_those_of_the_kernel_to_rounding(native, dtype, rows, masked):
    generator = torch.Generator().manual_seed(rows)
    q, k, v, dout = (torch.randn(2, 2, rows, 16, generator=generator).to(dtype) for _ in range(4))
    ahead = torch.arange(rows) - torch.arange(rows)[:, None]
    hidden = (ahead > 0) | (ahead < -9 if masked else ahead > rows)

    def given(backward: bool) -> dict:
        if not masked:
            return {"causal": True}
        of_pass = aten_flash.compute_dtype(q, backward=backward)
        return {"mask": torch.zeros(rows, rows, dtype=of_pass).masked_fill_(hidden, -torch.inf)}

    out, lse = aten_flash.attend(q, k, v, scale=0.25, **given(backward=False))
    gradients = aten_flash.attend_backward(dout, q, k, v, out, lse, scale=0.25, **given(backward=True))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    want, want_lse = exact(*leaves, hidden, 0.25)
    wanted = torch.autograd.grad(want, leaves, dout.double())
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert {x.dtype for x in gradients} == {aten_flash.compute_dtype(q, backward=True)}
    rounding = torch.finfo(dtype).eps
    assert (lse - want_lse).abs().max() < rounding / 4
    for got, right in zip((out, *gradients), (want, *wanted), strict=True):
        assert (got.double() - right).norm() / right.norm() < 2 * rounding


def test_passes_are_in_float32_where_that_is_faster(native):
    def dtypes(dtype: torch.dtype, rows: int, dim: int) -> tuple[torch.dtype, torch.dtype]:
        q = torch.empty(1, 1, rows, dim, dtype=dtype, device="meta")
        forward, backward = (aten_flash.compute_dtype(q, backward=one) for one in (False, True))
        return forward, backward

    single, half, brain = torch.float32, *reversed(HALF)
    assert dtypes(torch.float64, 32, 64) == (torch.float64, torch.float64)
    assert dtypes(half, 1024, 192) == ((half, half) if native else (single, single))
    assert dtypes(brain, 191, 128) == (brain, brain if native else single)
    assert dtypes(brain, 192, 128) == dtypes(brain, 64, 129) == (brain, brain)
