"""The three attentions of NSA (Yuan et al. 2025): means of blocks, selected blocks, a window.

As published, blocks are selected per query token; the blockwise form selects per block of queries.

out[i, h] = g1 · compressed + g2 · selected + g3 · window, each with its own softmax. semantics.md §5.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from dilabench.patterns.answers import Compression, HiddenRows, KeyGroup, LastRows, Pairs, Positions, SequenceShape
from dilabench.patterns.hidden_rows import HiddenRowsPattern
from dilabench.patterns.pattern import Pattern, Summand
from dilabench.patterns.selected_blocks import MAX_BLOCK, SelectedBlocksPattern
from dilabench.patterns.topk_blocks import TopKBlocksPattern
from dilabench.patterns.window_sink import WindowSinkPattern
from dilabench.validation import Size

# Gates are multiples of 1 / GATE_STEPS, which every dtype holds exactly.
GATE_STEPS = 128


class CompressedPattern(HiddenRowsPattern):
    """Every row sees the last position of every whole block, one every `stride`, which holds the mean of the block.

    Under a causal mask a block is therefore visible once it is complete.
    """

    kind: Literal["compressed"] = "compressed"
    block: int
    stride: int

    def hidden_rows(self, shape: SequenceShape) -> HiddenRows:
        """All other positions are hidden from all rows."""
        behind = np.arange(shape.length) - (self.block - 1)
        is_last = (behind >= 0) & (behind % self.stride == 0)
        return HiddenRows.of(shape.length, (np.zeros(shape.length, dtype=np.int64), np.where(is_last, 0, shape.length)))


class GatedSumPattern(Pattern):
    """The sum of three attentions under gates: means of blocks of keys, selected blocks, and the last keys.

    `window_size` is as in window_sink. Gates are an input: drawn from `gate_seed` for every position, query head and
    part, from 0 to 1. `counts` gives the keys on which a row depends, not how often.
    """

    block_size: int
    top_k: Size = Field(default=16, ge=1)
    window_size: Size = Field(default=512, ge=1)
    selection_seed: int = Field(default=0, ge=0)
    gate_seed: int = Field(default=0, ge=0)

    @property
    @abstractmethod
    def compression(self) -> tuple[int, int]:
        """Positions of a mean, and from one mean to the next."""

    @property
    @abstractmethod
    def selected(self) -> Pattern:
        """The pattern of the selected blocks."""

    @classmethod
    def densities(cls, length: int) -> tuple[Mapping[str, Any], ...]:
        """A half to a 32nd of the blocks; the window and the means stay."""
        return TopKBlocksPattern.densities(length)

    def why_not_over(self, shape: SequenceShape) -> str | None:
        """Refuse a window of the workload, which would cut blocks with means."""
        if shape.window != (-1, -1):
            return f"{self.kind} has its own window, so window {list(shape.window)} is not used; set window_size"
        return None

    def summands(self, shape: SequenceShape) -> tuple[Summand, ...]:
        """Compressed, selected, window."""
        return _summands(self, shape)

    @property
    def parts(self) -> int:
        """The three results that are summed."""
        return 3

    def row_labels(self, shapes: Any) -> dict[str, str]:
        """Labels of the selection."""
        return {"selection": self.selected.row_labels(shapes)["selection"]}

    def counts(self, shape: SequenceShape, head: int, rows: Positions) -> Iterator[KeyGroup]:
        """A group for each row: the keys of means that it sees, the keys of selected blocks, and its window."""
        length, stride = self.compression
        last = max(0, (shape.length - length) // stride + 1)
        keys_of_parts = [self._of_rows(summand.pattern, shape, head, rows) for summand in self.summands(shape)[1:]]
        for index, row in enumerate(rows.tolist()):
            means = min(last, max(0, (row + 1 - length) // stride + 1)) if shape.causal else last
            parts = (range((means - 1) * stride + length if means else 0), *(keys[index] for keys in keys_of_parts))
            yield KeyGroup(np.array([row]), parts)

    def head_key(self, shape: SequenceShape, head: int) -> Hashable:
        """Heads that share a selection."""
        return self.selected.head_key(shape, head)

    def rows_seeing(self, shape: SequenceShape, head: int, key: int) -> Positions:
        """The rows that see the key in some part."""
        length, stride = self.compression
        block_end = max(0, -(-(key + 1 - length) // stride)) * stride + length
        first = block_end - 1 if shape.causal else 0
        rows = [np.arange(first if block_end <= shape.length else shape.length, shape.length)]
        rows += [summand.pattern.rows_seeing(shape, head, key) for summand in self.summands(shape)[1:]]
        return np.unique(np.concatenate(rows))

    def covered(self, shape: SequenceShape, head: int) -> NDArray[np.bool_]:
        """Every row sees at least itself, in the window part."""
        return self.summands(shape)[2].pattern.covered(shape, head)

    def pairs(self, shape: SequenceShape) -> Pairs:
        """Pairs of queries with means, and with keys; a key both selected and in the window may be computed once."""
        means, selected, window = (summand.pattern.pairs(shape).attended for summand in self.summands(shape))
        return Pairs(means + selected + window, means + max(selected, window))

    def last_rows(self, shape: SequenceShape, rows: int) -> LastRows:
        """Counted as `pairs` counts."""
        reached = super().last_rows(shape, rows)
        means, selected, window = (
            summand.pattern.last_rows(shape, rows).pairs.attended for summand in self.summands(shape)
        )
        return reached._replace(pairs=Pairs(means + selected + window, means + max(selected, window)))

    def shares(self, shape: SequenceShape, lines: int, columns: int) -> NDArray[np.float64] | None:
        """Shares of the part that each cell is attended in most; a mean counts as one position of its block."""
        shares = [Pattern.shares(summand.pattern, shape, lines, columns) for summand in self.summands(shape)]
        drawn = [share for share in shares if share is not None]
        return np.maximum.reduce(drawn) if drawn else None

    def edges(self, shape: SequenceShape) -> Positions:
        """The starts of blocks."""
        return np.arange(0, shape.length, self.block_size)

    def _of_rows(self, pattern: Pattern, shape: SequenceShape, head: int, rows: Positions) -> list[range | Positions]:
        """The keys of each row, in the order of the rows."""
        keys: dict[int, range | Positions] = {}
        for group in pattern.counts(shape, head, rows):
            keys |= dict.fromkeys(group.rows.tolist(), group.parts[0])
        return [keys.get(row, range(0)) for row in rows.tolist()]


class NativeSparsePattern(GatedSumPattern):
    """NSA as published: blocks of `block_size` keys selected per query token and key/value head.

    Compressed keys are the means of `compression_length` positions, one every `compression_stride` (a learned
    compression is the model's). The first block, the token's own and the one before it are always selected.
    """

    kind: Literal["native_sparse"] = "native_sparse"
    block_size: Size = Field(default=64, ge=1, le=MAX_BLOCK)
    compression_length: Size = Field(default=32, ge=1)
    compression_stride: Size = Field(default=16, ge=1)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        length, stride = self.compression
        if length % stride:
            raise ValueError(
                f"compression_length {length} is not a multiple of compression_stride {stride}; use "
                f"{-(-length // stride) * stride}"
            )
        # Its own fields are checked, too.
        assert self.selected
        return self

    @classmethod
    def kind_of(cls, value: Mapping[str, Any]) -> str:
        """In records without compressed lengths the name stands for the blockwise form."""
        is_blockwise = not {"compression_length", "compression_stride"} & value.keys()
        return "blockwise_native_sparse" if is_blockwise and "block_size" in value else "native_sparse"

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Blocks that the end of the sequence cuts, and means that overlap."""
        return (cls(block_size=16, top_k=4, window_size=11, compression_length=12, compression_stride=4),)

    @classmethod
    def trials(cls) -> Mapping[str, Mapping[str, Any]]:
        """With and without a causal mask."""
        fields = {"block_size": 32, "top_k": 4, "window_size": 50, "compression_length": 24, "compression_stride": 8}
        return {"native-sparse": fields, "native-sparse-full": {**fields, "causal": False}}

    @classmethod
    def densities(cls, length: int) -> tuple[Mapping[str, Any], ...]:
        """An eighth and a 32nd of the blocks; the window and the means stay."""
        return SelectedBlocksPattern.densities(length)

    @property
    def compression(self) -> tuple[int, int]:
        """As given."""
        return self.compression_length, self.compression_stride

    @property
    def selected(self) -> SelectedBlocksPattern:
        """By attention to compressed keys."""
        return SelectedBlocksPattern(block_size=self.block_size, top_k=self.top_k, selection_seed=self.selection_seed)


class BlockwiseNativeSparsePattern(GatedSumPattern):
    """NSA's three attentions, the blocks selected per block of queries, which is less work.

    Compressed keys are the means of blocks of `block_size` positions; `top_k` blocks are selected by the mean key,
    always including the row's block, once per key/value head.
    """

    kind: Literal["blockwise_native_sparse"] = "blockwise_native_sparse"
    block_size: Size = Field(default=64, ge=1, le=2**20)

    def label(self) -> str:
        """The label, with the unit that shares a selection."""
        return f"{super().label()} per block of queries"

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Blocks that the end of the sequence cuts."""
        return (cls(block_size=16, top_k=2, window_size=11),)

    @classmethod
    def trials(cls) -> Mapping[str, Mapping[str, Any]]:
        """With and without a causal mask."""
        fields = {"block_size": 48, "top_k": 2, "window_size": 50}
        return {"blockwise-native-sparse": fields, "blockwise-native-sparse-full": {**fields, "causal": False}}

    @property
    def block_length(self) -> int:
        """As given."""
        return self.block_size

    @property
    def compression(self) -> tuple[int, int]:
        """Blocks of keys."""
        return self.block_size, self.block_size

    @property
    def selected(self) -> TopKBlocksPattern:
        """By mean keys."""
        return TopKBlocksPattern(block_size=self.block_size, top_k=self.top_k, selection_seed=self.selection_seed)


@lru_cache(maxsize=8)
def _summands(pattern: GatedSumPattern, shape: SequenceShape) -> tuple[Summand, ...]:
    draw = np.random.default_rng(pattern.gate_seed)
    gates = draw.integers(1, GATE_STEPS + 1, (3, shape.length, shape.num_heads)) / GATE_STEPS
    length, stride = pattern.compression
    parts: tuple[tuple[Pattern, int, int], ...] = (
        (CompressedPattern(block=length, stride=stride), length, stride),
        (pattern.selected, 1, 1),
        (WindowSinkPattern(sinks=0, window_size=pattern.window_size), 1, 1),
    )
    return tuple(Summand(part, pool, gates[index], stride) for index, (part, pool, stride) in enumerate(parts))


class CompressedKeysPattern(HiddenRowsPattern):
    """C[h, i, c] = 1 if the tokens of compressed key c end at token i or before it: NSA's first branch by itself.

    Keys are no tokens, so that no workload has this pattern.
    """

    kind: Literal["compressed_keys"] = "compressed_keys"
    length: int
    stride: int

    @model_validator(mode="after")
    def _possible(self) -> Self:
        Compression(self.length, self.stride)
        return self

    @property
    def compresses(self) -> Compression:
        """The blocks of tokens."""
        return Compression(self.length, self.stride)

    def hidden_rows(self, shape: SequenceShape) -> HiddenRows:
        """Each key is hidden from the tokens before the last one that it stands for."""
        lasts = self.compresses.lasts(shape.length)
        return HiddenRows.of(shape.length, (np.zeros_like(lasts), lasts))
