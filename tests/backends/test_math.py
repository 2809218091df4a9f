from __future__ import annotations

import pytest
import torch

from dilabench.backends import math


def test_rows_that_see_no_key_give_zero_and_minus_infinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math, "BLOCK_BYTES", {"cpu": 1})
    q = torch.randn(1, 9, 2, 8, dtype=torch.float64)
    k, v = torch.randn(2, 1, 4, 2, 8, dtype=torch.float64)
    options = {"causal": True, "window": (2, -1), "scale": 0.5}
    out, lse = math.attend(q, k, v, **options)
    # Queries 6, 7 and 8 look back at keys 4 and later, of which there are none.
    assert not out[:, 6:].any()
    assert (lse[:, :, 6:] == float("-inf")).all()
    assert torch.isfinite(lse[:, :, :6]).all()
    gradients = math.attend_backward(torch.randn_like(q), q, k, v, out, lse, **options)
    assert not gradients[0][:, 6:].any()
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_scores_never_exceed_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math, "BLOCK_BYTES", {"cpu": 4 * 2 * 100 * 10})
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
