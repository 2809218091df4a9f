"""Blocks over several ranks: their owners, the blocks that a rank receives, and the pairs that it computes. No torch.

Ranks own whole blocks, so that a block of another rank is entirely before or entirely after each local query. They are
assigned by the pairs that their rows see, weighed against the blocks sent. A block is sent once to each rank with a
query that sees it: with all its key/value heads if all query heads share a mask, else (after a selection) only with
those whose queries see it. All counts are functions of the mask alone, the closed form of the traffic of
`block-sparse-ring`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dilabench.distributed.assignment import PAIRS_PER_KEY, Assignment, Edges, Sight, balanced
from dilabench.patterns.block_masks import needed_key_blocks
from dilabench.workload.spec import Workload

if TYPE_CHECKING:
    from dilabench.patterns.block_masks import Mask

Blocks = NDArray[np.int64]
# Parts of blocks that are sampled to compare assignments.
SAMPLED_PARTS = 1024


@dataclass(frozen=True)
class BlockAssignment(Assignment):
    """A mask [heads or 1, n, n] over blocks of `block_size` of `rows` rows, and the ranks that own and need each block.

    held: runs of blocks by rank. parts: 1, or each key/value head alone; part h of block b has the number b·parts + h.
    needed: the numbers of parts that some query of each rank sees, local ones included, in ascending order. mask_heads:
    query heads for each head of the mask. causal: True if rows see no later row of their block.
    """

    mask: Mask
    block_size: int
    rows: int
    needed: tuple[Blocks, ...]
    mask_heads: float
    causal: bool

    @classmethod
    def of(cls, workload: Workload, ranks: int) -> BlockAssignment:
        """Assign by work. Raises ConfigError for a file that does not fit, ValueError for another pattern."""
        (shape,) = workload.shapes
        blocks = workload.pattern.whole_blocks(shape)
        if blocks is None:
            raise ValueError(
                f"{workload.pattern.label()} is no mask of whole blocks: a block mask over dilated branches "
                "scatters the rows of a block over ranks; use block-sparse on one device"
            )
        size, mask = blocks.block_size, blocks.mask
        parts = 1 if len(mask) == 1 else workload.num_kv_heads
        work = _work(mask, size, shape.length, workload.causal)
        # A block is one tile or more, so chunks of one block need no more calls than longer ones.
        price = PAIRS_PER_KEY * size * len(mask) / workload.group_size
        held = balanced(mask.shape[-1], ranks, work, fewest=1, sight=_sight(mask, parts, price))
        spans = [[range(run.start * size, run.stop * size) for run in runs] for runs in held]
        needed = tuple(_needed(mask, parts, size, rows) for rows in spans)
        return cls(held, parts, mask, size, shape.length, needed, workload.num_heads / len(mask), workload.causal)

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
        """The blocks that a rank holds, in ascending order."""
        return np.array([block for run in self.held[rank] for block in run], dtype=np.int64)

    def sent(self, owner: int, reader: int) -> Blocks:
        """The parts of `owner` that some query of `reader` sees: each is sent once."""
        needed = self.needed[reader]
        return needed[np.isin(needed // self.parts, self.own(owner))]

    def rows_of(self, numbers: Blocks) -> int:
        """Rows of parts together."""
        return int(self.sizes[numbers // self.parts].sum())

    def moved(self, owner: int, reader: int) -> int:
        """As `Assignment.moved`."""
        return self.rows_of(self.sent(owner, reader))

    def pairs(self, reader: int, owner: int) -> float:
        """As `Assignment.pairs`."""
        local, theirs, sizes = self.own(reader), self.own(owner), self.sizes
        seen = self.mask[:, local][:, :, theirs].sum(0)
        total = sizes[local] @ (seen @ sizes[theirs])
        if self.causal and reader == owner:
            total -= np.diagonal(seen) @ (sizes[local] * (sizes[local] - 1) // 2)
        return self.mask_heads * int(total)


def _work(mask: Mask, size: int, rows: int, causal: bool) -> Callable[[Edges], NDArray[np.float64]]:
    """Edges of chunks of blocks to the pairs that their rows see, over the heads of the mask."""
    sizes = _sizes(mask.shape[-1], size, rows)
    keys = mask.sum((0, 2)) * size - mask[:, :, -1].sum(0) * (size - sizes[-1])
    work = keys * sizes
    if causal:
        work -= np.diagonal(mask, axis1=1, axis2=2).sum(0) * (sizes * (sizes - 1) // 2)
    before = np.concatenate([[0], np.cumsum(work)]).astype(np.float64)
    return lambda edges: np.diff(before[edges])


def _sight(mask: Mask, parts: int, price: float) -> Sight:
    """The sight of sampled blocks, part by part."""
    count = mask.shape[-1]
    blocks = np.unique(np.linspace(0, count - 1, max(64, SAMPLED_PARTS // parts)).astype(np.int64))
    # [blocks of queries + 1, parts, S]: how many query blocks before a block see each.
    of_heads = mask[:, :, blocks].reshape(parts, -1, count, len(blocks))
    seen: NDArray[np.bool_] = np.moveaxis(np.logical_or.reduce(of_heads, axis=1), 1, 0)
    before = np.concatenate([np.zeros_like(seen[:1], dtype=np.int32), seen.cumsum(0, dtype=np.int32)])

    def seen_by(edges: Edges) -> NDArray[np.bool_]:
        seen_by_chunk: NDArray[np.bool_] = (np.diff(before[edges], axis=0) > 0).reshape(len(edges) - 1, -1)
        return seen_by_chunk

    return Sight(np.tile(blocks, parts), seen_by, price)


def _needed(mask: Mask, parts: int, size: int, rows: list[range]) -> Blocks:
    """The numbers of parts that some of these query rows see, in ascending order."""
    of_heads = mask.reshape(parts, -1, *mask.shape[1:])
    needed = [needed_key_blocks(head_mask, size, rows) * parts + head for head, head_mask in enumerate(of_heads)]
    return np.sort(np.concatenate(needed))


def _sizes(count: int, size: int, rows: int) -> Blocks:
    return np.minimum(size, rows - np.arange(count) * size)
