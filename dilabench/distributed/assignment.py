"""Chunks of rows assigned to ranks so that each has equal numbers and equal work, and the messages that this causes.

The work of a document is its area under the mask: cut in order, the ranks of a packed batch have very unequal work.
The chunk that sees most pairs goes first, to the rank with the least work among those with capacity left (longest
processing time first; MAGI-1 assigns its chunks likewise, arXiv 2505.13211). For a single causal sequence that is the
zigzag cut. Under a window, where successive chunks need few keys of others, balance is weighed against the keys sent.
All counts are functions of the workload alone. No torch, no tensors.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dilabench.distributed.balance import StepPairs, by_step
from dilabench.workload.spec import DTYPE_BYTES, Workload

# More chunks balance better but need more calls: the fewest chunks that bring λ this near to 1, of at least a kernel's
# tile of rows.
ENOUGH, FEWEST_ROWS, MOST_PER_RANK = 0.99, 128, 64
# More chunks also send more keys. While a key's K and V arrive, a GPU computes about this many pairs per head:
# 600 TFLOP/s over 400 GB/s of NVLink are 1500 (4·D FLOPs a pair, 4·D bytes a key of 16 bits).
PAIRS_PER_KEY = 1000

Runs = tuple[range, ...]
Edges = NDArray[np.int64]


@dataclass(frozen=True)
class Assignment(ABC):
    """The rows that each rank owns, and the rows of K and V that it receives: each that some of its queries sees, once.

    held: runs, in ascending order, by rank. parts: 1, or the number of parts of a row's key/value heads, each sent
    separately.
    """

    held: tuple[Runs, ...]
    parts: int

    @abstractmethod
    def pairs(self, reader: int, owner: int) -> float:
        """Visible pairs of one rank's queries and another's keys, over all query heads."""

    @abstractmethod
    def moved(self, owner: int, reader: int) -> int:
        """Number of rows, or parts of rows, that `owner` sends to `reader`: those that some query of `reader` sees."""

    def step_pairs(self) -> StepPairs:
        """Per rank the pairs with its local keys, with the keys of the rank before it, and so on."""
        return by_step(len(self.held), self.pairs)

    def received_bytes(self, workload: Workload) -> int:
        """Bytes that the rank with most receives in one call in the workload's mode.

        Forward: K and V. Backward: dK and dV of the rows it has sent, in the dtype of K; keys stay from the forward
        pass.
        """
        everyone = range(len(self.held))
        moved = np.array([[self.moved(a, b) if a != b else 0 for b in everyone] for a in everyone], dtype=np.int64)
        keys, gradients = moved.sum(0), moved.sum(1)
        rows = int((keys * (workload.mode != "backward") + gradients * (workload.mode != "forward")).max())
        vector = workload.num_kv_heads // self.parts * workload.head_dim * DTYPE_BYTES[workload.dtype]
        return 2 * workload.batch_size * vector * rows


class Sight(NamedTuple):
    """The keys that rows see, to compare assignments by the keys they send.

    keys: [S] positions of sampled keys. seen_by: edges of chunks to bool [chunks, S], True if some row of the chunk
    sees the key. price: the number of pairs that take as long as receiving one position.
    """

    keys: Edges
    seen_by: Callable[[Edges], NDArray[np.bool_]]
    price: float

    def cost(self, edges: Edges, owners: NDArray[np.int64], ranks: int) -> float:
        """Return the receive cost of the rank that receives the most keys, in (query, key) pairs."""
        key_owner, seen = owners[np.searchsorted(edges, self.keys, side="right") - 1], self.seen_by(edges)
        shares = [(seen[owners == rank].any(0) & (key_owner != rank)).mean() for rank in range(ranks)]
        return self.price * int(edges[-1]) * float(max(shares))


def balanced(
    length: int,
    ranks: int,
    work_of: Callable[[Edges], NDArray[np.float64]],
    fewest: int = FEWEST_ROWS,
    sight: Sight | None = None,
) -> tuple[Runs, ...]:
    """Return the runs of positions of each rank, in ascending order.

    work_of: edges of chunks to the pairs that are computed for the rows of each. fewest: minimum rows of a chunk.
    sight: None ignores the cost of sending.
    """
    best: tuple[float, Edges, NDArray[np.int64]] | None = None
    per_rank, evenness = 1, 0.0
    while best is None or (evenness < ENOUGH and per_rank <= MOST_PER_RANK and length >= ranks * per_rank * fewest):
        chunks = ranks * per_rank
        edges = length * np.arange(chunks + 1) // chunks
        work = work_of(edges)
        owners = np.array(heaviest_first(work.tolist(), ranks))
        loads = np.bincount(owners, weights=work, minlength=ranks)
        evenness = float(loads.mean() / loads.max()) if loads.any() else 1.0
        cost = float(loads.max()) + (sight.cost(edges, owners, ranks) if sight else 0.0)
        if best is None or cost < best[0]:
            best = cost, edges, owners
        per_rank *= 2
    return _runs(best[1], best[2], ranks)


def heaviest_first(work: Sequence[float], ranks: int) -> list[int]:
    """The rank of each chunk: equally many chunks per rank; the number of ranks must divide theirs."""
    capacity = [len(work) // ranks] * ranks
    owners = [0] * len(work)
    # The rank with the least work comes first; one without capacity leaves the heap.
    loads = [(0.0, rank) for rank in range(ranks)]
    for chunk in sorted(range(len(work)), key=lambda at: (-work[at], at)):
        load, owner = loads[0]
        owners[chunk] = owner
        capacity[owner] -= 1
        if capacity[owner]:
            heapq.heapreplace(loads, (load + work[chunk], owner))
        else:
            heapq.heappop(loads)
    return owners


def _runs(edges: Edges, owners: NDArray[np.int64], ranks: int) -> tuple[Runs, ...]:
    """Join consecutive chunks of a rank into runs; ranks are renumbered in the order of their first rows."""
    changes = np.flatnonzero(np.diff(owners)) + 1
    starts = edges[np.concatenate([[0], changes])].tolist()
    stops = [*starts[1:], int(edges[-1])]
    held: list[list[range]] = [[] for _ in range(ranks)]
    for start, stop, rank in zip(starts, stops, owners[np.concatenate([[0], changes])].tolist(), strict=True):
        if start < stop:
            held[rank].append(range(start, stop))
    return tuple(sorted(map(tuple, held), key=lambda runs: runs[0].start if runs else stops[-1]))
