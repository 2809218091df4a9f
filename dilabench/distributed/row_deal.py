"""Chunks of successive rows dealt to ranks so that each has as many of them and as much work, and what that sends.

A document is worth its area under the mask, not its length: cut in order, the ranks of a packed batch finish far apart.
The chunk that sees most pairs goes first, to the rank with the least work among those that have room (longest
processing time first; MAGI-1 deals its chunks likewise, arXiv 2505.13211). Of a causal sequence alone that is the
zigzag cut. Under a window, where successive chunks need few keys of others, they are dealt as evenly as what that sends
is worth. What is counted here is a function of the workload alone. No torch, no tensors.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from dilabench.distributed.balance import HopPairs, Interval, busiest_bytes, parts
from dilabench.patterns.counting import Reach, visible_pairs
from dilabench.workload.spec import Workload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# More chunks balance better, but cut documents into more calls: as few as bring λ this near to 1, of no fewer rows
# than a kernel's tile.
ENOUGH, FEWEST_ROWS, MOST_PER_RANK = 0.99, 128, 64
# And send more keys. While one of them comes, its K and V and nothing else, a GPU attends to about so many pairs of as
# many heads: 600 TFLOP/s over 400 GB/s of NVLink are 1500 (4·D FLOPs a pair, 4·D bytes a key of 16 bits).
PAIRS_PER_KEY = 1000
# Query heads for each key/value head where tokens are dealt before their heads are known: as in large models.
USUAL_GROUP = 8
# Keys that stand for all where deals are compared.
SAMPLED_KEYS = 2048

Runs = tuple[range, ...]


class Sight(NamedTuple):
    """Which keys rows see, so that a deal can be told what it sends.

    keys: [S] positions of some keys, which stand for all. seen_by: edges of chunks to bool [chunks, S], whether some
    row of each sees them. price: the pairs that take as long as one position whose keys come.
    """

    keys: NDArray[np.int64]
    seen_by: Callable[[Sequence[int]], NDArray[np.bool_]]
    price: float

    @classmethod
    def of_rows(cls, keys: NDArray[np.int64], first: NDArray[np.int64], stop: NDArray[np.int64], price: float) -> Sight:
        """Of keys that the rows [first, stop) see, in one interval or several: both [intervals, S]."""
        import numpy as np

        def seen_by(edges: Sequence[int]) -> NDArray[np.bool_]:
            low, high = (np.array(side)[:, None, None] for side in (edges[:-1], edges[1:]))
            found: NDArray[np.bool_] = (np.maximum(first, low) < np.minimum(stop, high)).any(1)
            return found

        return cls(keys, seen_by, price)

    def cost(self, edges: Sequence[int], owners: Sequence[int], ranks: int) -> float:
        """What the rank to which most comes waits for."""
        import numpy as np

        owner = np.array(owners)
        holder, seen = owner[np.searchsorted(edges, self.keys, side="right") - 1], self.seen_by(edges)
        shares = [(seen[owner == rank].any(0) & (holder != rank)).mean() for rank in range(ranks)]
        return self.price * edges[-1] * float(max(shares))


def sampled_keys(length: int) -> NDArray[np.int64]:
    """Positions of keys that stand for all, rising."""
    import numpy as np

    return np.unique(np.linspace(0, length - 1, SAMPLED_KEYS).astype(np.int64))


def balanced(
    length: int,
    ranks: int,
    work_of: Callable[[Sequence[int]], Sequence[float]],
    fewest: int = FEWEST_ROWS,
    sight: Sight | None = None,
) -> tuple[Runs, ...]:
    """Per rank the runs of positions that it holds, rising.

    work_of: edges of chunks to the pairs that the rows of each see. fewest: of them that a chunk may have. sight: None
    takes what is sent for nothing.
    """
    found: tuple[float, tuple[Runs, ...]] | None = None
    per_rank, evenness = 1, 0.0
    while found is None or (evenness < ENOUGH and per_rank <= MOST_PER_RANK and length >= ranks * per_rank * fewest):
        chunks = ranks * per_rank
        edges = [length * edge // chunks for edge in range(chunks + 1)]
        work = work_of(edges)
        owners = heaviest_first(work, ranks)
        loads = [sum(work[at] for at in range(chunks) if owners[at] == rank) for rank in range(ranks)]
        evenness = sum(loads) / ranks / max(loads) if max(loads) else 1.0
        cost = max(loads) + (sight.cost(edges, owners, ranks) if sight else 0.0)
        if found is None or cost < found[0]:
            found = cost, _runs(edges, owners, ranks)
        per_rank *= 2
    return found[1]


def heaviest_first(work: Sequence[float], ranks: int) -> list[int]:
    """The rank of each chunk: as many chunks for each rank, which must divide their number."""
    room = [len(work) // ranks] * ranks
    loads, owners = [0.0] * ranks, [0] * len(work)
    for chunk in sorted(range(len(work)), key=lambda at: (-work[at], at)):
        rank = min((rank for rank in range(ranks) if room[rank]), key=lambda one: (loads[one], one))
        owners[chunk] = rank
        loads[rank] += work[chunk]
        room[rank] -= 1
    return owners


def _runs(edges: Sequence[int], owners: Sequence[int], ranks: int) -> tuple[Runs, ...]:
    """Chunks that follow each other on a rank are one run; the rank of the first row is rank 0, and so on."""
    held: list[list[range]] = [[] for _ in range(ranks)]
    for (start, stop), rank in zip(pairwise(edges), owners, strict=True):
        own = held[rank]
        if own and own[-1].stop == start:
            own[-1] = range(own[-1].start, stop)
        elif start < stop:
            own.append(range(start, stop))
    return tuple(sorted(map(tuple, held), key=lambda runs: runs[0].start if runs else edges[-1]))


@dataclass(frozen=True, slots=True)
class Piece:
    """Successive rows of one rank inside one sequence, and all that they see of it."""

    rows: range
    keys: range


@dataclass(frozen=True, slots=True)
class RowDeal:
    """Who holds which rows of dense sequences, and which keys a rank must be sent: each that a row of it sees, once.

    sequences: that follow each other. held: runs of positions by rank.
    """

    sequences: Runs
    reach: Reach
    held: tuple[Runs, ...]

    @classmethod
    def of(cls, workload: Workload, ranks: int) -> RowDeal:
        """The deal of a dense workload, packed or padded, its causal mask and window considered."""
        return cls.over(workload.sequences, workload.shapes[0].reach, ranks)

    @classmethod
    def over(cls, bounds: Sequence[Interval], reach: Reach, ranks: int) -> RowDeal:
        """The deal of sequences (start, stop) that follow each other from 0."""
        return _deal(tuple(bounds), reach, ranks)

    @classmethod
    def zigzag(cls, workload: Workload, ranks: int) -> RowDeal:
        """Chunks r and 2P-1-r of 2P of each sequence on rank r."""
        held: list[list[range]] = [[] for _ in range(ranks)]
        for start, stop in workload.sequences:
            for runs, part in zip(held, parts(stop - start, ranks, zigzag=True), strict=True):
                runs += [range(start + first, start + last) for first, last in part]
        sequences = tuple(range(*bounds) for bounds in workload.sequences)
        return cls(sequences, workload.shapes[0].reach, tuple(map(united, held)))

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """A rank's rows, run by run, sequence by sequence."""
        left, right = self.reach
        found = []
        for run in self.held[rank]:
            for sequence in overlapping(self.sequences, run):
                rows = overlap(run, sequence)
                first = sequence.start if left is None else max(sequence.start, rows.start - left)
                stop = sequence.stop if right is None else min(sequence.stop, rows.stop + right)
                found.append(Piece(rows, range(first, stop)))
        return tuple(found)

    def seen(self, rank: int) -> Runs:
        """The keys that some row of a rank sees, each once, rising."""
        return united([piece.keys for piece in self.pieces(rank)])

    def moved(self, holder: int, reader: int) -> int:
        """Keys of `holder` that some row of `reader` sees: what travels between two ranks."""
        held = self.held[holder]
        return sum(len(overlap(own, seen)) for seen in self.seen(reader) for own in overlapping(held, seen))

    def pairs(self, reader: int, holder: int) -> int:
        """Visible pairs of one rank's rows and another's keys, of one head."""
        held = self.held[holder]
        return sum(
            visible_pairs(piece.rows, overlap(own, piece.keys), self.reach)
            for piece in self.pieces(reader)
            for own in overlapping(held, piece.keys)
        )


