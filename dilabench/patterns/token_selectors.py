"""Selectors per query token and key/value head: functions that rank the key blocks of which a token keeps the best.

A selection is an input of the attention (semantics.md §5). Models score queries and keys; here the scores come from
stand-ins: whole numbers drawn from the seed, the keys equal within a block. Their products and means are exact in every
dtype and order of summation, so that a device selects the same blocks as the oracle. Stand-ins of queries drift along
the sequence, so that the selections of neighbours overlap as in models. All ranks of any rows and blocks are computed
on their own, so that nothing of the size of the whole selection need exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dilabench.patterns.selectors import ABSENT, LARGEST, STAND_IN_DIM

if TYPE_CHECKING:
    from dilabench.patterns.answers import Positions

    Ranks = NDArray[np.int64]

# A query is the sum of a part that this many neighbours share, and of a smaller one.
DRIFT, SHARED, OWN = 64, 96, 31
# For the indexer, whose scores are sums over heads.
LARGEST_INDEXED, LARGEST_WEIGHT = 31, 7
# Ranks of blocks that are always chosen are raised by these, so that the token's own block is the best.
LOCAL, OWN_BLOCK = 2**60, 2**61
HIDDEN = np.iinfo(np.int64).min
# Multiplications of a product for which OpenBLAS starts no threads.
SMALL_PRODUCT = 2**18
LEAST = -(2**39)
# Neighbours that share most of a selection of selector `neighbours`, and how much of it.
NEIGHBOURS, SHARE = 4, 0.75


@dataclass(frozen=True, slots=True)
class Tokens:
    """A selector's input: `length` tokens, keys in blocks of `block`, `kv_heads` heads of `group` query heads each.

    `causal`: a token chooses among the blocks up to its own. `index_heads`: heads of the indexer per key/value head.
    """

    length: int
    block: int
    kv_heads: int
    group: int
    causal: bool
    seed: int
    top_k: int
    index_heads: int

    @property
    def blocks(self) -> int:
        """Blocks of keys; the last one may be short."""
        return -(-self.length // self.block)


@dataclass(frozen=True, slots=True)
class TokenSelector:
    """`scores`: for a key/value head, rows [R] and blocks [C], whole numbers [R, C] below 2^40, higher is better.

    The first `initial` blocks, and the last `local` ones up to the token's own, are always chosen. `reads_queries`: a
    device can select from stand-ins.
    """

    summary: str
    scores: Callable[[Tokens, int, Positions, Positions], Ranks]
    initial: int = 0
    local: int = 1
    reads_queries: bool = False

    def local_of(self, tokens: Tokens) -> int:
        """Local blocks that are always chosen: none of single tokens, which DSA chooses by score alone."""
        return self.local if tokens.block > 1 else 0

    def ranks(self, tokens: Tokens, kv_head: int, rows: Positions, blocks: Positions) -> Ranks:
        """[R, C] for ascending blocks: distinct in each row, higher is better; `HIDDEN` where a causal mask hides."""
        own = rows // tokens.block
        ranks = self.scores(tokens, kv_head, rows, blocks)
        # At equal scores the earlier block is better.
        ranks *= tokens.blocks
        ranks += tokens.blocks - 1 - blocks
        local = self.local_of(tokens)
        if local:
            _raise(ranks, blocks, own, OWN_BLOCK)
            for back in range(1, local):
                _raise(ranks, blocks, own - back, LOCAL)
            # The first blocks of a sequence are local ones, too.
            for block in range(self.initial):
                _raise(ranks, blocks, np.where(own - block >= local, block, -1), LOCAL)
        if tokens.causal and len(rows):
            ahead = int(np.searchsorted(blocks, own.min(), side="right"))
            ranks[:, ahead:][blocks[ahead:] > own[:, None]] = HIDDEN
        return ranks

    def all_ranks(self, tokens: Tokens, kv_head: int, rows: Positions) -> Ranks:
        """[R, C]: the ranks of all blocks, or under a causal mask of all that some row may see."""
        last = int(rows.max()) // tokens.block + 1 if tokens.causal and len(rows) else tokens.blocks
        return self.ranks(tokens, kv_head, rows, np.arange(last))


def _raise(ranks: Ranks, blocks: Positions, chosen: Positions, by: int) -> None:
    """Add to the rank of one block of each row, in place, if it is among `blocks`."""
    place = np.minimum(np.searchsorted(blocks, chosen), len(blocks) - 1)
    row = np.flatnonzero(blocks[place] == chosen)
    ranks[row, place[row]] += by


@lru_cache(maxsize=16)
def stand_ins(tokens: Tokens, kv_head: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Queries [N, `STAND_IN_DIM`], which all heads of the group share, and keys [n, `STAND_IN_DIM`] of the blocks."""
    draw = np.random.default_rng((tokens.seed, kv_head))
    queries = _drifting(draw, tokens.length, STAND_IN_DIM, SHARED, OWN)
    keys = draw.integers(-LARGEST, LARGEST + 1, (tokens.blocks, STAND_IN_DIM)).astype(np.float32)
    return queries, keys


