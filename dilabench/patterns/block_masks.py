"""Block masks: which blocks of keys a block of queries sees. Exact, seeded, and of the requested density.

Every kind is an order of preference over the visible blocks of a row; a row keeps the first k of them, with
k = round(density * visible), at least one. So each row has the requested density to within one block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dilabench.errors import ConfigError
from dilabench.patterns.mask_files import mask_digest as digest_of
from dilabench.patterns.mask_files import mask_of_digest, read_mask_file

if TYPE_CHECKING:
    Mask = NDArray[np.bool_]

MAX_BLOCKS = 2**15


# The masks of packed sequences are small, and each length has one.
SMALL = 1 << 16


def generated_mask(kind: str, sparsity: float, seed: int, blocks: int, causal: bool, heads: int) -> Mask:
    """[heads, blocks, blocks]: each row keeps the share 1 - sparsity of its visible blocks that the kind prefers."""
    kept = _kept_small if heads * blocks * blocks <= SMALL else _kept_large
    return kept(kind, sparsity, seed, blocks, causal, heads)


def _drawn(kind: str, sparsity: float, seed: int, blocks: int, causal: bool, heads: int) -> Mask:
    mask = np.zeros((heads, blocks, blocks), dtype=bool)
    prefer = PREFERENCES[kind]
    for head in range(heads):
        for row in range(blocks):
            visible = row + 1 if causal else blocks
            keep = max(1, round((1 - sparsity) * visible))
            order = prefer(MaskRow(row, visible, keep, head, seed))
            mask[head, row, order[:keep]] = True
    mask.flags.writeable = False
    return mask


_kept_small, _kept_large = lru_cache(maxsize=256)(_drawn), lru_cache(maxsize=8)(_drawn)


def visible_blocks(blocks: int, causal: bool) -> int:
    """Blocks that a mask of `blocks` a side could compute: all, or the lower triangle when causal."""
    return blocks * (blocks + 1) // 2 if causal else blocks * blocks


def block_shares(mask: Mask, lines: int, columns: int) -> NDArray[np.float64]:
    """[lines, columns]: the share of blocks that is computed in each cell of a picture of one head's mask [n, n].

    Cells hold parts of the mask that are as equal as possible; lines and columns beyond n are omitted.
    """
    blocks = mask.shape[0]
    rows, keys = (np.arange(min(blocks, size) + 1) * blocks // min(blocks, size) for size in (lines, columns))
    sums = np.add.reduceat(np.add.reduceat(mask.astype(int), rows[:-1], axis=0), keys[:-1], axis=1)
    shares: NDArray[np.float64] = sums / np.outer(np.diff(rows), np.diff(keys))
    return shares


def needed_key_blocks(mask: Mask, block_size: int, rows: Sequence[range]) -> NDArray[np.int64]:
    """The key blocks that some of these query rows (ranges of positions) see in some head, in ascending order.

    A rank that owns these queries must receive exactly these blocks.
    """
    wanted = np.zeros(mask.shape[1], dtype=bool)
    for part in rows:
        if len(part):
            wanted[part[0] // block_size : part[-1] // block_size + 1] = True
    return np.flatnonzero(mask[:, wanted].any(axis=(0, 1)))


def rows_of_blocks(chosen: NDArray[np.bool_], block_size: int, count: int) -> NDArray[np.int64]:
    """The rows below `count` of the chosen ([n]) blocks, ascending."""
    rows: NDArray[np.int64] = (np.flatnonzero(chosen)[:, None] * block_size + np.arange(block_size)).ravel()
    return rows[rows < count]


def rows_with_keys(mask: Mask, block_size: int, count: int, reach: tuple[int | None, int | None]) -> NDArray[np.bool_]:
    """[count]: the rows that see a key: some block is set from the block of the first key in reach to the last one's.

    `reach`: rows back and ahead, as `SequenceShape.reach`.
    """
    left, right = reach
    rows = np.arange(count)
    first = np.zeros_like(rows) if left is None else np.maximum(rows - left, 0)
    last = np.full_like(rows, count - 1) if right is None else np.minimum(rows + right, count - 1)
    before = np.pad(mask.astype(np.int64).cumsum(1), ((0, 0), (1, 0)))
    block = rows // block_size
    seen: NDArray[np.bool_] = before[block, last // block_size + 1] > before[block, first // block_size]
    return seen


@dataclass(frozen=True, slots=True)
class MaskRow:
    """One row of blocks of one head: its index, how many blocks it could see, and how many it keeps."""

    row: int
    visible: int
    keep: int
    head: int
    seed: int


Preference = Callable[[MaskRow], "NDArray[np.int64]"]


def _nearest(at: MaskRow) -> NDArray[np.int64]:
    """`local_window`: the closest blocks first."""
    return np.argsort(np.abs(np.arange(at.visible) - at.row), kind="stable")


def _global_then_nearest(at: MaskRow) -> NDArray[np.int64]:
    """`global_local`: a quarter of a row's blocks are the sequence's first, seen by all; the rest are closest."""
    anchors = np.arange(min(at.visible, max(1, at.keep // 4)))
    own_block = np.array([min(at.row, at.visible - 1)])
    return _distinct(own_block, anchors, _nearest(at))


def _powers_of_two(at: MaskRow) -> NDArray[np.int64]:
    """`dilated_sparse`: the own block, then distances 1, 2, 4, 8, ..., then those with the most factors of two."""
    distance = np.abs(np.arange(at.visible) - at.row)
    is_power = (distance & (distance - 1)) == 0
    factors = np.where(is_power, 0, distance & -distance)
    order: NDArray[np.int64] = np.lexsort((distance, -factors, ~is_power))
    return order


def _local_and_columns(at: MaskRow) -> NDArray[np.int64]:
    """`strided`: half local, half every s-th block (Sparse Transformer, Child et al. 2019), s = 2 visible / keep."""
    distance = np.abs(np.arange(at.visible) - at.row)
    stride = max(2, round(at.visible / max(1, at.keep / 2)))
    columns = np.flatnonzero(distance % stride == 0)
    columns = columns[np.argsort(distance[columns], kind="stable")]
    local = _nearest(at)
    return _distinct(local[: max(1, at.keep - at.keep // 2)], columns, local)


def _three_levels(at: MaskRow) -> NDArray[np.int64]:
    """`hierarchical`: a third each of the closest blocks, every 4th block around, every 16th block anywhere."""
    index = np.arange(at.visible)
    nearest = _nearest(at)
    share = max(1, at.keep // 3)
    fourth = nearest[index[nearest] % 4 == 0][:share]
    sixteenth = nearest[index[nearest] % 16 == 0]
    spread = sixteenth[:: max(1, len(sixteenth) // share)][:share]
    return _distinct(nearest[: max(1, at.keep - 2 * share)], fourth, spread, nearest)


def _seeded(at: MaskRow) -> NDArray[np.int64]:
    """`random`: the own block, then a permutation drawn from (seed, head, row)."""
    draw = np.random.default_rng((at.seed, at.head, at.row)).permutation(at.visible)
    return _distinct(np.array([min(at.row, at.visible - 1)]), draw)


PREFERENCES: dict[str, Preference] = {
    "local_window": _nearest,
    "global_local": _global_then_nearest,
    "dilated_sparse": _powers_of_two,
    "strided": _local_and_columns,
    "hierarchical": _three_levels,
    "random": _seeded,
}


def _distinct(*orders: NDArray[np.int64]) -> NDArray[np.int64]:
    """The orders one after another, each block at its first place only."""
    joined = np.concatenate(orders)
    _, first = np.unique(joined, return_index=True)
    return joined[np.sort(first)]


def custom_mask(
    mask_file: str, mask_digest: str | None, block_size: int, blocks: int, causal: bool, num_heads: int
) -> Mask:
    """[num_heads or 1, blocks, blocks]: the mask of a file. Raises ConfigError when it does not fit."""
    path = Path(mask_file)
    digest = mask_digest or digest_of(path)
    mask = _from_file(mask_of_digest(path, digest), digest, blocks)
    if mask.shape[0] not in (1, num_heads):
        raise ConfigError(
            f"mask file {mask_file!r} has {mask.shape[0]} heads; the workload has {num_heads}; give 1 or {num_heads}"
        )
    if mask.shape[1:] != (blocks, blocks):
        raise ConfigError(
            f"mask file {mask_file!r} has {mask.shape[1]}x{mask.shape[2]} blocks; the workload needs "
            f"{blocks}x{blocks} blocks of {block_size}; change seq_len, block_size or the file"
        )
    return np.tril(mask) if causal else mask


@lru_cache(maxsize=8)
def _from_file(path: Path, _digest: str, blocks: int) -> Mask:
    return read_mask_file(path, blocks)


def masked_pairs(mask: Mask, size: int, rows: int, causal: bool, window: tuple[int, int]) -> int:
    """Visible pairs of one head's block mask [n, n] (bool, over blocks of `size`) on `rows` consecutive rows."""
    last = mask.shape[0] - 1
    short = rows - last * size
    row, column = mask.nonzero()
    # Blocks at one distance hold equally many pairs, except those that the end of the rows cuts.
    alike = np.bincount((row - column + last) * 4 + (row == last) * 2 + (column == last))
    total = 0
    for code in alike.nonzero()[0].tolist():
        queries, keys = (short if code & 2 else size), (short if code & 1 else size)
        total += int(alike[code]) * _pairs_of_blocks(((code >> 2) - last) * size, queries, keys, causal, window)
    return total


@lru_cache(maxsize=4096)
def _pairs_of_blocks(distance: int, queries: int, keys: int, causal: bool, window: tuple[int, int]) -> int:
    """Pairs between a block of queries and one of keys that starts `distance` rows earlier."""
    left, right = window
    right = 0 if causal else right
    if left < 0 and (right < 0 or keys - 1 <= distance + right):
        return queries * keys
    total = 0
    for query in range(queries):
        position = query + distance
        first = 0 if left < 0 else max(0, position - left)
        last = keys - 1 if right < 0 else min(keys - 1, position + right)
        total += max(0, last - first + 1)
    return total
