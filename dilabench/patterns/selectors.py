"""Selectors: functions that score the key blocks of which a query block keeps the best. Exact and seeded.

A selection is an input of the attention (semantics.md §5), so each workload has one, shared by all batch items. MoBA
and VSA score queries and keys; here the scores come from stand-ins of the same shape: whole numbers up to 127, drawn
from the seed, the same for all rows of a block and 0 beyond `STAND_IN_DIM` numbers. Their means and products are exact
in every dtype and order of summation, so that a device selects the same blocks as the oracle. `numpy` is imported on
use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    Scores = NDArray[np.float64]
    Indices = NDArray[np.int32]

STAND_IN_DIM = 16
LARGEST = 127
# Entries of a selection that are no block.
ABSENT = -1
# Query blocks that are scored together.
ROWS_AT_ONCE = 1024


def distinct_blocks(indices: NDArray[np.integer[Any]], blocks: int) -> Indices:
    """int32 [..., S] of indices below `blocks` or `ABSENT`, [..., S]: ascending, each once, padded by `ABSENT`."""
    ordered = np.sort(np.where(indices == ABSENT, blocks, indices), axis=-1)
    ordered[..., 1:][ordered[..., 1:] == ordered[..., :-1]] = blocks
    ordered.sort(axis=-1)
    return np.where(ordered == blocks, ABSENT, ordered).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A selector's input: `count` blocks of queries and of keys, for `kv_heads` heads of `group` query heads each.

    `causal`: a block of queries chooses among the blocks up to the same index.
    """

    count: int
    kv_heads: int
    group: int
    causal: bool
    seed: int


@dataclass(frozen=True, slots=True)
class Selector:
    """`scores`: for a key/value head and a range of query blocks, the scores of all key blocks [R, n], higher is
    better. `own_block`: the query's block is always chosen. `reads_queries`: a device can select from `stand_ins`."""

    summary: str
    scores: Callable[[Blocks, int, range], Scores]
    own_block: bool = False
    reads_queries: bool = False


def stand_ins(blocks: Blocks, kv_head: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Queries [n, group, `STAND_IN_DIM`] and keys [n, `STAND_IN_DIM`] of the blocks of one key/value head."""
    draw = np.random.default_rng((blocks.seed, kv_head))
    numbers = draw.integers(-LARGEST, LARGEST + 1, (blocks.count, blocks.group + 1, STAND_IN_DIM))
    return numbers[:, 1:], numbers[:, 0]


def _product(blocks: Blocks, kv_head: int, rows: range) -> Scores:
    """Mean query, summed over the heads of the group, times mean key."""
    queries, keys = stand_ins(blocks, kv_head)
    scores: Scores = queries[rows.start : rows.stop].sum(1).astype(float) @ keys.T.astype(float)
    return scores


def _random(blocks: Blocks, kv_head: int, rows: range) -> Scores:
    """Uniform draws from (seed, head, rows)."""
    draw = np.random.default_rng((blocks.seed, kv_head, rows.start))
    return draw.random((len(rows), blocks.count))


SELECTORS: Mapping[str, Selector] = {
    "mean_key": Selector("mean query times mean key, the own block always (as in MoBA)", _product, True, True),
    "pooled": Selector("mean query times mean key (VSA)", _product, reads_queries=True),
    "random": Selector("drawn from the seed", _random),
}


def select(selector: Selector, blocks: Blocks, top_k: int) -> Indices:
    """int32 [kv heads, n, k]: the k = min(top_k, n) best key blocks of each query block, ascending, padded by `ABSENT`.

    At equal scores the earlier block is better. With fewer blocks to choose from, a query block selects all of them.
    """
    selected = np.full((blocks.kv_heads, blocks.count, min(top_k, blocks.count)), ABSENT, dtype=np.int32)
    for head in range(blocks.kv_heads):
        for start in range(0, blocks.count, ROWS_AT_ONCE):
            rows = range(start, min(start + ROWS_AT_ONCE, blocks.count))
            scores = selector.scores(blocks, head, rows)
            own_block = np.array(rows)[:, None]
            if selector.own_block:
                scores = np.where(np.arange(blocks.count) == own_block, np.inf, scores)
            if blocks.causal:
                scores = np.where(np.arange(blocks.count) > own_block, -np.inf, scores)
            best = np.argsort(-scores, axis=1, kind="stable")[:, : selected.shape[2]]
            best = np.where(np.take_along_axis(scores, best, 1) == -np.inf, blocks.count, best)
            best.sort(axis=1)
            selected[head, rows.start : rows.stop] = np.where(best == blocks.count, ABSENT, best)
    return selected
