"""Which pairs each rank computes, hop by hop, and what the busiest is sent, from the sharding alone. No torch.

With |i, j| the pairs inside positions [i, j), those between an interval [a, b) and a later one [c, d) are
|a, d| - |a, c| - |b, d| + |b, c|.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from dilabench.patterns.counting import windowed_pairs
from dilabench.patterns.dilated import rows_kept
from dilabench.workload.spec import DTYPE_BYTES, Workload

Interval = tuple[int, int]
HopPairs = tuple[tuple[float, ...], ...]


def hop_pairs(workload: Workload, ranks: int, zigzag: bool) -> HopPairs | None:
    """Per rank the pairs with its own keys, with those of the rank before it, of the one two before it, and so on.

    Of one batch entry, over all query heads as if each kept residue 0; sequences are cut in order or zigzag. A window
    that is not the same on both sides counts as if it were. None for a pattern that is no union of strided segments,
    as block masks are (`block_deal.hop_pairs`).
    """
    if any(workload.pattern.strided_segments(shape, 0) is None for shape in workload.shapes):
        return None
    pairs = [[0.0] * ranks for _ in range(ranks)]
    lengths = Counter(end - start for start, end in workload.sequences)
    for length, sequences in lengths.items():
        held = parts(length, ranks, zigzag)
        for branch, heads in _branches(workload, length).items():
            for rank in range(ranks):
                for hop in range(ranks):
                    holder = (rank - hop) % ranks
                    pairs[rank][hop] += sequences * heads * branch.between(held[rank], held[holder])
    return tuple(map(tuple, pairs))


@dataclass(frozen=True, slots=True)
class _Branch:
    """Segments of `segment` positions of which every `rate`-th is kept; dense attention is one segment at rate 1."""

    segment: int
    rate: int
    causal: bool
    window: tuple[int, int]

    def between(self, queries: tuple[Interval, ...], keys: tuple[Interval, ...]) -> float:
        """Pairs of queries in some intervals with keys in the same or in other ones."""
        total = 0.0
        for query in queries:
            for key in keys:
                if key == query:
                    total += self._inside(*query)
                elif key < query:
                    total += self._apart(key, query)
                elif not self.causal:
                    total += self._apart(query, key)
        return total

    def _apart(self, first: Interval, second: Interval) -> float:
        """Pairs with the query in one interval and the key in the other, in one of both ways round."""
        (a, b), (c, d) = first, second
        both = self._inside(a, d) - self._inside(a, c) - self._inside(b, d) + self._inside(b, c)
        return both if self.causal else both / 2

    def _inside(self, start: int, stop: int) -> int:
        if start >= stop:
            return 0
        end = min(stop, (start // self.segment + 1) * self.segment)
        full, rest = divmod(stop - end, self.segment)
        return self._pairs(end - start) + full * self._pairs(self.segment) + self._pairs(rest)

    def _pairs(self, length: int) -> int:
        left, right = (side if side < 0 else side // self.rate for side in self.window)
        return windowed_pairs(rows_kept(length, self.rate, 0), self.causal, left, right)


def _branches(workload: Workload, length: int) -> Counter[_Branch]:
    """The branches in sequences of a length, with the number of query heads that take part."""
    shape = next(shape for shape in workload.shapes if shape.length == length)
    counted = Counter[_Branch]()
    for head in range(workload.num_heads):
        segments = workload.pattern.strided_segments(shape, head) or ()
        counted.update(_Branch(one.segment_length, one.rate, shape.causal, shape.window) for one in segments)
    return counted


def parts(length: int, ranks: int, zigzag: bool) -> tuple[tuple[Interval, ...], ...]:
    """Positions that each rank holds, as `dilabench.distributed.sharding` cuts them."""
    chunks = 2 * ranks if zigzag else ranks
    edges = [length * edge // chunks for edge in range(chunks + 1)]
    pieces = list(pairwise(edges))
    if not zigzag:
        return tuple((piece,) for piece in pieces)
    return tuple((pieces[rank], pieces[-1 - rank]) for rank in range(ranks))


def busiest_bytes(workload: Workload, ranks: int, rows_moved: Callable[[int, int], int], heads: int = 1) -> int:
    """Bytes that one call brings the rank with most where rows of K and V travel, and their gradients come back.

    rows_moved: what a holder sends a reader, in rows of all key/value heads, or of one of so many parts of `heads`.
    """
    import numpy as np

    everyone = range(ranks)
    moved = np.array([[rows_moved(a, b) if a != b else 0 for b in everyone] for a in everyone], dtype=np.int64)
    keys, gradients = moved.sum(0), moved.sum(1)
    rows = int((keys * (workload.mode != "backward") + gradients * (workload.mode != "forward")).max())
    vector = workload.num_kv_heads // heads * workload.head_dim * DTYPE_BYTES[workload.dtype]
    return 2 * workload.batch_size * vector * rows
