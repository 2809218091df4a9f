"""Rows of dense sequences over several ranks, packed or padded: their owners, and the keys that a rank receives.

A packing has hundreds of sequences and is new in every step, so intervals are arrays [n, 2] of (start, stop).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dilabench.distributed.assignment import FEWEST_ROWS, PAIRS_PER_KEY, Assignment, Edges, Runs, Sight, balanced
from dilabench.distributed.balance import Interval, cut_runs
from dilabench.patterns.answers import Reach, reach_of
from dilabench.workload.spec import Workload

# Query heads per key/value head, as in large models, if tokens are assigned before their heads are known.
USUAL_GROUP = 8
# Keys that are sampled to compare assignments.
SAMPLED_KEYS = 2048
# Rows, and keys, that a kernel computes together, and most blocks of rows whose tiles are counted.
TILE, MOST_BLOCKS = FEWEST_ROWS, 4096

Intervals = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RowAssignment(Assignment):
    """The owners of positions of consecutive `sequences`, under a mask's reach, with `num_heads` heads.

    own: the rows of each rank. pieces: by rank its rows, cut where sequences begin, and all keys that the rows of each
    piece see. seen: by rank the keys that some of its rows see, in ascending order.
    """

    sequences: Intervals
    reach: Reach
    num_heads: int
    own: tuple[Intervals, ...]
    pieces: tuple[tuple[Intervals, Intervals], ...]
    seen: tuple[Intervals, ...]

    @classmethod
    def of(cls, workload: Workload, ranks: int) -> RowAssignment:
        """Assign by the work of a dense workload, packed or padded, under its causal mask and window."""
        return cls.over(balanced_rows(workload.sequences, reach_of(workload.window, workload.causal), ranks), workload)

    @classmethod
    def zigzag(cls, workload: Workload, ranks: int) -> RowAssignment:
        """Chunks r and 2P-1-r of 2P of each sequence on rank r."""
        return cls.over(tuple(map(united, cut_runs(workload.sequences, ranks, zigzag=True))), workload)

    @classmethod
    def over(cls, held: tuple[Runs, ...], workload: Workload) -> RowAssignment:
        """The assignment of given runs."""
        sequences, reach = np.array(workload.sequences), reach_of(workload.window, workload.causal)
        own = tuple(intervals_of(runs) for runs in held)
        pieces = tuple(_pieces(rows, sequences, reach) for rows in own)
        seen = tuple(_joined(keys) for _, keys in pieces)
        return cls(held, 1, sequences, reach, workload.num_heads, own, pieces, seen)

    def sent(self, owner: int, reader: int) -> Intervals:
        """The keys of `owner` that some row of `reader` sees, each once, in ascending order."""
        return shared(self.own[owner], self.seen[reader])

    def moved(self, owner: int, reader: int) -> int:
        """Like `Assignment.moved`, also for a rank's local keys."""
        return int(lengths(self.sent(owner, reader)).sum())

    def pairs(self, reader: int, owner: int) -> float:
        """As `Assignment.pairs`."""
        rows, keys = self.pieces[reader]
        at, keys = overlaps(keys, self.own[owner])
        return float(self.num_heads) * int(_visible(rows[at], keys, self.reach).sum())

    def tiles(self, rank: int) -> int:
        """The tiles of `TILE` rows and keys that a kernel computes for a rank's pieces, of each head."""
        return int(_tiles(*self.pieces[rank], self.sequences, self.reach, TILE).sum())


