"""Chunks of rows assigned to ranks so that each has equal numbers and equal work, and the messages that this causes.

The work of a document is its area under the mask: cut in order, the ranks of a packed batch have very unequal work.
The chunk that sees most pairs goes first, to the rank with the least work among those with capacity left (longest
processing time first; MAGI-1 assigns its chunks likewise, arXiv 2505.13211). For a single causal sequence that is the
zigzag cut. Under a window, where successive chunks need few keys of others, balance is weighed against the keys sent.
All counts are functions of the workload alone. No torch, no tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from dilabench.distributed.balance import StepPairs, by_step
from dilabench.workload.spec import DTYPE_BYTES, Workload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# More chunks balance better but need more calls: the fewest chunks that bring λ this near to 1, of at least a kernel's
# tile of rows.
ENOUGH, FEWEST_ROWS, MOST_PER_RANK = 0.99, 128, 64
# More chunks also send more keys. While a key's K and V arrive, a GPU computes about this many pairs per head:
# 600 TFLOP/s over 400 GB/s of NVLink are 1500 (4·D FLOPs a pair, 4·D bytes a key of 16 bits).
PAIRS_PER_KEY = 1000

Runs = tuple[range, ...]


@dataclass(frozen=True, slots=True)
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
        """Per rank the pairs with its local keys, with those of the rank before it, and so on."""
        return by_step(len(self.held), self.pairs)

    def received_bytes(self, workload: Workload) -> int:
        """Bytes that the rank with most receives in one call in the workload's mode.

        Forward: K and V. Backward: dK and dV of the rows it has sent, in the dtype of K; keys stay from the forward
        pass.
        """
        import numpy as np

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

    keys: NDArray[np.int64]
    seen_by: Callable[[Sequence[int]], NDArray[np.bool_]]
    price: float

    def cost(self, edges: Sequence[int], owners: Sequence[int], ranks: int) -> float:
        """Return the receive cost of the rank that receives the most keys, in (query, key) pairs."""
        import numpy as np

        owner = np.array(owners)
        key_owner, seen = owner[np.searchsorted(edges, self.keys, side="right") - 1], self.seen_by(edges)
        shares = [(seen[owner == rank].any(0) & (key_owner != rank)).mean() for rank in range(ranks)]
        return self.price * edges[-1] * float(max(shares))


def balanced(
    length: int,
    ranks: int,
    work_of: Callable[[Sequence[int]], Sequence[float]],
    fewest: int = FEWEST_ROWS,
    sight: Sight | None = None,
) -> tuple[Runs, ...]:
    """Return the runs of positions of each rank, in ascending order.

    work_of: edges of chunks to the pairs that the rows of each see. fewest: minimum rows of a chunk. sight: None
    ignores the cost of sending.
    """
    best: tuple[float, tuple[Runs, ...]] | None = None
    per_rank, evenness = 1, 0.0
    while best is None or (evenness < ENOUGH and per_rank <= MOST_PER_RANK and length >= ranks * per_rank * fewest):
        chunks = ranks * per_rank
        edges = [length * edge // chunks for edge in range(chunks + 1)]
        work = work_of(edges)
        owners = heaviest_first(work, ranks)
        loads = [sum(work[at] for at in range(chunks) if owners[at] == rank) for rank in range(ranks)]
        evenness = sum(loads) / ranks / max(loads) if max(loads) else 1.0
        cost = max(loads) + (sight.cost(edges, owners, ranks) if sight else 0.0)
        if best is None or cost < best[0]:
            best = cost, _runs(edges, owners, ranks)
        per_rank *= 2
    return best[1]


def heaviest_first(work: Sequence[float], ranks: int) -> list[int]:
    """The rank of each chunk: equally many chunks per rank; the number of ranks must divide theirs."""
    capacity = [len(work) // ranks] * ranks
    loads, owners = [0.0] * ranks, [0] * len(work)
    for chunk in sorted(range(len(work)), key=lambda at: (-work[at], at)):
        owner = min((rank for rank in range(ranks) if capacity[rank]), key=lambda rank: (loads[rank], rank))
        owners[chunk] = owner
        loads[owner] += work[chunk]
        capacity[owner] -= 1
    return owners


def _runs(edges: Sequence[int], owners: Sequence[int], ranks: int) -> tuple[Runs, ...]:
    """Join consecutive chunks of a rank into runs; ranks are renumbered in the order of their first rows."""
    held: list[list[range]] = [[] for _ in range(ranks)]
    for (start, stop), rank in zip(pairwise(edges), owners, strict=True):
        of_rank = held[rank]
        if of_rank and of_rank[-1].stop == start:
            of_rank[-1] = range(of_rank[-1].start, stop)
        elif start < stop:
            of_rank.append(range(start, stop))
    return tuple(sorted(map(tuple, held), key=lambda runs: runs[0].start if runs else edges[-1]))
