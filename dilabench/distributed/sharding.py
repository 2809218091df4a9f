"""Which rank holds which positions of a sequence, and how tensors are cut up and put together again.

A rank's part is a tuple of spans, in the order of its local rows. Parts differ in size where N does not divide: nothing
is padded, so padding cannot be attended. Spans of a rank always rise, so local order is global order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """Positions [start, stop); the first is row `row` of the rank that holds it."""

    start: int
    stop: int
    row: int = 0

    @property
    def length(self) -> int:
        """How many positions."""
        return max(0, self.stop - self.start)


@dataclass(frozen=True)
class Shards:
    """The spans of every rank."""

    parts: tuple[tuple[Span, ...], ...]

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.parts)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Positions that each rank holds."""
        return tuple(sum(span.length for span in part) for part in self.parts)

    def held(self, positions: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Which of some positions ([R] int64, on the CPU) a rank holds: their indices in `positions`, and its rows."""
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
        found = [shard.shape[dim] for shard in shards]
        if found != list(self.rows):
            raise ValueError(f"ranks hold {list(self.rows)} rows, but the shards have {found}")
        shape = list(shards[0].shape)
        shape[dim] = sum(self.rows)
        whole = shards[0].new_empty(shape)
        for part, shard in zip(self.parts, shards, strict=True):
            for span in part:
                whole.narrow(dim, span.start, span.length).copy_(shard.narrow(dim, span.row, span.length))
        return whole


def shards_of(held: Sequence[Sequence[range]]) -> Shards:
    """Shards of the runs of positions that each rank holds, in its order of rows."""
    parts: list[list[Span]] = [[] for _ in held]
    for part, runs in zip(parts, held, strict=True):
        for run in runs:
            _hold(part, run.start, run.stop)
    return Shards(tuple(map(tuple, parts)))


# Bounds of sequences and a number of ranks to what each rank holds.
Cut = Callable[[Sequence[tuple[int, int]], int], Shards]


def contiguous(bounds: Sequence[tuple[int, int]], size: int) -> Shards:
    """Every sequence (start, end) in `size` successive parts: one per rank, in order."""
    return _dealt(bounds, size, size, lambda chunk: chunk)


def zigzag(bounds: Sequence[tuple[int, int]], size: int) -> Shards:
    """Every sequence in 2P chunks; rank r holds chunks r and 2P-1-r, so that causal work is the same on every rank.

    The convention of ring-flash-attention, torch's context_parallel and USP (not nnscaler's).
    """
    return _dealt(bounds, size, 2 * size, lambda chunk: min(chunk, 2 * size - 1 - chunk))


def _dealt(bounds: Sequence[tuple[int, int]], size: int, chunks: int, owner: Callable[[int], int]) -> Shards:
    parts: list[list[Span]] = [[] for _ in range(size)]
    for start, end in bounds:
        for chunk in range(chunks):
            edges = [start + (end - start) * edge // chunks for edge in (chunk, chunk + 1)]
            _hold(parts[owner(chunk)], *edges)
    return Shards(tuple(map(tuple, parts)))


def _hold(part: list[Span], start: int, stop: int) -> None:
    """Add a span to a rank's part; adjacent spans are joined, empty ones left out."""
    if start >= stop:
        return
    row = part[-1].row + part[-1].length if part else 0
    if part and part[-1].stop == start:
        part[-1] = Span(part[-1].start, stop, part[-1].row)
    else:
        part.append(Span(start, stop, row))
