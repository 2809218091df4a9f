"""The positions of a sequence that each rank owns, and how tensors are cut into shards and joined.

A rank's part is a tuple of spans, in the order of its local rows. Parts differ in size if N does not divide: nothing
is padded, so padding cannot be attended. Spans of a rank always ascend, so local order is global order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dilabench.distributed.balance import cut_runs


@dataclass(frozen=True, slots=True)
class Span:
    """Positions [start, stop); the first is row `row` of the rank that owns it."""

    start: int
    stop: int
    row: int = 0

    @property
    def length(self) -> int:
        """The number of positions."""
        return max(0, self.stop - self.start)


@dataclass(frozen=True)
class Shards:
    """The spans of every rank."""

    parts: tuple[tuple[Span, ...], ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.parts)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """The number of positions of each rank."""
        return tuple(sum(span.length for span in part) for part in self.parts)

    def held(self, positions: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """The positions ([R] int64, on the CPU) that a rank owns: their indices in `positions`, and its rows."""
        rows = torch.full_like(positions, -1)
        for span in self.parts[rank]:
            inside = (positions >= span.start) & (positions < span.stop)
            rows = torch.where(inside, span.row + positions - span.start, rows)
        index = (rows >= 0).nonzero()[:, 0]
        return index, rows[index]

    def take(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """A rank's rows of a whole tensor, contiguous."""
        pieces = [x.narrow(dim, span.start, span.length) for span in self.parts[rank]]
        if not pieces:
            return x.narrow(dim, 0, 0).contiguous()
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)).contiguous()

    def join(self, shards: Sequence[Tensor], dim: int = 1) -> Tensor:
        """The whole tensor of all ranks' rows: the inverse of `take`. Raises ValueError for rows that do not fit."""
        lengths = [shard.shape[dim] for shard in shards]
        if lengths != list(self.rows):
            raise ValueError(f"ranks hold {list(self.rows)} rows, but the shards have {lengths}")
        shape = list(shards[0].shape)
        shape[dim] = sum(self.rows)
        whole = shards[0].new_empty(shape)
        for part, shard in zip(self.parts, shards, strict=True):
            for span in part:
                whole.narrow(dim, span.start, span.length).copy_(shard.narrow(dim, span.row, span.length))
        return whole


def shards_of(held: Sequence[Sequence[range]]) -> Shards:
    """Shards of the runs of positions that each rank owns, in its order of rows; adjacent runs are one span."""
    parts = []
    for runs in held:
        part: list[Span] = []
        row = 0
        for run in filter(None, runs):
            if part and part[-1].stop == run.start:
                part[-1] = Span(part[-1].start, run.stop, part[-1].row)
            else:
                part.append(Span(run.start, run.stop, row))
            row += len(run)
        parts.append(tuple(part))
    return Shards(tuple(parts))


# A function of sequence bounds and the number of ranks that returns the shards.
Cut = Callable[[Sequence[tuple[int, int]], int], Shards]


def contiguous(bounds: Sequence[tuple[int, int]], size: int) -> Shards:
    """Every sequence (start, end) in `size` successive parts: one per rank, in order."""
    return shards_of(cut_runs(bounds, size, zigzag=False))


def zigzag(bounds: Sequence[tuple[int, int]], size: int) -> Shards:
    """Every sequence in 2P chunks; rank r holds chunks r and 2P-1-r, so that causal work is the same on every rank.

    The convention of ring-flash-attention, torch's context_parallel and USP (not nnscaler's).
    """
    return shards_of(cut_runs(bounds, size, zigzag=True))
