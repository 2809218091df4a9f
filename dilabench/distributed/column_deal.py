"""Bounds of columns over several ranks: who holds which positions, and which keys a rank must be sent. No torch.

A key travels with all its key/value heads as soon as one local query sees it. What is counted here is a function of the
pattern, its causal mask and its window alone: the closed form of what `column-bounds-ring` moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dilabench.distributed.balance import busiest_bytes
from dilabench.distributed.row_deal import PAIRS_PER_KEY, Sight, balanced, sampled_keys
from dilabench.patterns.hidden_rows import HiddenRows
from dilabench.patterns.pattern import SequenceShape
from dilabench.workload.spec import Workload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dilabench.patterns.pattern import Positions


@dataclass(frozen=True, slots=True)
class ColumnDeal:
    """The bounds of a sequence, and the runs of positions that each rank holds."""

    hidden: HiddenRows
    shape: SequenceShape
    held: tuple[tuple[range, ...], ...]

    @classmethod
    def of(cls, workload: Workload, ranks: int) -> ColumnDeal:
        """The deal of a workload. Raises ConfigError for a file that does not fit, ValueError for another pattern."""
        (shape,) = workload.shapes
        hidden = workload.pattern.hidden_rows(shape)
        if hidden is None:
            raise ValueError(
                f"{workload.pattern.label()} has no bounds of columns; use block-sparse-ring, or one device"
            )
        return cls(hidden, shape, _held(hidden, shape, ranks))

    def own(self, rank: int) -> Positions:
        """The positions that a rank holds, rising."""
        import numpy as np

        return np.array([position for run in self.held[rank] for position in run], dtype=np.int64)

    def local(self, reader: int, keys: Positions) -> HiddenRows:
        """From which local rows of a rank some keys are hidden, causal mask and window included."""
        return self.hidden.over(self.shape, self.own(reader), keys)

    def sent(self, holder: int, reader: int) -> Positions:
        """The keys of `holder` that some query of `reader` sees, rising."""
        keys = self.own(holder)
        return keys[self.seen(reader, keys) > 0]

    def seen(self, reader: int, keys: Positions) -> NDArray[np.int64]:
        """[keys]: how many local rows of a rank see each key."""
        hidden = self.local(reader, keys)
        seen: NDArray[np.int64] = len(self.own(reader)) - (hidden.stops - hidden.starts).sum(0)
        return seen


def _held(hidden: HiddenRows, shape: SequenceShape, ranks: int) -> tuple[tuple[range, ...], ...]:
    """Chunks of positions with as much work for each rank, as far as what they send is worth it."""
    import numpy as np

    everything = np.arange(shape.length)
    seen = hidden.over(shape, everything, everything)
    edges = np.zeros(shape.length + 1, dtype=np.int64)
    np.subtract.at(edges, seen.starts, 1)
    np.add.at(edges, seen.stops, 1)
    before = np.concatenate([[0], np.cumsum(shape.length + np.cumsum(edges[:-1]))])
    # The rows that see each of some keys, in rising intervals.
    keys = sampled_keys(shape.length)
    first, stop = (
        side[:, keys] for side in seen.seen(np.zeros_like(everything), np.full_like(everything, len(before)))
    )
    sight = Sight.of_rows(keys, first, stop, PAIRS_PER_KEY * shape.num_kv_heads / shape.num_heads)
    return balanced(shape.length, ranks, lambda chunks: np.diff(before[list(chunks)]).tolist(), sight=sight)


def received_bytes(workload: Workload, ranks: int) -> int:
    """Bytes that one call in the workload's mode brings the rank with most, as `balance.busiest_bytes`."""
    deal = ColumnDeal.of(workload, ranks)
    return busiest_bytes(workload, ranks, lambda holder, reader: len(deal.sent(holder, reader)))


def hop_pairs(workload: Workload, ranks: int) -> tuple[tuple[float, ...], ...] | None:
    """Per rank the visible pairs with its own keys, with those of the rank before it, and so on, over all query heads;
    None when nothing at all is visible."""
    deal = ColumnDeal.of(workload, ranks)
    pairs = tuple(
        tuple(float(workload.num_heads * deal.seen(rank, deal.own((rank - hop) % ranks)).sum()) for hop in range(ranks))
        for rank in range(ranks)
    )
    return pairs if any(map(sum, pairs)) else None