@lru_cache(maxsize=64)
def balanced_rows(bounds: tuple[Interval, ...], reach: Reach, ranks: int) -> tuple[Runs, ...]:
    """The runs of each rank for consecutive dense sequences (start, stop) from 0.

    Balanced are visible pairs; without a window the mean of them and the pairs in all tiles that a kernel computes,
    which short documents fill badly.
    """
    sequences, length = np.array(bounds), bounds[-1][1]
    block = TILE * -(-length // (TILE * MOST_BLOCKS))
    sight = _sight(sequences, reach)

    def work_of(edges: Edges) -> NDArray[np.float64]:
        chunks = np.stack([edges[:-1], edges[1:]], axis=1)
        rows, keys = _pieces(chunks, sequences, reach)
        pairs = _by_chunk(edges, rows[:, 0], _visible(rows, keys, reach))
        if sight is not None:
            return pairs
        tiles = _by_chunk(edges, rows[:, 0], _tiles(rows, keys, sequences, reach, block))
        return (pairs + float(block * block) * tiles) / 2

    return balanced(length, ranks, work_of, sight=sight)


def _by_chunk(edges: Edges, starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """The sum of counts in each chunk, given where they start."""
    chunks = np.searchsorted(edges, starts, side="right") - 1
    sums: NDArray[np.float64] = np.bincount(chunks, weights=counts, minlength=len(edges) - 1).astype(np.float64)
    return sums


def _sight(sequences: Intervals, reach: Reach) -> Sight | None:
    """The sight under a window. None without one: every chunk then sees far back, and balance alone decides."""
    left, right = reach
    if left is None or right is None:
        return None
    keys = np.unique(np.linspace(0, sequences[-1, 1] - 1, SAMPLED_KEYS).astype(np.int64))
    starts, stops = sequences[np.searchsorted(sequences[:, 0], keys, side="right") - 1].T
    first, stop = np.maximum(starts, keys - right), np.minimum(stops, keys + left + 1)

    def seen_by(edges: Edges) -> NDArray[np.bool_]:
        seen: NDArray[np.bool_] = np.maximum(first, edges[:-1, None]) < np.minimum(stop, edges[1:, None])
        return seen

    return Sight(keys, seen_by, PAIRS_PER_KEY / USUAL_GROUP)


def intervals_of(runs: Sequence[range]) -> Intervals:
    """Runs as intervals."""
    return np.array([(run.start, run.stop) for run in runs], dtype=np.int64).reshape(-1, 2)


def lengths(intervals: Intervals) -> NDArray[np.int64]:
    """The number of positions of each interval."""
    return intervals[:, 1] - intervals[:, 0]


def overlaps(intervals: Intervals, others: Intervals) -> tuple[NDArray[np.int64], Intervals]:
    """Each overlap of an interval with one of ascending disjoint `others`: the interval's number, and the overlap."""
    first = np.searchsorted(others[:, 1], intervals[:, 0], side="right")
    count = np.maximum(0, np.searchsorted(others[:, 0], intervals[:, 1], side="left") - first)
    at, nth = repeated(count)
    other = others[first[at] + nth]
    return at, np.stack([np.maximum(intervals[at, 0], other[:, 0]), np.minimum(intervals[at, 1], other[:, 1])], axis=1)


def shared(intervals: Intervals, others: Intervals) -> Intervals:
    """The overlaps of two sets of ascending disjoint intervals."""
    return overlaps(intervals, others)[1]


def repeated(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each number i `counts[i]` times, and the numbers 0, 1, ... within each."""
    at = np.repeat(np.arange(len(counts)), counts)
    return at, np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)


def united(runs: Sequence[range]) -> Runs:
    """Join runs that overlap or touch, in ascending order."""
    joined: list[range] = []
    for run in sorted(filter(None, runs), key=lambda run: (run.start, run.stop)):
        if joined and run.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, run.stop))
        else:
            joined.append(run)
    return tuple(joined)


def _joined(intervals: Intervals) -> Intervals:
    """Intervals with ascending starts and stops; those that overlap or touch are one."""
    apart = np.flatnonzero(intervals[1:, 0] > intervals[:-1, 1]) + 1
    first, last = np.concatenate([[0], apart]), np.concatenate([apart, [len(intervals)]]) - 1
    return np.stack([intervals[first, 0], intervals[last, 1]], axis=1) if len(intervals) else intervals


def _pieces(own: Intervals, sequences: Intervals, reach: Reach) -> tuple[Intervals, Intervals]:
    """Rows cut where sequences begin, and the keys that each piece sees."""
    _, rows = overlaps(own, sequences)
    return rows, _keys_of(rows, sequences, reach)


def _keys_of(rows: Intervals, sequences: Intervals, reach: Reach) -> Intervals:
    """The keys that rows of one sequence each see."""
    left, right = reach
    first, stop = sequences[np.searchsorted(sequences[:, 0], rows[:, 0], side="right") - 1].T
    if left is not None:
        first = np.maximum(first, rows[:, 0] - left)
    if right is not None:
        stop = np.minimum(stop, rows[:, 1] + right)
    return np.stack([first, stop], axis=1)


def _tiles(rows: Intervals, keys: Intervals, sequences: Intervals, reach: Reach, size: int) -> NDArray[np.int64]:
    """The tiles of `size` keys that the blocks of at most `size` rows of each piece see."""
    if reach == (None, 0):
        # Block j of a piece sees the tiles before the piece and j + 1 of its own; a short last block sees them all.
        before, (full, rest) = rows[:, 0] - keys[:, 0], np.divmod(lengths(rows), size)
        return full * (full + 1) // 2 + full * -(-before // size) + (rest > 0) * -(-lengths(keys) // size)
    at, nth = repeated(-(-lengths(rows) // size))
    starts = rows[at, 0] + size * nth
    blocks = np.stack([starts, np.minimum(starts + size, rows[at, 1])], axis=1)
    tiles = -(-lengths(_keys_of(blocks, sequences, reach)) // size)
    return np.bincount(at, weights=tiles, minlength=len(rows)).astype(np.int64)


def _visible(rows: Intervals, keys: Intervals, reach: Reach) -> NDArray[np.int64]:
    """As `answers.visible_pairs`, of arrays."""
    left, right = reach
    until = lengths(rows) * lengths(keys) if right is None else _up_to(rows, keys, right)
    return until if left is None else until - _up_to(rows, keys, -left - 1)


def _up_to(rows: Intervals, keys: Intervals, ahead: int) -> NDArray[np.int64]:
    """Pairs with u <= t + ahead: the sum over rows of t + ahead + 1 - first key, clamped to [0, number of keys]."""
    shifted, top = rows + (ahead + 1 - keys[:, :1]), lengths(keys)
    # The sum of min(t, top) over 0 <= t < stop, at both ends.
    stop = np.maximum(0, shifted)
    rising = np.minimum(stop, top[:, None] + 1)
    sums = rising * (rising - 1) // 2 + np.maximum(0, stop - top[:, None] - 1) * top[:, None]
    return sums[:, 1] - sums[:, 0]
