"""What centres a row's gradients of scores where merge weights are detached: dout . own out of each part of a pattern.

The share of a part in the gradient of a score is exp(s - lse) (dp - mean), where lse is the merged one and mean is
dout . out of this part alone (semantics.md §2). Where m parts give the same pair, their shares add up to
m exp(s - lse) (dp - the mean of their means): one call computes it for all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dilabench.impls.union.rectangles import Rectangle


class OwnMeans:
    """dout . own out [B, N, H, 1] of every part, merged from the calls that give its pairs.

    zero_keys: [parts, H, N] as `null_mass.log_zero_keys` gives them apart, or None.
    """

    def __init__(self, dout: Tensor, lse: Tensor, parts: int, zero_keys: Tensor | None) -> None:
        self._dout = dout
        self._means = [dout.new_zeros((*dout.shape[:3], 1)) for _ in range(parts)]
        self._lses = [torch.full_like(lse, float("-inf")) for _ in range(parts)]
        # Zero keys come first: they give a part its lse, and nothing else.
        for own, mass in zip(self._lses, () if zero_keys is None else zero_keys, strict=False):
            own.copy_(mass)
        self._dual = _dual(dout)

    def add(self, rows: Rectangle, out: Tensor, lse: Tensor) -> None:
        """Merge the result of a call into the parts that give its pairs."""
        mean = (rows.queries(self._dout) * out).sum(-1, keepdim=True)
        for part in rows.parts:
            # Within one part its pairs count once, not as often as there are parts.
            rows.rows.merge(self._means[part], self._lses[part], mean, lse)

    def as_out(self, rows: Rectangle) -> Tensor:
        """Rows [S·G, L, A, D] whose product with dout is the mean that a backward of the call has to centre by."""
        first, *others = (rows.queries(self._means[part]) for part in rows.parts)
        return rows.queries(self._dual) * (sum(others, first) / len(rows.parts))


def _dual(x: Tensor) -> Tensor:
    """[..., D] whose product with x is 1, 0 where x is 0; by the largest element first, so that no square is lost."""
    largest = x.abs().amax(-1, keepdim=True)
    # Where all is 0, any divisor will do.
    safe = largest.where(largest > 0, 1.0)
    unit = x / safe
    return unit.div_(unit.square().sum(-1, keepdim=True).clamp_min_(1.0)).div_(safe)
