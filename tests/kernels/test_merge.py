"""The plain PyTorch merge: two halves of the keys give the softmax over all of them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: dilabench.kernels needs it")

from dilabench.kernels.merge import merge_rows_


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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


def test_empty_sides_are_not_read() -> None:
    generator = torch.Generator().manual_seed(1)
    out, part = torch.randn(1, 4, 2, 8, generator=generator), torch.randn(1, 4, 2, 8, generator=generator)
    lse, part_lse = torch.randn(1, 2, 4, generator=generator), torch.randn(1, 2, 4, generator=generator)
    kept, taken = out[0, 0].clone(), part[0, 1].clone()
    part_lse[..., 0], part[0, 0] = float("-inf"), float("nan")
    lse[..., 1], out[0, 1] = float("-inf"), float("nan")
    lse[..., 2], part_lse[..., 2], out[0, 2] = float("-inf"), float("-inf"), float("nan")
    merge_rows_(out, lse, part, part_lse)
    torch.testing.assert_close(out[0, 0], kept)
    torch.testing.assert_close(out[0, 1], taken)
    assert torch.equal(out[0, 2], torch.zeros(2, 8))
    assert (lse[..., 2] == float("-inf")).all()
    assert torch.isfinite(out).all()


def test_strided_rows_are_merged_in_place_and_others_untouched() -> None:
    generator = torch.Generator().manual_seed(2)
    out, lse = torch.randn(1, 9, 4, 8, generator=generator), torch.randn(1, 4, 9, generator=generator)
    before = out.clone()
    part, part_lse = torch.randn(1, 4, 2, 8, generator=generator), torch.randn(1, 2, 4, generator=generator)
    merge_rows_(out[:, 1::2, ::2], lse[:, ::2, 1::2], part, part_lse)
    changed = (out != before).any(-1)[0]
    expected = torch.zeros(9, 4, dtype=torch.bool)
    expected[1::2, ::2] = True
    assert torch.equal(changed, expected)


def test_shapes_that_disagree_are_refused() -> None:
    out, lse = torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 4)
    with pytest.raises(ValueError, match="must be equal"):
        merge_rows_(out, lse, torch.zeros(1, 3, 2, 8), lse)
    with pytest.raises(ValueError, match="must be"):
        merge_rows_(out, torch.zeros(1, 4, 2), out, lse)
