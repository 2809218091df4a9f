"""The best key blocks of each block of queries, by a named selector, like VSA (Zhang et al. 2025).

MoBA (Lu et al. 2025) selects per query token; selector mean_key takes its score for a block of queries.

The indices are an input: made once by the selector, the same for the oracle and for every implementation.
semantics.md §5.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dilabench.errors import ConfigError
from dilabench.patterns.answers import (
    KeyGroup,
    Pairs,
    Positions,
    SelectedKeys,
    SequenceShape,
    WholeBlocks,
    counted_once,
)
from dilabench.patterns.block_masks import (
    MAX_BLOCKS,
    block_shares,
    masked_pairs,
    rows_of_blocks,
    rows_with_keys,
    visible_blocks,
)
from dilabench.patterns.mask_files import Given, GivenByFile, read_array
from dilabench.patterns.pattern import Pattern
from dilabench.patterns.selectors import ABSENT, SELECTORS, Blocks, distinct_blocks, select
from dilabench.validation import Model, Size

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from dilabench.patterns.selectors import Indices

SelectorName = Literal["mean_key", "pooled", "random", "given"]


class WholeBlocksPattern(Pattern):
    """C = 1 where the mask of (the head, i // block, j // block) is set."""

    block_size: int

    @property
    def block_length(self) -> int:
        """As given."""
        return self.block_size

    @abstractmethod
    def whole_blocks(self, shape: SequenceShape) -> WholeBlocks:
        """The mask. Blocks that the causal mask hides may be set or not."""

    def counts(self, shape: SequenceShape, head: int, rows: Positions) -> Iterator[KeyGroup]:
        """All rows of a block have the same keys."""
        mask, size = self._of_head(shape, head)
        _, first = np.unique(rows // size, return_index=True)
        for members in np.split(rows, first[1:]):
            if len(members):
                yield KeyGroup(members, (rows_of_blocks(mask[members[0] // size], size, shape.length),))

    def head_key(self, shape: SequenceShape, head: int) -> Hashable:
        """Heads that share a mask."""
        return head * len(self.whole_blocks(shape).mask) // shape.num_heads

    def rows_seeing(self, shape: SequenceShape, head: int, key: int) -> Positions:
        """The rows of the blocks that see the key's block."""
        mask, size = self._of_head(shape, head)
        return rows_of_blocks(mask[:, key // size], size, shape.length)

    def covered(self, shape: SequenceShape, head: int) -> NDArray[np.bool_]:
        """Block by block."""
        mask, size = self._of_head(shape, head)
        return rows_with_keys(mask, size, shape.length, shape.reach)

    def pairs(self, shape: SequenceShape) -> Pairs:
        """Block by block."""
        pairs: Pairs = counted_once(_pairs, self, shape)
        return pairs

    def edges(self, shape: SequenceShape) -> Positions:
        """The starts of blocks."""
        return np.arange(0, shape.length, self.whole_blocks(shape).block_size)

    def shares(self, shape: SequenceShape, lines: int, columns: int) -> NDArray[np.float64]:
        """The exact shares of blocks."""
        return block_shares(self.whole_blocks(shape).mask[0], lines, columns)

    def _of_head(self, shape: SequenceShape, head: int) -> tuple[NDArray[np.bool_], int]:
        blocks = self.whole_blocks(shape)
        return blocks.mask[head * len(blocks.mask) // shape.num_heads], blocks.block_size


def _pairs(pattern: WholeBlocksPattern, shape: SequenceShape) -> Pairs:
    blocks = pattern.whole_blocks(shape)
    heads = shape.num_heads // len(blocks.mask)
    pairs = heads * sum(
        masked_pairs(mask, blocks.block_size, shape.length, shape.causal, shape.window) for mask in blocks.mask
    )
    return Pairs(pairs, pairs)


class TopKBlocksRequest(Model):
    """Request fields of a selection."""

    selector: SelectorName = "mean_key"
    block_size: Size = Field(default=64, ge=1, le=2**20)
    top_k: Size = Field(default=16, ge=1)
    selection_seed: int = Field(default=0, ge=0)
    indices_file: str | None = None


class TopKBlocksPattern(TopKBlocksRequest, GivenByFile, WholeBlocksPattern):
    """C[h, i, j] = 1 if the selection of key/value head h // g has block j // block_size for block i // block_size.

    `selector`: mean_key (always with the query's block, as MoBA), pooled (VSA), random, or given: an `indices_file`,
    `.npy` of integers [n, k] or [K, n, k], n blocks of queries. In it, order does not matter, a repeated index counts
    once, and -1 means no block.
    """

    kind: Literal["topk_blocks"] = "topk_blocks"
    indices_digest: str | None = None

    given_whole_by: ClassVar[frozenset[str]] = frozenset({"indices_file"})
    given: ClassVar[Given] = Given("indices", "selector", "given", "selector=given and an indices_file")

    @classmethod
    def request_model(cls) -> type[Model]:
        """Omits the digest, which is computed from the file."""
        return TopKBlocksRequest

    def label(self) -> str:
        """The label, with the unit that shares a selection."""
        return f"{super().label()} per block of queries"

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Each selector, blocks that do not divide the sequence, and a top_k above the number of blocks."""
        return (
            cls(block_size=16, top_k=2),
            cls(selector="pooled", block_size=16, top_k=2, selection_seed=3),
            cls(selector="random", block_size=7, top_k=3),
            cls(selector="random", block_size=32, top_k=100),
        )

    @classmethod
    def trials(cls) -> Mapping[str, Mapping[str, Any]]:
        """Each selector that needs no file."""
        return {
            "topk-mean-key": {"selector": "mean_key", "block_size": 48, "top_k": 2},
            "topk-pooled-full": {"selector": "pooled", "block_size": 48, "top_k": 2, "causal": False},
            "topk-random": {"selector": "random", "block_size": 48, "top_k": 2},
        }

    @classmethod
    def densities(cls, length: int) -> tuple[Mapping[str, Any], ...]:
        """A half to a 32nd of the blocks."""
        blocks = -(-length // cls.model_fields["block_size"].default)
        return tuple({"top_k": max(1, blocks // part)} for part in (2, 8, 32))

    @classmethod
    def strategy(cls, max_seq_len: int) -> SearchStrategy[Self]:
        """Any selector without a file, any blocks."""
        from hypothesis import strategies as st

        return st.builds(
            cls,
            selector=st.sampled_from(sorted(SELECTORS)),
            block_size=st.integers(1, max_seq_len),
            top_k=st.integers(1, 9),
            selection_seed=st.integers(0, 99),
        )

    @property
    def selects(self) -> SelectedKeys:
        """Per block of queries."""
        return SelectedKeys(self.block_size, per_token=False)

    @property
    def reads_queries(self) -> bool:
        """Return True if the selector reads queries and keys, so that a device can select from stand-ins."""
        return self.selector in SELECTORS and SELECTORS[self.selector].reads_queries

    def row_labels(self, shapes: Sequence[SequenceShape]) -> dict[str, str]:
        """Labels of the selection: a digest of the indices, and the share of visible blocks that are computed."""
        digest = hashlib.sha256(b"".join(self.selection(shape).tobytes() for shape in shapes)).hexdigest()[:16]
        masks = [self.whole_blocks(shape).mask for shape in shapes]
        visible = sum(len(m) * visible_blocks(m.shape[-1], s.causal) for m, s in zip(masks, shapes, strict=True))
        computed = sum(int(mask.sum()) for mask in masks)
        return {"selection": digest, "density_reached": f"{computed / visible:.4f}"}

    def selection(self, shape: SequenceShape) -> Indices:
        """int32 [heads, n, k], ascending, padded by -1: key blocks of each query block; heads 1 or key/value heads.

        Raises ConfigError for more than 2^15 blocks a side, and for a file that does not fit.
        """
        return _selected(self, shape).indices

    def whole_blocks(self, shape: SequenceShape) -> WholeBlocks:
        """The selection as a mask; under a causal mask without later blocks."""
        return _selected(self, shape).blocks

    def blocks_of(self, shape: SequenceShape) -> Blocks:
        """The selector's input over a sequence."""
        kv_heads, group = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads
        return Blocks(-(-shape.length // self.block_size), kv_heads, group, shape.causal, self.selection_seed)


@dataclass(frozen=True)
class _Selected:
    """The selection over a sequence: indices as `TopKBlocksPattern.selection`, and the same as a mask."""

    indices: Indices
    blocks: WholeBlocks


@lru_cache(maxsize=8)
def _selected(pattern: TopKBlocksPattern, shape: SequenceShape) -> _Selected:
    blocks = pattern.blocks_of(shape)
    if blocks.count > MAX_BLOCKS:
        raise ConfigError(
            f"block_size={pattern.block_size} cuts {shape.length} rows into {blocks.count} blocks a side, above "
            f"{MAX_BLOCKS}; use block_size={-(-shape.length // MAX_BLOCKS)} or more"
        )
    if pattern.indices_file is not None:
        indices = _from_file(pattern, pattern.indices_file, blocks.count, blocks.kv_heads)
    else:
        indices = select(SELECTORS[pattern.selector], blocks, pattern.top_k)
    indices.flags.writeable = False
    return _Selected(indices, WholeBlocks(_mask_of(indices, shape.causal), pattern.block_size))


def _mask_of(indices: Indices, causal: bool) -> NDArray[np.bool_]:
    """[heads, n, n] of the selected blocks; under a causal mask without later ones."""
    heads, blocks, _ = indices.shape
    # An extra column receives the absent entries.
    mask = np.zeros((heads, blocks, blocks + 1), dtype=bool)
    np.put_along_axis(mask, np.where(indices == ABSENT, blocks, indices).astype(np.int64), True, axis=2)
    mask = mask[:, :, :blocks]
    mask = np.tril(mask) if causal else np.ascontiguousarray(mask)
    mask.flags.writeable = False
    return mask


def _from_file(pattern: TopKBlocksPattern, name: str, blocks: int, kv_heads: int) -> Indices:
    form = "integers [n, k] or [K, n, k], -1 where a row has fewer blocks,"
    indices = read_array(Path(name), pattern.indices_digest, "indices", form)
    if not np.issubdtype(indices.dtype, np.integer) or indices.ndim not in (2, 3):
        raise ConfigError(
            f"indices file {name!r} holds {indices.dtype} {list(indices.shape)}; give integers [n, k] or [K, n, k]: "
            "the key blocks of each of n query blocks"
        )
    indices = indices[None] if indices.ndim == 2 else indices
    if len(indices) not in (1, kv_heads):
        raise ConfigError(
            f"indices file {name!r} has {len(indices)} heads; the workload has {kv_heads} key/value heads; give 1 or "
            f"{kv_heads}"
        )
    if indices.shape[1] != blocks:
        raise ConfigError(
            f"indices file {name!r} has {indices.shape[1]} query blocks; the workload needs {blocks} blocks of "
            f"{pattern.block_size}; change seq_len, block_size or the file"
        )
    wrong = (indices < ABSENT) | (indices >= blocks)
    if wrong.any():
        head, row, place = (int(at[0]) for at in wrong.nonzero())
        raise ConfigError(
            f"indices file {name!r}, head {head}, row {row}: key block {indices[head, row, place]} is not in "
            f"0..{blocks - 1}; -1 means none"
        )
    return distinct_blocks(indices, blocks)
