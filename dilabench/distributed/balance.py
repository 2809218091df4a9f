"""The pairs that each rank computes, step by step, from the sharding alone. No torch.

With |i, j| the pairs inside positions [i, j), those between an interval [a, b) and a later one [c, d) are
|a, d| - |a, c| - |b, d| + |b, c|.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dilabench.patterns.answers import windowed_pairs
from dilabench.patterns.dilated import rows_kept
from dilabench.workload.spec import Workload

Interval = tuple[int, int]
# Per rank the pairs with its local keys, with the keys of the rank before it, of the one two before, and so on.
StepPairs = tuple[tuple[float, ...], ...]


def by_step(ranks: int, pairs: Callable[[int, int], float]) -> StepPairs:
    """The pairs of each rank by step, given the pairs of one rank's queries and another's keys."""
    return tuple(tuple(pairs(rank, (rank - step) % ranks) for step in range(ranks)) for rank in range(ranks))


def step_pairs(workload: Workload, ranks: int, zigzag: bool) -> StepPairs | None:
    """The pairs of one batch entry over all query heads, as if each kept residue 0; sequences are cut in order or
    zigzag.

    A window counts as if it were symmetric. None for a pattern that is no union of strided segments, such as block
    masks (`BlockAssignment.step_pairs`).
    """
    if any(workload.pattern.strided_segments(shape, 0) is None for shape in workload.shapes):
        return None
    lengths = Counter(end - start for start, end in workload.sequences)
    counted = [
        (parts(length, ranks, zigzag), branch, sequences * heads)
        for length, sequences in lengths.items()
        for branch, heads in _branches(workload, length).items()
    ]
    return by_step(
        ranks,
        lambda reader, owner: sum(
            (times * branch.between(held[reader], held[owner]) for held, branch, times in counted), 0.0
        ),
    )


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
        """Pairs with the query in one interval and the key in the other, in one direction."""
        (a, b), (c, d) = first, second
        both = self._inside(a, d) - self._inside(a, c) - self._inside(b, d) + self._inside(b, c)
        return both if self.causal else both / 2

    def _inside(self, start: int, stop: int) -> int:
        if start >= stop:
            return 0
        end = min(stop, (start // self.segment + 1) * self.segment)
        full, tail = divmod(stop - end, self.segment)
        return self._pairs(end - start) + full * self._pairs(self.segment) + self._pairs(tail)

    def _pairs(self, length: int) -> int:
        left, right = (side if side < 0 else side // self.rate for side in self.window)
        return windowed_pairs(rows_kept(length, self.rate, 0), self.causal, left, right)


def _branches(workload: Workload, length: int) -> Counter[_Branch]:
    """The branches in sequences of a length, with the number of query heads that take part."""
    shape = next(shape for shape in workload.shapes if shape.length == length)
    counted = Counter[_Branch]()
    for head in range(workload.num_heads):
        segments = workload.pattern.strided_segments(shape, head) or ()
        counted.update(
            _Branch(segment.segment_length, segment.rate, shape.causal, shape.window) for segment in segments
        )
    return counted


def cut_runs(bounds: Sequence[Interval], ranks: int, zigzag: bool) -> list[list[range]]:
    """By rank the runs of sequences (start, stop), each cut in order or zigzag."""
    held: list[list[range]] = [[] for _ in range(ranks)]
    for start, stop in bounds:
        for runs, part in zip(held, parts(stop - start, ranks, zigzag), strict=True):
            runs += [range(start + first, start + last) for first, last in part]
    return held


def parts(length: int, ranks: int, zigzag: bool) -> tuple[tuple[Interval, ...], ...]:
    """Positions that each rank owns: the r-th part, or chunks r and 2P-1-r of 2P (zigzag)."""
    chunks = 2 * ranks if zigzag else ranks
    edges = [length * edge // chunks for edge in range(chunks + 1)]
    pieces = list(pairwise(edges))
    if not zigzag:
        return tuple((piece,) for piece in pieces)
    return tuple((pieces[rank], pieces[-1 - rank]) for rank in range(ranks))
