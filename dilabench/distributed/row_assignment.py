"""Rows of dense sequences over several ranks, packed or padded: their owners, and the keys that a rank receives."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from dilabench.distributed.assignment import PAIRS_PER_KEY, Assignment, Runs, Sight, balanced
from dilabench.distributed.balance import Interval, cut_runs
from dilabench.patterns.answers import Reach, visible_pairs
from dilabench.workload.spec import Workload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Query heads per key/value head, as in large models, if tokens are assigned before their heads are known.
USUAL_GROUP = 8
# Keys that are sampled to compare assignments.
SAMPLED_KEYS = 2048


class Piece(NamedTuple):
    """Successive rows of one rank inside one sequence, and all keys that they see."""

    rows: range
    keys: range


@dataclass(frozen=True, slots=True)
class RowAssignment(Assignment):
    """The owners of positions of consecutive `sequences`, under a mask's reach, with `num_heads` heads."""

    sequences: Runs
    reach: Reach
    num_heads: int

    @classmethod
    def of(cls, workload: Workload, ranks: int) -> RowAssignment:
        """Assign by the work of a dense workload, packed or padded, under its causal mask and window."""
        return cls.over(balanced_rows(workload.sequences, workload.shapes[0].reach, ranks), workload)

    @classmethod
    def zigzag(cls, workload: Workload, ranks: int) -> RowAssignment:
        """Chunks r and 2P-1-r of 2P of each sequence on rank r."""
        return cls.over(tuple(map(united, cut_runs(workload.sequences, ranks, zigzag=True))), workload)

    @classmethod
    def over(cls, held: tuple[Runs, ...], workload: Workload) -> RowAssignment:
        """The assignment of given runs."""
        sequences = tuple(range(*bounds) for bounds in workload.sequences)
        return cls(held, 1, sequences, workload.shapes[0].reach, workload.num_heads)

    def pieces(self, rank: int) -> list[Piece]:
        """A rank's rows, run by run, sequence by sequence."""
        left, right = self.reach
        pieces = []
        for run in self.held[rank]:
            for sequence in overlapping(self.sequences, run):
                rows = overlap(run, sequence)
                first = sequence.start if left is None else max(sequence.start, rows.start - left)
                stop = sequence.stop if right is None else min(sequence.stop, rows.stop + right)
                pieces.append(Piece(rows, range(first, stop)))
        return pieces

    def sent(self, owner: int, reader: int) -> Runs:
        """The keys of `owner` that some row of `reader` sees, each once, in ascending order."""
        held, seen = self.held[owner], united([piece.keys for piece in self.pieces(reader)])
        return tuple(overlap(run, keys) for run in held for keys in overlapping(seen, run))

    def moved(self, owner: int, reader: int) -> int:
        """Like `Assignment.moved`, also for a rank's local keys."""
        return sum(map(len, self.sent(owner, reader)))

    def pairs(self, reader: int, owner: int) -> float:
        """As `Assignment.pairs`."""
        held = self.held[owner]
        return float(self.num_heads) * sum(
            visible_pairs(piece.rows, overlap(run, piece.keys), self.reach)
            for piece in self.pieces(reader)
            for run in overlapping(held, piece.keys)
        )


@lru_cache(maxsize=64)
def balanced_rows(bounds: tuple[Interval, ...], reach: Reach, ranks: int) -> tuple[Runs, ...]:
    """The runs of each rank for consecutive dense sequences (start, stop) from 0."""
    sequences = tuple(range(*bound) for bound in bounds)

    def work_of(edges: Sequence[int]) -> list[float]:
        chunks = (range(*chunk) for chunk in pairwise(edges))
        return [
            float(sum(visible_pairs(overlap(chunk, keys), keys, reach) for keys in overlapping(sequences, chunk)))
            for chunk in chunks
        ]

    return balanced(sequences[-1].stop, ranks, work_of, sight=_sight(sequences, reach))


def _sight(sequences: Runs, reach: Reach) -> Sight | None:
    """The sight under a window. None without one: every chunk then sees far back, and balance alone decides."""
    import numpy as np

    left, right = reach
    if left is None or right is None:
        return None
    starts, stops = np.array([(sequence.start, sequence.stop) for sequence in sequences]).T
    keys = np.unique(np.linspace(0, sequences[-1].stop - 1, SAMPLED_KEYS).astype(np.int64))
    at = np.searchsorted(starts, keys, side="right") - 1
    first, stop = np.maximum(starts[at], keys - right), np.minimum(stops[at], keys + left + 1)

    def seen_by(edges: Sequence[int]) -> NDArray[np.bool_]:
        low, high = (np.array(side)[:, None] for side in (edges[:-1], edges[1:]))
        seen: NDArray[np.bool_] = np.maximum(first, low) < np.minimum(stop, high)
        return seen

    return Sight(keys, seen_by, PAIRS_PER_KEY / USUAL_GROUP)


def overlap(run: range, other: range) -> range:
    """The intersection of two runs."""
    return range(max(run.start, other.start), min(run.stop, other.stop))


def overlapping(runs: Runs, other: range) -> Runs:
    """The ascending runs that intersect another."""
    first = bisect_right(runs, other.start, key=lambda run: run.stop)
    return runs[first : bisect_left(runs, other.stop, lo=first, key=lambda run: run.start)]


def united(runs: Sequence[range]) -> Runs:
    """Join runs that overlap or touch, in ascending order."""
    joined: list[range] = []
    for run in sorted(filter(None, runs), key=lambda run: (run.start, run.stop)):
        if joined and run.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, run.stop))
        else:
            joined.append(run)
    return tuple(joined)
