"""Selected key blocks as implementations take them, and what all computations over them share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from dilabench.impls.one_operator import AttentionComputation
from dilabench.impls.operator_rules import empty_results
from dilabench.workload.spec import UNBOUNDED, Window


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The key blocks of each token and key/value head, over one sequence.

    indices: int32 [B or 1, N, K, S] in any order; repeated ones count once, those outside of 0..n-1 stand for none, for
    n blocks of `block` tokens. A causal mask and a window hide tokens inside of blocks.
    """

    indices: Tensor
    block: int
    causal: bool
    window: Window = UNBOUNDED

    @property
    def length(self) -> int:
        """N, of queries and of keys."""
        return self.indices.shape[1]

    @property
    def blocks(self) -> int:
        """Blocks of keys; the last one may be short."""
        return -(-self.length // self.block)

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """How many positions back and ahead a token sees; None is unbounded."""
        left, right = (None if side < 0 else side for side in self.window)
        return left, 0 if self.causal else right

    def part(self, first: int, last: int) -> Selection:
        """The selection of some tokens as if they were the sequence."""
        return Selection(self.indices[:, first:last], self.block, self.causal, self.window)

    def distinct(self, first: int, last: int) -> Tensor:
        """int64 [B or 1, R, K, min(S, n)] of the rows from `first` to before `last`: each index once, ascending, and n
        for none."""
        indices, none = self.indices[:, first:last].long(), self.blocks
        ascending = indices.where((indices >= 0) & (indices < none), none).sort(-1).values
        again = torch.zeros_like(ascending, dtype=torch.bool)
        again[..., 1:] = ascending[..., 1:] == ascending[..., :-1]
        return ascending.masked_fill(again, none).sort(-1).values[..., :none]


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class SelectedAttention(AttentionComputation):
    """Attention over selected blocks. `takes_bounds`: it computes packed sequences by itself, from their bounds."""

    takes_bounds: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class PackedSequences(SelectedAttention):
    """Packed sequences one after another, each by a computation for the tokens from one bound to before another."""

    parts: Sequence[tuple[int, int, SelectedAttention]]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out [1, T, H, D] and lse [1, H, T]; 0 and -inf for tokens of no sequence."""
        out, lse = empty_results(q, v)
        out.zero_()
        lse.fill_(-torch.inf)
        for first, last, part in self.parts:
            out[:, first:last], lse[..., first:last] = part.forward(*(x[:, first:last] for x in (q, k, v)))
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv [1, T, ·, D]; 0 for tokens of no sequence."""
        dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        for first, last, part in self.parts:
            results = [x[:, first:last] for x in (dout, q, k, v, out)]
            gradients = part.backward(*results, lse[..., first:last])  # type: ignore[call-arg]
            dq[:, first:last], dk[:, first:last], dv[:, first:last] = gradients
        return dq, dk, dv


def over_sequences(
    kernel: type[SelectedAttention], selection: Selection, scale: float, bounds: Sequence[int] = ()
) -> SelectedAttention:
    """A kernel's computation over one sequence, or over packed ones, in each of which indices count from 0."""
    make: Any = kernel
    if not bounds:
        computation: SelectedAttention = make(selection, scale)
    elif kernel.takes_bounds:
        computation = make(selection, scale, tuple(dict.fromkeys(bounds)))
    else:
        spans = [(first, last) for first, last in pairwise(bounds) if first < last]
        computation = PackedSequences(
            [(first, last, make(selection.part(first, last), scale)) for first, last in spans]
        )
    return computation


def check(selection: Selection, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError for tensors that do not fit each other or the indices."""
    batch, rows, heads, dim = q.shape
    kv_heads, shape = k.shape[2], tuple(selection.indices.shape)
    if k.shape != v.shape or (k.shape[:2], k.shape[3]) != (q.shape[:2], dim) or heads % kv_heads:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} do not fit q {tuple(q.shape)}")
    if shape[0] not in (1, batch) or shape[1:3] != (rows, kv_heads):
        raise ValueError(f"indices {shape} do not fit q {tuple(q.shape)} and k {tuple(k.shape)}; give [B, N, K, S]")
