"""Patterns that are a mask of whole blocks over the sequence: everything else about them follows from the mask."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterator

import numpy as np
from numpy.typing import NDArray

from dilabench.patterns.answers import KeyGroup, Pairs, Positions, SequenceShape, WholeBlocks
from dilabench.patterns.block_masks import block_shares, masked_pairs, rows_of_blocks, rows_with_keys
from dilabench.patterns.pattern import Pattern


class WholeBlocksPattern(Pattern):
    """C = 1 where the mask of (the head, i // block, j // block) is set."""

    block_size: int

    @property
    def block_length(self) -> int:
        """As given."""
        return self.block_size

    @abstractmethod
    def whole_blocks(self, shape: SequenceShape) -> WholeBlocks:
        """The mask. It may leave out, or not, what the causal mask hides anyway."""

    def counts(self, shape: SequenceShape, head: int, rows: Positions) -> Iterator[KeyGroup]:
        """Rows of a block have the same keys."""
        mask, size = self._of_head(shape, head)
        _, first = np.unique(rows // size, return_index=True)
        for members in np.split(rows, first[1:]):
            if len(members):
                yield KeyGroup(members, (rows_of_blocks(mask[members[0] // size], size, shape.length),))

    def head_key(self, shape: SequenceShape, head: int) -> Hashable:
        """Heads that share a mask."""
        return head * len(self.whole_blocks(shape).mask) // shape.num_heads

    def rows_seeing(self, shape: SequenceShape, head: int, key: int) -> Positions:
        """The rows of the blocks that see the key's."""
        mask, size = self._of_head(shape, head)
        return rows_of_blocks(mask[:, key // size], size, shape.length)

    def covered(self, shape: SequenceShape, head: int) -> NDArray[np.bool_]:
        """Block by block."""
        mask, size = self._of_head(shape, head)
        return rows_with_keys(mask, size, shape.length, shape.reach)

    def pairs(self, shape: SequenceShape) -> Pairs:
        """Block by block."""
        blocks = self.whole_blocks(shape)
        heads = shape.num_heads // len(blocks.mask)
        pairs = heads * sum(
            masked_pairs(mask, blocks.block_size, shape.length, shape.causal, shape.window) for mask in blocks.mask
        )
        return Pairs(pairs, pairs)

    def edges(self, shape: SequenceShape) -> Positions:
        """Where blocks begin."""
        return np.arange(0, shape.length, self.whole_blocks(shape).block_size)

    def shares(self, shape: SequenceShape, lines: int, columns: int) -> NDArray[np.float64]:
        """Of blocks, exactly."""
        return block_shares(self.whole_blocks(shape).mask[0], lines, columns)

    def _of_head(self, shape: SequenceShape, head: int) -> tuple[NDArray[np.bool_], int]:
        blocks = self.whole_blocks(shape)
        return blocks.mask[head * len(blocks.mask) // shape.num_heads], blocks.block_size