@lru_cache(maxsize=64)
def _deal(bounds: tuple[Interval, ...], reach: Reach, ranks: int) -> RowDeal:
    sequences = tuple(range(*bound) for bound in bounds)

    def work_of(edges: Sequence[int]) -> list[float]:
        chunks = (range(*chunk) for chunk in pairwise(edges))
        return [
            float(sum(visible_pairs(overlap(chunk, one), one, reach) for one in overlapping(sequences, chunk)))
            for chunk in chunks
        ]

    return RowDeal(sequences, reach, balanced(sequences[-1].stop, ranks, work_of, sight=_sight(sequences, reach)))


def _sight(sequences: Runs, reach: Reach) -> Sight | None:
    """Which keys rows see under a window. None without one: a chunk then sees far back wherever it lies, and evenness
    comes first."""
    import numpy as np

    left, right = reach
    if left is None or right is None:
        return None
    starts = np.array([one.start for one in sequences])
    keys = sampled_keys(sequences[-1].stop)
    at = np.searchsorted(starts, keys, side="right") - 1
    stops = np.array([one.stop for one in sequences])[at]
    first, stop = np.maximum(starts[at], keys - right), np.minimum(stops, keys + left + 1)
    return Sight.of_rows(keys, first[None], stop[None], PAIRS_PER_KEY / USUAL_GROUP)


def overlap(one: range, other: range) -> range:
    """What two runs share."""
    return range(max(one.start, other.start), min(one.stop, other.stop))


def overlapping(runs: Runs, one: range) -> Runs:
    """Those of rising runs that share something with another."""
    first = bisect_right(runs, one.start, key=lambda run: run.stop)
    return runs[first : bisect_left(runs, one.stop, lo=first, key=lambda run: run.start)]


def united(runs: Sequence[range]) -> Runs:
    """Runs that overlap or touch as one, rising."""
    found: list[range] = []
    for run in sorted((run for run in runs if run), key=lambda one: (one.start, one.stop)):
        if found and run.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, run.stop))
        else:
            found.append(run)
    return tuple(found)


def hop_pairs(workload: Workload, ranks: int) -> HopPairs:
    """Per rank the pairs with its own keys, with those of the rank before it, and so on, over all query heads."""
    deal = RowDeal.of(workload, ranks)
    return tuple(
        tuple(float(workload.num_heads * deal.pairs(rank, (rank - hop) % ranks)) for hop in range(ranks))
        for rank in range(ranks)
    )


def received_bytes(workload: Workload, deal: RowDeal) -> int:
    """Bytes that one call in the workload's mode brings the rank with most, as `balance.busiest_bytes`."""
    return busiest_bytes(workload, len(deal.held), deal.moved)
