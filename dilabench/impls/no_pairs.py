"""Computations without kernels: tensors without data or elements, queries that see no key, tokens beyond the last one.

Results have the shapes, dtypes and devices of every other computation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dilabench.impls.call import Computation
from dilabench.impls.one_operator import eager
from dilabench.impls.operator_rules import contiguous_like, empty_results


class ShapesOnly:
    """`Computation` of tensors without data or without elements: results of the right shapes, and no kernel runs."""

    # The kept tensors of ranks, as `ShardedAttention.kept`.
    kept: tuple[()] = ()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out in the shape of q and the width of v, differentiable."""
        return self.with_lse(q, k, v)[0]

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out, and lse [B, H, N]."""
        return eager(self, q, k, v)

    def forward(self, q: Tensor, _k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Empty out and lse."""
        return empty_results(q, v)

    def backward(self, _dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_results: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Empty dq, dk, dv."""
        return contiguous_like(q), contiguous_like(k), contiguous_like(v)


SHAPES_ONLY = ShapesOnly()


class NothingSeen(ShapesOnly):
    """`Computation` of queries that see no key: out 0, lse -inf, gradients 0."""

    def forward(self, q: Tensor, _k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out 0 and lse -inf."""
        out, lse = empty_results(q, v)
        return out.zero_(), lse.fill_(float("-inf"))

    def backward(self, _dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_results: Any) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of 0."""
        return contiguous_like(q).zero_(), contiguous_like(k).zero_(), contiguous_like(v).zero_()


NOTHING_SEEN = NothingSeen()


@dataclass(frozen=True, slots=True)
class FirstRows:
    """`Computation` of the first `rows` tokens, by `inside`; later tokens see no key and are not seen."""

    rows: int
    inside: Computation

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out, 0 behind the rows, and lse, -inf there."""
        out, lse = empty_results(q, v)
        out[:, self.rows :] = 0
        lse[..., self.rows :] = float("-inf")
        found = self.inside.forward(*(x[:, : self.rows] for x in (q, k, v)))
        out[:, : self.rows], lse[..., : self.rows] = found[:2]
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv, 0 behind the rows."""
        missing = q.shape[1] - self.rows
        dout, q, k, v, out = (x[:, : self.rows] for x in (dout, q, k, v, out))
        gradients = self.inside.backward(dout, q, k, v, out, lse[..., : self.rows].contiguous())
        dq, dk, dv = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, missing)) for x in gradients)
        return dq, dk, dv
