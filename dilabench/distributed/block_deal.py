"""Blocks over several ranks: who holds which, what a rank must be sent, and what it computes. No torch.

Ranks hold whole blocks, so that a block of another rank lies wholly before or wholly behind each local query. They are
dealt by the pairs that their rows see, as far as what that sends is worth it. A block travels once to each rank of
which some query sees it: with all its key/value heads where all query heads share a mask, otherwise with those alone
whose queries see it, as after a selection. What is counted here is a function of the mask alone: the closed form of
what `block-sparse-ring` moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dilabench.distributed.balance import busiest_bytes
from dilabench.distributed.row_deal import PAIRS_PER_KEY, Sight, balanced
from dilabench.patterns.block_masks import needed_key_blocks
from dilabench.workload.spec import Workload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dilabench.patterns.block_masks import Mask

    Blocks = NDArray[np.int64]

# That stand for all where deals are compared.
SAMPLED_PARCELS = 1024


@dataclass(frozen=True, slots=True)
class BlockDeal:
    """A mask [heads or 1, n, n] over blocks of `block_size` of `rows` rows, and who holds and needs which blocks.

    heads: in how many parts the key/value heads of a block travel, 1 or each by itself; part h of block b is the parcel
    b·heads + h. held: runs of blocks by rank. needed: the parcels that some query of each rank sees, its own ones too,
    rising.
    """

    mask: Mask
    block_size: int
    rows: int
    heads: int
    held: tuple[tuple[range, ...], ...]
    needed: tuple[Blocks, ...]

    @classmethod
    def of(cls, workload: Workload, ranks: int) -> BlockDeal:
        """The deal of a workload. Raises ConfigError for a file that does not fit, ValueError for another pattern."""
        (shape,) = workload.shapes
        blocks = workload.pattern.whole_blocks(shape)
        if blocks is None:
            raise ValueError(
                f"{workload.pattern.label()} is no mask of whole blocks: those of a block mask over dilated branches "
                "have rows that lie apart, on no rank as a whole; use block-sparse on one device"
            )
        size, mask = blocks.block_size, blocks.mask
        heads = 1 if len(mask) == 1 else workload.num_kv_heads
        work = _work(mask, size, shape.length, workload.causal)
        # A block is a tile or several: chunks of one are no more calls than longer ones.
        price = PAIRS_PER_KEY * size * len(mask) / workload.group_size
        held = balanced(mask.shape[-1], ranks, work, fewest=1, sight=_sight(mask, heads, price))
        spans = [[range(run.start * size, run.stop * size) for run in runs] for runs in held]
        return cls(mask, size, shape.length, heads, held, tuple(_needed(mask, heads, size, part) for part in spans))

    @property
    def positions(self) -> tuple[tuple[range, ...], ...]:
        """Runs of positions by rank."""
        size = self.block_size
        return tuple(tuple(range(r.start * size, min(self.rows, r.stop * size)) for r in runs) for runs in self.held)

    @property
    def sizes(self) -> Blocks:
        """Rows of each block: only the last may be short."""
        return _sizes(self.mask.shape[-1], self.block_size, self.rows)

    def own(self, rank: int) -> Blocks:
        """The blocks that a rank holds, rising."""
        import numpy as np

        return np.array([block for run in self.held[rank] for block in run], dtype=np.int64)

    def sent(self, holder: int, reader: int) -> Blocks:
        """The parcels of `holder` that some query of `reader` sees: between two ranks each of them travels once."""
        import numpy as np

        needed = self.needed[reader]
        return needed[np.isin(needed // self.heads, self.own(holder))]

    def rows_of(self, parcels: Blocks) -> int:
        """Rows of parcels together."""
        return int(self.sizes[parcels // self.heads].sum())

    def pairs(self, reader: int, holder: int, causal: bool) -> int:
        """Visible pairs of one rank's queries and another's keys, over the heads of the mask."""
        import numpy as np

        own, theirs, sizes = self.own(reader), self.own(holder), self.sizes
        seen = self.mask[:, own][:, :, theirs].sum(0)
        total = sizes[own] @ (seen @ sizes[theirs])
        if causal and reader == holder:
            total -= np.diagonal(seen) @ (sizes[own] * (sizes[own] - 1) // 2)
        return int(total)


def received_bytes(workload: Workload, ranks: int) -> int:
    """Bytes that one call in the workload's mode brings the rank with most.

    Forward: K and V of needed parcels, 2·B·K/heads·D·rows. Backward: dK and dV of what it has sent, in the dtype of K;
    the parcels themselves are kept from the forward pass.
    """
    deal = BlockDeal.of(workload, ranks)
    return busiest_bytes(workload, ranks, lambda holder, reader: deal.rows_of(deal.sent(holder, reader)), deal.heads)


def hop_pairs(workload: Workload, ranks: int) -> tuple[tuple[float, ...], ...] | None:
    """Per rank the visible pairs with its own keys, with those of the rank before it, of the one two before it, and so
    on; of one batch entry, over all query heads. None when nothing at all is visible.
    """
    deal = BlockDeal.of(workload, ranks)
    heads = workload.num_heads / deal.mask.shape[0]
    pairs = tuple(
        tuple(heads * deal.pairs(rank, (rank - hop) % ranks, workload.causal) for hop in range(ranks))
        for rank in range(ranks)
    )
    return pairs if any(map(sum, pairs)) else None


def _work(mask: Mask, size: int, rows: int, causal: bool) -> Callable[[Sequence[int]], list[float]]:
    """Edges of chunks of blocks to the pairs that their rows see, over the heads of the mask."""
    import numpy as np

    sizes = _sizes(mask.shape[-1], size, rows)
    keys = mask.sum((0, 2)) * size - mask[:, :, -1].sum(0) * (size - sizes[-1])
    work = keys * sizes
    if causal:
        work -= np.diagonal(mask, axis1=1, axis2=2).sum(0) * (sizes * (sizes - 1) // 2)
    before = np.concatenate([[0], np.cumsum(work)])

    def of_chunks(edges: Sequence[int]) -> list[float]:
        found: list[float] = np.diff(before[list(edges)]).tolist()
        return found

    return of_chunks


def _sight(mask: Mask, heads: int, price: float) -> Sight:
    """Of some blocks, each of its parts by itself."""
    import numpy as np

    count = mask.shape[-1]
    blocks = np.unique(np.linspace(0, count - 1, max(64, SAMPLED_PARCELS // heads)).astype(np.int64))
    # [blocks of queries + 1, heads, S]: how many of those before a block see each.
    of_heads = mask[:, :, blocks].reshape(heads, -1, count, len(blocks))
    seen: NDArray[np.bool_] = np.moveaxis(np.logical_or.reduce(of_heads, axis=1), 1, 0)
    before = np.concatenate([np.zeros_like(seen[:1], dtype=np.int32), seen.cumsum(0, dtype=np.int32)])

    def seen_by(edges: Sequence[int]) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = (np.diff(before[list(edges)], axis=0) > 0).reshape(len(edges) - 1, -1)
        return found

    return Sight(np.tile(blocks, heads), seen_by, price)


def _needed(mask: Mask, heads: int, size: int, rows: list[range]) -> Blocks:
    """The parcels that some of these query rows see, rising."""
    import numpy as np

    of_heads = mask.reshape(heads, -1, *mask.shape[1:])
    found = [needed_key_blocks(one, size, rows) * heads + head for head, one in enumerate(of_heads)]
    return np.sort(np.concatenate(found))


def _sizes(count: int, size: int, rows: int) -> Blocks:
    import numpy as np

    return np.minimum(size, rows - np.arange(count) * size)
