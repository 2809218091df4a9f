"""Key blocks selected per query token and key/value head: NSA's selected branch (Yuan et al. 2025), MoBA (Lu et al.
2025), DSA (DeepSeek-V3.2, 2025), MSA (MiniMax, 2026).

The indices are an input: made once by a named selector, or given; the same for the oracle and for every implementation.
semantics.md §5.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from dilabench.errors import ConfigError
from dilabench.patterns.answers import KeyGroup, Pairs, Positions, SelectedKeys, SequenceShape, counted_once
from dilabench.patterns.mask_files import Given, GivenByFile, read_array
from dilabench.patterns.pattern import Pattern, group_rows
from dilabench.patterns.selectors import ABSENT, distinct_blocks
from dilabench.patterns.token_selectors import TOKEN_SELECTORS, Tokens, select_rows, thresholds
from dilabench.units import format_count
from dilabench.validation import Model, Size

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from dilabench.patterns.token_selectors import TokenSelector

    Indices = NDArray[np.int32]

TokenSelectorName = Literal["mean_key", "compressed", "indexer", "random", "neighbours", "given"]
MAX_BLOCK = 4096
# Ranks of rows and blocks that are computed together: 2 MiB, which a cache holds.
RANKS_AT_ONCE = 2**18
# Up to this many, 64 MiB, the selection of all heads is cached: each implementation of a workload asks for it.
KEPT_INDICES = 2**24
# More (row, block) pairs of a head would take minutes to rank.
MAX_RANKS = 2**34
# Rows with longer selections hardly ever have equal ones.
MOST_COMPARED = 64
# Rows whose indices are hashed, and compared with the indices of the token before, for labels.
LABELLED_ROWS = 256


def check_block(size: int) -> None:
    """Raise ValueError for sizes of blocks that no kernel takes."""
    if not 0 < size <= MAX_BLOCK:
        raise ValueError(f"block_size {size} is not between 1 and {MAX_BLOCK}")
    if size != 1 and size % 16:
        raise ValueError(f"block_size {size} is neither 1 nor a multiple of 16; use {-(-size // 16) * 16}")


class SelectedBlocksRequest(Model):
    """Request fields of a selection per token."""

    selector: TokenSelectorName = "compressed"
    block_size: Size = Field(default=64, ge=1, le=MAX_BLOCK)
    top_k: Size = Field(default=16, ge=1)
    selection_seed: int = Field(default=0, ge=0)
    index_heads: Size = Field(default=4, ge=1, le=128)
    indices_file: str | None = None


class SelectedBlocksPattern(SelectedBlocksRequest, GivenByFile):
    """C[h, i, j] = 1 if block j // block_size is among the indices of token i and key/value head h // g.

    `block_size`: 1, or a multiple of 16 up to 4096. `selector`: mean_key (MoBA), compressed (NSA), indexer (DSA, MSA;
    of `index_heads` heads), random, neighbours (random, mostly shared by 4 tokens), or given: an `indices_file`, `.npy`
    of integers [N, S] or [N, K, S]. In it, order does not matter, a repeated index counts once, and -1 means no block.
    All batch items have one selection. MoBA selects per query head; here the heads that share keys select together.
    """

    kind: Literal["selected_blocks"] = "selected_blocks"
    indices_digest: str | None = None

    given_whole_by: ClassVar[frozenset[str]] = frozenset({"indices_file"})
    given: ClassVar[Given] = Given("indices", "selector", "given", "selector=given and an indices_file")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        check_block(self.block_size)
        return self

    # Requests.

    @classmethod
    def request_model(cls) -> type[Model]:
        """Omits the digest, which is computed from the file."""
        return SelectedBlocksRequest

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Each selector, blocks that do not divide the sequence, single tokens, and a top_k above the blocks."""
        return (
            cls(block_size=16, top_k=2, selector="mean_key"),
            cls(block_size=16, top_k=4),
            cls(block_size=1, top_k=5, selector="indexer", selection_seed=3),
            cls(block_size=16, top_k=2, selector="indexer", index_heads=1),
            cls(block_size=32, top_k=100, selector="random"),
            cls(block_size=16, top_k=3, selector="neighbours"),
        )

    @classmethod
    def trials(cls) -> Mapping[str, Mapping[str, Any]]:
        """As NSA, MoBA and DSA select, and at random."""
        return {
            "selected-compressed": {"block_size": 32, "top_k": 4},
            "selected-mean-key": {"block_size": 48, "top_k": 2, "selector": "mean_key"},
            "selected-tokens": {"block_size": 1, "top_k": 40, "selector": "indexer"},
            "selected-random-full": {"block_size": 32, "top_k": 3, "selector": "random", "causal": False},
        }

    @classmethod
    def densities(cls, length: int) -> tuple[Mapping[str, Any], ...]:
        """An eighth and a 32nd of the blocks."""
        blocks = -(-length // cls.model_fields["block_size"].default)
        return tuple({"top_k": max(1, blocks // part)} for part in (8, 32))

    @classmethod
    def strategy(cls, max_seq_len: int) -> SearchStrategy[Self]:
        """Any selector without a file; single tokens and blocks, also longer than the sequence."""
        from hypothesis import strategies as st

        sizes = [1, *range(16, min(MAX_BLOCK, max_seq_len + 32), 16)]
        return st.builds(
            cls,
            selector=st.sampled_from(sorted(TOKEN_SELECTORS)),
            block_size=st.sampled_from(sizes),
            top_k=st.integers(1, 9),
            selection_seed=st.integers(0, 99),
            index_heads=st.integers(1, 3),
        )

    def why_not_over(self, shape: SequenceShape) -> str | None:
        """Refuse sequences whose tokens cannot be ranked in reasonable time."""
        blocks = -(-shape.length // self.block_size)
        if self.selector == "given" or shape.length * blocks <= MAX_RANKS:
            return None
        return (
            f"selector={self.selector} ranks {format_count(blocks)} blocks for each of {format_count(shape.length)} "
            f"tokens, above {format_count(MAX_RANKS)} pairs; use larger blocks, or an indices_file"
        )

    @property
    def differs_by_token(self) -> bool:
        """Each token has its own indices."""
        return True

    @property
    def selects(self) -> SelectedKeys:
        """Per token."""
        return SelectedKeys(self.block_size, per_token=True)

    @property
    def token_selector(self) -> TokenSelector | None:
        """The selector; None for given indices."""
        return TOKEN_SELECTORS.get(self.selector)

    @property
    def reads_queries(self) -> bool:
        """Return True if a device can select from the selector's stand-ins."""
        return self.selector in TOKEN_SELECTORS and TOKEN_SELECTORS[self.selector].reads_queries

    def tokens_of(self, shape: SequenceShape) -> Tokens:
        """The selector's input for a sequence."""
        group = shape.num_heads // shape.num_kv_heads
        size = self.block_size, shape.num_kv_heads, group, shape.causal
        return Tokens(shape.length, *size, self.selection_seed, self.top_k, self.index_heads)

    # Names.

    def label(self) -> str:
        """The label, with the unit that has its own selection."""
        return f"{super().label()} per token"

    def row_labels(self, shapes: Sequence[SequenceShape]) -> dict[str, str]:
        """Labels of some rows: a digest of their indices, and the share of blocks that a token and the one before it
        have in common."""
        return dict(_row_labels(self, tuple(shapes)))

    # The selection.

    def selected(self, shape: SequenceShape, kv_head: int, rows: Positions) -> Indices:
        """int32 [R, S], ascending, each once, padded by -1: the key blocks of some tokens of a key/value head.

        S is min(top_k, n) for n blocks. Raises ConfigError for a file that does not fit.
        """
        if self.indices_file is not None:
            of_heads = _from_file(self, shape.length, shape.num_kv_heads)
            of_rows: Indices = of_heads[rows, kv_head if of_heads.shape[1] > 1 else 0]
            return of_rows
        tokens, selector = self.tokens_of(shape), TOKEN_SELECTORS[self.selector]
        parts = [select_rows(selector, tokens, kv_head, part) for part in _pieces(rows, tokens.blocks)]
        return np.concatenate(parts) if parts else np.zeros((0, min(self.top_k, tokens.blocks)), dtype=np.int32)

    def selection(self, shape: SequenceShape) -> Indices:
        """int32 [N, K, S]: `selected` of all tokens and key/value heads. Raises ConfigError for a file that does not
        fit."""
        few = shape.length * shape.num_kv_heads * min(self.top_k, shape.length) <= KEPT_INDICES
        return _selection(self, shape).copy() if few else _selection.__wrapped__(self, shape)

    # Derived answers.

    def counts(self, shape: SequenceShape, head: int, rows: Positions) -> Iterator[KeyGroup]:
        """Rows with equal indices together."""
        indices = self.selected(shape, self.head_key(shape, head), rows)
        if indices.shape[1] <= MOST_COMPARED:
            for blocks, members in group_rows(indices.T.astype(np.int64), rows):
                yield KeyGroup(members, (self._keys(np.array(blocks, dtype=np.int64), shape.length),))
        else:
            for row, blocks in zip(rows, indices.astype(np.int64), strict=True):
                yield KeyGroup(np.array([row]), (self._keys(blocks, shape.length),))

    def head_key(self, shape: SequenceShape, head: int) -> int:
        """The key/value head."""
        return head * shape.num_kv_heads // shape.num_heads

    def rows_seeing(self, shape: SequenceShape, head: int, key: int) -> Positions:
        """The rows that rank the key's block high enough."""
        rows, kv_head, block = np.arange(shape.length), self.head_key(shape, head), key // self.block_size
        selector = self.token_selector
        if selector is None:
            return np.flatnonzero((self.selected(shape, kv_head, rows) == block).any(1))
        tokens = self.tokens_of(shape)
        ranks = selector.ranks(tokens, kv_head, rows, np.array([block]))[:, 0]
        return np.flatnonzero(ranks >= _thresholds(selector, tokens, kv_head))

    def covered(self, shape: SequenceShape, head: int) -> NDArray[np.bool_]:
        """All rows if every token has its own block; else counted."""
        if self.token_selector is not None and (self.block_size > 1 or shape.window == (-1, -1)):
            return np.ones(shape.length, dtype=bool)
        return self._keys_seen(shape, self.head_key(shape, head)) > 0

    def pairs(self, shape: SequenceShape) -> Pairs:
        """By a formula if all visible blocks but the token's own are whole."""
        if self.token_selector is not None and shape.causal and shape.window == (-1, -1):
            rows = np.arange(shape.length)
            earlier = np.minimum(self.top_k, rows // self.block_size + 1) - 1
            seen = shape.num_heads * int((earlier * self.block_size + rows % self.block_size + 1).sum())
        else:
            pairs: Pairs = counted_once(_pairs, self, shape)
            return pairs
        return Pairs(seen, seen)

    def keys_per_row(self, length: int) -> int:
        """The keys of all chosen blocks."""
        return min(length, self.top_k * self.block_size) if self.indices_file is None else length

    def edges(self, shape: SequenceShape) -> Positions:
        """The starts of blocks; of single tokens the first that does not see all before it."""
        if self.block_size == 1:
            return np.array([self.top_k])[: self.top_k < shape.length]
        return np.arange(0, shape.length, self.block_size)

    def near_misses(self) -> Mapping[str, Pattern]:
        """Selections that a kernel may take by mistake."""
        changes = {
            "the selection of the first token of each block of queries for all of it": "first_of_block",
            "the selection of the last token of each block of queries for all of it": "last_of_block",
            "each selected block one too early": "earlier",
            "each selected block one too late": "later",
            "no selected block that holds the token itself": "without_own",
            "the selection of the first key/value head for all heads": "first_head",
        }
        return {name: MistakenSelection(inner=self, change=change) for name, change in changes.items()}

    def near_misses_unmasked(self) -> Mapping[str, Pattern]:
        """The block on the diagonal as a whole."""
        return {"the token's own block without a causal mask": MistakenSelection(inner=self, change="unclipped")}

    def _keys(self, blocks: NDArray[np.int64], length: int) -> Positions:
        blocks = blocks[blocks != ABSENT]
        keys: Positions = (blocks[:, None] * self.block_size + np.arange(self.block_size)).ravel()
        return keys[keys < length]

    def _keys_seen(self, shape: SequenceShape, kv_head: int) -> Positions:
        """[N]: the keys that each row sees under causal mask and window."""
        rows, width = np.arange(shape.length), max(1, min(self.top_k, shape.length))
        seen = []
        for part in _pieces(rows, width):
            blocks = self.selected(shape, kv_head, part).astype(np.int64)
            first, stop = (edge[:, None] for edge in shape.bounds(part))
            begin = blocks * self.block_size
            sizes = np.minimum(begin + self.block_size, stop) - np.maximum(begin, first)
            seen.append(np.where(blocks == ABSENT, 0, np.maximum(sizes, 0)).sum(1))
        return np.concatenate(seen)


class MistakenSelection(Pattern):
    """Another selection with a mistake in it."""

    kind: Literal["mistaken_selection"] = "mistaken_selection"
    inner: Any
    change: str

    def counts(self, shape: SequenceShape, head: int, rows: Positions) -> Iterator[KeyGroup]:
        """A group for each row."""
        right: SelectedBlocksPattern = self.inner
        # Without its own mask the mistake still selects as under one.
        selecting = replace(shape, causal=True) if self.change == "unclipped" else shape
        kv_head = 0 if self.change == "first_head" else right.head_key(shape, head)
        # Kernels with single tokens as blocks of keys have longer blocks of queries.
        block = max(16, right.block_size)
        taken = {
            "first_of_block": rows // block * block,
            "last_of_block": np.minimum(rows // block * block + block, shape.length) - 1,
        }.get(self.change, rows)
        own, count = rows[:, None] // right.block_size, -(-shape.length // right.block_size)
        blocks = right.selected(selecting, kv_head, taken).astype(np.int64)
        moved = blocks + {"earlier": -1, "later": 1}.get(self.change, 0)
        unseen = (blocks == ABSENT) | (moved < 0) | (moved >= count)
        if self.change == "without_own":
            unseen |= blocks == own
        for row, of_row in zip(rows, np.where(unseen, ABSENT, moved), strict=True):
            yield KeyGroup(np.array([row]), (right._keys(of_row, shape.length),))

    def head_key(self, shape: SequenceShape, head: int) -> Hashable:
        """As of the right selection."""
        right: SelectedBlocksPattern = self.inner
        return right.head_key(shape, head)


@lru_cache(maxsize=16)
def _row_labels(pattern: SelectedBlocksPattern, shapes: tuple[SequenceShape, ...]) -> dict[str, str]:
    """Cached: each implementation and mode of a plan asks for them, and single tokens at 64K take seconds."""
    digest, shared, chosen = hashlib.sha256(), 0, 0
    for shape in shapes:
        rows = np.unique(np.linspace(0, shape.length - 1, LABELLED_ROWS).astype(np.int64))
        for head in range(shape.num_kv_heads):
            of_rows = pattern.selected(shape, head, rows)
            digest.update(of_rows.tobytes())
            own = _numbered(of_rows[rows > 0], shape.length)
            before = _numbered(pattern.selected(shape, head, rows[rows > 0] - 1), shape.length)
            shared, chosen = shared + int(np.isin(own, before).sum()), chosen + len(own)
    return {"selection": digest.hexdigest()[:16], "overlap": f"{shared / max(1, chosen):.2f}"}


def _numbered(blocks: Indices, length: int) -> NDArray[np.int64]:
    """The blocks of some rows as numbers of which each belongs to one row."""
    row, place = (blocks != ABSENT).nonzero()
    numbers: NDArray[np.int64] = row * length + blocks[row, place]
    return numbers


def _pieces(rows: Positions, columns: int) -> list[Positions]:
    at_once = max(1, RANKS_AT_ONCE // columns)
    return [rows[at : at + at_once] for at in range(0, len(rows), at_once)]


@lru_cache(maxsize=2)
def _selection(pattern: SelectedBlocksPattern, shape: SequenceShape) -> Indices:
    rows = np.arange(shape.length)
    first = pattern.selected(shape, 0, rows[:0])
    indices = np.empty((shape.length, shape.num_kv_heads, first.shape[1]), dtype=np.int32)
    for head in range(shape.num_kv_heads):
        indices[:, head] = pattern.selected(shape, head, rows)
    return indices


@lru_cache(maxsize=32)
def _thresholds(selector: TokenSelector, tokens: Tokens, kv_head: int) -> NDArray[np.int64]:
    """[N]: the least rank that is chosen in each row of a key/value head."""
    rows = np.arange(tokens.length)
    return np.concatenate([thresholds(selector, tokens, kv_head, part) for part in _pieces(rows, tokens.blocks)])


def _pairs(pattern: SelectedBlocksPattern, shape: SequenceShape) -> Pairs:
    """Attended pairs over all query heads, counted row by row."""
    of_heads = (int(pattern._keys_seen(shape, head).sum()) for head in range(shape.num_kv_heads))
    seen = shape.num_heads // shape.num_kv_heads * sum(of_heads)
    return Pairs(seen, seen)


@lru_cache(maxsize=4)
def _from_file(pattern: SelectedBlocksPattern, length: int, kv_heads: int) -> Indices:
    """int32 [N, 1 or K, S], ascending, each once, padded by -1."""
    name = str(pattern.indices_file)
    blocks = -(-length // pattern.block_size)
    form = "integers [N, S] or [N, K, S], -1 where a token has fewer blocks,"
    indices = read_array(Path(name), pattern.indices_digest, "indices", form)
    if not np.issubdtype(indices.dtype, np.integer) or indices.ndim not in (2, 3) or not indices.shape[-1]:
        raise ConfigError(
            f"indices file {name!r} holds {indices.dtype} {list(indices.shape)}; give integers [N, S] or [N, K, S]: "
            "the key blocks of each of N tokens"
        )
    indices = indices[:, None] if indices.ndim == 2 else indices
    if len(indices) != length:
        raise ConfigError(f"indices file {name!r} has {len(indices)} tokens; the sequence has {length}")
    if indices.shape[1] not in (1, kv_heads):
        raise ConfigError(
            f"indices file {name!r} has {indices.shape[1]} heads; the workload has {kv_heads} key/value heads; give 1 "
            f"or {kv_heads}"
        )
    wrong = (indices < ABSENT) | (indices >= blocks)
    if wrong.any():
        row, head, place = (int(at[0]) for at in wrong.nonzero())
        raise ConfigError(
            f"indices file {name!r}, token {row}, head {head}: key block {indices[row, head, place]} is not in "
            f"0..{blocks - 1}; -1 means none"
        )
    selected = distinct_blocks(indices, blocks)[:, :, :blocks]
    selected.flags.writeable = False
    return selected
