"""A block mask over several ranks: who holds which blocks, what a rank must be sent, what it computes. No torch.

Ranks hold whole blocks, so that a block of another rank lies wholly before or wholly behind each local query. A block
travels with all its key/value heads as soon as one head of one query sees it, so that what arrives are whole tiles of
rows. What is counted here is a function of the mask alone: the closed form of what `block-sparse-ring` moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dilabench.patterns.block_masks import block_mask, needed_key_blocks
from dilabench.patterns.block_sparse import BlockSparsePattern
from dilabench.workload.spec import DTYPE_BYTES, Workload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dilabench.patterns.block_masks import Mask


@dataclass(frozen=True, slots=True)
class BlockDeal:
    """A mask [heads or 1, n, n] over blocks of `block_size` of `rows` rows, and who holds and needs which blocks.

    held: runs of blocks by rank. needed: the key blocks that some query of each rank sees, its own ones too, rising.
    """

    mask: Mask
    block_size: int
    rows: int
    held: tuple[tuple[range, ...], ...]
    needed: tuple[NDArray[np.int64], ...]

    @classmethod
    def of(cls, workload: Workload, ranks: int) -> BlockDeal:
        """The deal of a block-sparse workload. Raises ConfigError when a mask file does not fit."""
        pattern = BlockSparsePattern.of(workload)
        size = pattern.block_size
        mask = block_mask(pattern, workload.seq_len, workload.causal, workload.num_heads)
        held = dealt(mask.shape[-1], ranks, workload.causal)
        spans = [[range(run.start * size, run.stop * size) for run in runs] for runs in held]
        return cls(mask, size, workload.seq_len, held, tuple(needed_key_blocks(mask, size, part) for part in spans))

    @property
    def positions(self) -> tuple[tuple[range, ...], ...]:
        """Runs of positions by rank."""
        size = self.block_size
        return tuple(tuple(range(r.start * size, min(self.rows, r.stop * size)) for r in runs) for runs in self.held)

    def own(self, rank: int) -> NDArray[np.int64]:
        """The blocks that a rank holds, rising."""
        import numpy as np

        return np.array([block for run in self.held[rank] for block in run], dtype=np.int64)

    def sent(self, holder: int, reader: int) -> NDArray[np.int64]:
        """The blocks of `holder` that some query of `reader` sees: between two ranks each of them travels once."""
        import numpy as np

        return np.intersect1d(self.own(holder), self.needed[reader])

    def rows_of(self, blocks: NDArray[np.int64]) -> int:
        """Rows of distinct blocks: only the last of the sequence may be short."""
        last = self.mask.shape[-1] - 1
        short = (last + 1) * self.block_size - self.rows
        return len(blocks) * self.block_size - (short if last in blocks else 0)

    def pairs(self, reader: int, holder: int, causal: bool) -> int:
        """Visible pairs of one rank's queries and another's keys, over the heads of the mask."""
        import numpy as np

        own, theirs = self.own(reader), self.own(holder)
        sizes = np.minimum(self.block_size, self.rows - np.arange(self.mask.shape[-1]) * self.block_size)
        seen = self.mask[:, own][:, :, theirs].sum(0)
        total = sizes[own] @ (seen @ sizes[theirs])
        if causal and reader == holder:
            total -= np.diagonal(seen) @ (sizes[own] * (sizes[own] - 1) // 2)
        return int(total)


def received_bytes(workload: Workload, ranks: int) -> int:
    """Bytes that one call in the workload's mode brings the rank with most.

    Forward: K and V of needed blocks, 2·B·K·D·rows. Backward: dK and dV of what it has sent, in the dtype of K; the
    blocks themselves are kept from the forward pass.
    """
    deal = BlockDeal.of(workload, ranks)
    return busiest_bytes(workload, ranks, lambda holder, reader: deal.rows_of(deal.sent(holder, reader)))


def busiest_bytes(workload: Workload, ranks: int, rows_moved: Callable[[int, int], int]) -> int:
    """The same from the rows that a holder sends a reader: `rows_moved(holder, reader)`."""
    import numpy as np

    everyone = range(ranks)
    moved = np.array([[rows_moved(a, b) if a != b else 0 for b in everyone] for a in everyone], dtype=np.int64)
    keys, gradients = moved.sum(0), moved.sum(1)
    rows = int((keys * (workload.mode != "backward") + gradients * (workload.mode != "forward")).max())
    vector = workload.num_kv_heads * workload.head_dim * DTYPE_BYTES[workload.dtype]
    return 2 * workload.batch_size * vector * rows


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


def dealt(blocks: int, ranks: int, causal: bool) -> tuple[tuple[range, ...], ...]:
    """Rank r holds the r-th part; behind a causal mask chunks r and 2P-1-r of 2P, for later rows see more."""
    chunks = 2 * ranks if causal else ranks
    edges = [blocks * edge // chunks for edge in range(chunks + 1)]
    runs = [range(edges[chunk], edges[chunk + 1]) for chunk in range(chunks)]
    parts = [(runs[rank], runs[chunks - 1 - rank]) if causal else (runs[rank],) for rank in range(ranks)]
    return tuple(tuple(run for run in part if run) for part in parts)