@lru_cache(maxsize=16)
def indexer_stand_ins(
    tokens: Tokens, kv_head: int
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Queries [N, I, `STAND_IN_DIM`] and weights [N, I] of I index heads, keys [n, `STAND_IN_DIM`] of the blocks."""
    draw = np.random.default_rng((tokens.seed, kv_head, 1))
    heads, shared = tokens.index_heads, LARGEST_INDEXED * 3 // 4
    queries = _drifting(draw, tokens.length, heads * STAND_IN_DIM, shared, LARGEST_INDEXED - shared)
    keys = draw.integers(-LARGEST_INDEXED, LARGEST_INDEXED + 1, (tokens.blocks, STAND_IN_DIM)).astype(np.float32)
    weights = draw.integers(1, LARGEST_WEIGHT + 1, (tokens.length, heads)).astype(np.float32)
    return queries.reshape(tokens.length, heads, STAND_IN_DIM), weights, keys


def _drifting(draw: np.random.Generator, length: int, width: int, shared: int, own: int) -> NDArray[np.float32]:
    of_neighbours = draw.integers(-shared, shared + 1, (-(-length // DRIFT), width))
    numbers = of_neighbours.repeat(DRIFT, 0)[:length] + draw.integers(-own, own + 1, (length, width))
    return numbers.astype(np.float32)


def _product(tokens: Tokens, kv_head: int, rows: Positions, blocks: Positions) -> Ranks:
    """Query times mean key; every head of the group has this query. At most 16 · 127², exact in float32."""
    queries, keys = stand_ins(tokens, kv_head)
    return _products(queries[rows], keys[blocks]).astype(np.int64)


def _compressed(tokens: Tokens, kv_head: int, rows: Positions, blocks: Positions) -> Ranks:
    """The same, in whose order shares of attention are; a last block that is short has no mean."""
    scores = _product(tokens, kv_head, rows, blocks)
    scores[:, blocks >= tokens.length // tokens.block] = LEAST
    return scores


def _products(queries: NDArray[np.float32], keys: NDArray[np.float32]) -> NDArray[np.float32]:
    """[R, C], in products so small that BLAS starts no threads: on a busy machine those take ten times as long."""
    rows = max(1, SMALL_PRODUCT // max(1, keys.size))
    if rows >= len(queries):
        return queries @ keys.T
    stacked = np.pad(queries, ((0, -len(queries) % rows), (0, 0))).reshape(-1, rows, queries.shape[1])
    products: NDArray[np.float32] = (stacked @ keys.T).reshape(-1, len(keys))[: len(queries)]
    return products


def _indexed(tokens: Tokens, kv_head: int, rows: Positions, blocks: Positions) -> Ranks:
    """sum_h w[h] · relu(q[h] · k). Exact in float32 up to 155 index heads."""
    queries, weights, keys = indexer_stand_ins(tokens, kv_head)
    total = np.zeros((len(rows), len(blocks)), dtype=np.float32)
    for head in range(tokens.index_heads):
        of_head = _products(queries[rows, head], keys[blocks])
        total += weights[rows, head, None] * np.maximum(of_head, 0, out=of_head)
    return total.astype(np.int64)


def _random(tokens: Tokens, kv_head: int, rows: Positions, blocks: Positions) -> Ranks:
    """A hash of (seed, head, row, block), of 40 bits."""
    return (_hashed(tokens, kv_head, rows, blocks) >> np.uint64(24)).astype(np.int64)


def _neighbours(tokens: Tokens, kv_head: int, rows: Positions, blocks: Positions) -> Ranks:
    """The larger of a hash that neighbours share and of the token's own, which is scaled so as to win a quarter."""
    shared = _hashed(tokens, kv_head, rows // NEIGHBOURS * NEIGHBOURS, blocks) / 2.0**64
    own = _hashed(tokens, kv_head + tokens.kv_heads, rows, blocks) / 2.0**64
    visible = rows // tokens.block + 1 if tokens.causal else np.full_like(rows, tokens.blocks)
    chosen = np.minimum(1.0, (tokens.top_k - 1) / np.maximum(visible - 1, 1))
    # A hash of neighbours above `least` is chosen, as is one of the token's own above `least / scale`.
    least = 1 - SHARE * chosen
    scale = least / (1 - (1 - SHARE) * chosen)
    return (np.maximum(shared, own * scale[:, None]) * 2**40).astype(np.int64)


def _hashed(tokens: Tokens, kv_head: int, rows: Positions, blocks: Positions) -> NDArray[np.uint64]:
    """64 bits for each row and block (splitmix64; Steele, Lea and Flood 2014)."""
    begin = np.random.default_rng((tokens.seed, kv_head)).integers(2**64, dtype=np.uint64)
    # Overflow wraps, as is wanted.
    x = begin + (rows[:, None] * tokens.blocks + blocks).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


TOKEN_SELECTORS: Mapping[str, TokenSelector] = {
    "mean_key": TokenSelector("query times mean key, the own block always (MoBA)", _product, reads_queries=True),
    "compressed": TokenSelector(
        "attention to means of blocks, the first block and two local ones always (NSA)",
        _compressed,
        initial=1,
        local=2,
        reads_queries=True,
    ),
    "indexer": TokenSelector(
        "a lightning indexer with given weights; the own block always, but for single tokens (DSA, MSA)",
        _indexed,
        reads_queries=True,
    ),
    "random": TokenSelector("drawn from the seed, the own block always", _random),
    "neighbours": TokenSelector(
        "drawn from the seed, about three of four blocks shared by 4 neighbours, the own block always", _neighbours
    ),
}


def thresholds(selector: TokenSelector, tokens: Tokens, kv_head: int, rows: Positions) -> Ranks:
    """[R]: the least rank that is chosen in each row; all visible blocks if they are at most `top_k`."""
    return _least_chosen(selector.all_ranks(tokens, kv_head, rows), tokens.top_k)


def select_rows(selector: TokenSelector, tokens: Tokens, kv_head: int, rows: Positions) -> NDArray[np.int32]:
    """[R, min(top_k, n)]: the chosen blocks of each row, ascending, padded by `ABSENT`."""
    ranks = selector.all_ranks(tokens, kv_head, rows)
    row, block = (ranks >= _least_chosen(ranks, tokens.top_k)[:, None]).nonzero()
    selected = np.full((len(rows), min(tokens.top_k, tokens.blocks)), ABSENT, dtype=np.int32)
    selected[row, np.arange(len(row)) - np.searchsorted(row, row)] = block
    return selected


def _least_chosen(ranks: Ranks, top_k: int) -> Ranks:
    beyond = ranks.shape[1] - top_k
    if beyond <= 0:
        return np.full(len(ranks), HIDDEN + 1)
    least: Ranks = np.partition(ranks, beyond, axis=1)[:, beyond]
    return np.maximum(least, HIDDEN + 1)
