from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dilabench.backends import math


def test_rows_that_see_no_key_give_zero_and_minus_infinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math, "BLOCK_BYTES", 1)
    q = torch.randn(1, 9, 2, 8, dtype=torch.float64)
    k, v = torch.randn(2, 1, 4, 2, 8, dtype=torch.float64)
    options = {"causal": True, "window": (2, -1), "scale": 0.5}
    out, lse = math.attend(q, k, v, **options)
    # The last query stands at the last key, so that five stand before the first one.
    assert not out[:, :5].any()
    assert (lse[:, :, :5] == float("-inf")).all()
    assert torch.isfinite(lse[:, :, 5:]).all()
    gradients = math.attend_backward(torch.randn_like(q), q, k, v, out, lse, **options)
    assert not gradients[0][:, :5].any()
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_scores_never_exceed_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math, "BLOCK_BYTES", 4 * 2 * 100 * 10)
    seen: list[int] = []
    original = math._scores

    def spy(*arguments: object) -> torch.Tensor:
        scores = original(*arguments)  # type: ignore[arg-type]
        seen.append(scores.numel() * scores.element_size())
        return scores

    monkeypatch.setattr(math, "_scores", spy)
    q, k, v = torch.randn(3, 3, 100, 2, 8)
    math.attend(q, k, v, causal=False, scale=1.0)
    assert len(seen) == 3 * 10
    assert max(seen) == 4 * 2 * 100 * 10


def test_several_batch_rows_share_a_block_when_they_fit() -> None:
    q = torch.randn(7, 3, 2, 8, dtype=torch.float64)
    blocks = list(math._blocks(q, q, torch.float64))
    assert [(b0, b1) for b0, b1, _ in blocks] == [(0, 7)]


class Copies(TorchDispatchMode):
    """The shapes of all copies that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            self.shapes.append(tuple(result.shape))
        return result


@pytest.mark.parametrize(("dtype", "copies"), [(torch.float32, 0), (torch.float64, 0), (torch.bfloat16, 2)])
def test_keys_are_copied_once_for_all_query_blocks_or_never(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, copies: int
) -> None:
    monkeypatch.setattr(math, "BLOCK_BYTES", 8 * 4 * 64 * 10)
    # Keys of every other row, values of the last heads: both views.
    q, k, v = torch.randn(1, 64, 4, 8), torch.randn(1, 128, 2, 8)[:, ::2], torch.randn(1, 64, 5, 8)[:, :, 3:]
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    with Copies() as seen:
        out, lse = math.attend(q, k, v, causal=False, scale=1.0)
    assert seen.shapes.count((1, 2, 64, 8)) == copies
    expected = math.attend(q.contiguous(), k.contiguous(), v.contiguous(), causal=False, scale=1.0)
    torch.testing.assert_close((out, lse), expected)
    with Copies() as seen:
        math.attend_backward(out, q, k, v, out, lse, causal=False, scale=1.0)
    assert seen.shapes.count((1, 2, 64, 8)) == copies


def test_gradcheck() -> None:
    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, *inputs: torch.Tensor) -> torch.Tensor:
            out, lse = math.attend(*inputs, causal=True, window=(3, -1), scale=0.7)
            ctx.save_for_backward(*inputs, out, lse)  # type: ignore[attr-defined]
            return out

        @staticmethod
        def backward(ctx: object, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return math.attend_backward(dout, *ctx.saved_tensors, causal=True, window=(3, -1), scale=0.7)  # type: ignore[attr-defined]

    q = torch.randn(1, 7, 4, 3, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 7, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(Attention.apply, (q, k, v))
