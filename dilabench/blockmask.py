"""Block masks: which blocks of keys a block of queries sees. Exact, seeded, and of the density that was asked for.

Every kind is an order of preference over the visible blocks of a row; a row keeps the first k of them, with
k = round((1 - sparsity) * visible), at least one. So the sparsity asked for is met within one block in every row.
`numpy` is imported on use: listing and help never need it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilabench.errors import ConfigError
from dilabench.spec import BlockSparsePattern

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Mask = NDArray[np.bool_]

MAX_BLOCKS = 2**15


def block_mask(pattern: BlockSparsePattern, rows: int, causal: bool, num_heads: int) -> Mask:
    """The mask [num_heads or 1, n, n] over n = ceil(rows / block_size) blocks: True where block (i, j) is computed.

    Raises ConfigError when there are more than 2^15 blocks a side, or when a mask file does not fit.
    """
    blocks = -(-rows // pattern.block_size)
    if blocks > MAX_BLOCKS:
        raise ConfigError(
            f"block_size={pattern.block_size} cuts {rows} rows into {blocks} blocks a side, above {MAX_BLOCKS}; "
            f"use block_size={-(-rows // MAX_BLOCKS)} or more"
        )
    if pattern.mask == "custom":
        return _custom_mask(pattern, blocks, causal, num_heads)
    heads = num_heads if pattern.per_head else 1
    return _generated(pattern, blocks, causal, heads)


@lru_cache(maxsize=8)
def _generated(pattern: BlockSparsePattern, blocks: int, causal: bool, heads: int) -> Mask:
    import numpy as np

    mask = np.zeros((heads, blocks, blocks), dtype=bool)
    prefer = PREFERENCES[pattern.mask]
    for head in range(heads):
        for row in range(blocks):
            visible = row + 1 if causal else blocks
            keep = max(1, round((1 - pattern.sparsity) * visible))
            mask[head, row, prefer(pattern, row, visible, keep, head)[:keep]] = True
    mask.flags.writeable = False
    return mask


def sparsity_reached(mask: Mask, causal: bool) -> float:
    """The share of visible blocks (all, or the lower triangle when causal) that the mask does not compute."""
    blocks = mask.shape[-1]
    visible = blocks * (blocks + 1) // 2 if causal else blocks * blocks
    return 1.0 - float(mask.sum()) / (visible * mask.shape[0])


Preference = Callable[[BlockSparsePattern, int, int, int, int], "NDArray[np.int64]"]


def _nearest(_pattern: BlockSparsePattern, row: int, visible: int, _keep: int, _head: int) -> NDArray[np.int64]:
    """`local_window`: the closest blocks first."""
    import numpy as np

    return np.argsort(np.abs(np.arange(visible) - row), kind="stable")


def _global_then_nearest(pattern: BlockSparsePattern, row: int, visible: int, keep: int, head: int) -> NDArray[np.int64]:
    """`global_local`: a quarter of the row's blocks are the first of the sequence, seen by all; the rest are the closest."""
    import numpy as np

    anchors = np.arange(min(visible, max(1, keep // 4)))
    own = np.array([min(row, visible - 1)])
    return _distinct(own, anchors, _nearest(pattern, row, visible, keep, head))


def _powers_of_two(pattern: BlockSparsePattern, row: int, visible: int, keep: int, head: int) -> NDArray[np.int64]:
    """`dilated_sparse`: the own block, then distances 1, 2, 4, 8, ..., then the distances with the most factors of two."""
    import numpy as np

    distance = np.abs(np.arange(visible) - row)
    is_power = (distance & (distance - 1)) == 0
    factors = np.where(distance == 0, 64, np.log2(np.maximum(distance & -distance, 1)))
    return np.lexsort((distance, -factors, ~is_power))


def _local_and_columns(pattern: BlockSparsePattern, row: int, visible: int, keep: int, head: int) -> NDArray[np.int64]:
    """`strided`: half local, half every s-th block back and ahead (Sparse Transformer, Child et al. 2019), s = visible / (keep / 2)."""
    import numpy as np

    distance = np.abs(np.arange(visible) - row)
    stride = max(2, round(visible / max(1, keep / 2)))
    columns = np.flatnonzero(distance % stride == 0)
    columns = columns[np.argsort(distance[columns], kind="stable")]
    local = _nearest(pattern, row, visible, keep, head)
    return _distinct(local[: max(1, keep - keep // 2)], columns, local)


def _three_levels(pattern: BlockSparsePattern, row: int, visible: int, keep: int, head: int) -> NDArray[np.int64]:
    """`hierarchical`: a third each of the closest blocks, every 4th block around, every 16th block anywhere."""
    import numpy as np

    index = np.arange(visible)
    nearest = _nearest(pattern, row, visible, keep, head)
    share = max(1, keep // 3)
    fourth = nearest[index[nearest] % 4 == 0][:share]
    sixteenth = nearest[index[nearest] % 16 == 0]
    spread = sixteenth[:: max(1, len(sixteenth) // share)][:share]
    return _distinct(nearest[: max(1, keep - 2 * share)], fourth, spread, nearest)


def _seeded(pattern: BlockSparsePattern, row: int, visible: int, keep: int, head: int) -> NDArray[np.int64]:
    """`random`: the own block, then a permutation drawn from (seed, head, row)."""
    import numpy as np

    draw = np.random.default_rng((pattern.seed, head, row)).permutation(visible)
    return _distinct(np.array([min(row, visible - 1)]), draw)


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
    import numpy as np

    joined = np.concatenate(orders)
    _, first = np.unique(joined, return_index=True)
    return joined[np.sort(first)]


def _custom_mask(pattern: BlockSparsePattern, blocks: int, causal: bool, num_heads: int) -> Mask:
    import numpy as np

    assert pattern.mask_file is not None
    mask = read_mask_file(Path(pattern.mask_file), blocks)
    if pattern.mask_digest not in (None, mask_digest(Path(pattern.mask_file))):
        raise ConfigError(f"mask file {pattern.mask_file!r} has changed since the request was made; start again")
    if mask.shape[0] not in (1, num_heads):
        raise ConfigError(f"mask file {pattern.mask_file!r} has {mask.shape[0]} heads; the workload has {num_heads}; give 1 or {num_heads}")
    if mask.shape[1:] != (blocks, blocks):
        raise ConfigError(
            f"mask file {pattern.mask_file!r} has {mask.shape[1]}x{mask.shape[2]} blocks; the workload needs {blocks}x{blocks} "
            f"blocks of {pattern.block_size}; change seq_len, block_size or the file"
        )
    return np.tril(mask) if causal else mask


def mask_digest(path: Path) -> str:
    """SHA-256 (16 hex digits) of a mask file's bytes; raises ConfigError when it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise ConfigError(f"mask file {str(path)!r} cannot be read: {error.strerror}") from None


def read_mask_file(path: Path, blocks: int) -> Mask:
    """Read a block mask: `.npy` of bool or 0/1 integers, [n, n] or [heads, n, n]; or `.json`, lists of key blocks per row.

    JSON: [[0], [0, 1], ...] for all heads, or one such list per head. Raises ConfigError with the place of the mistake.
    """
    import numpy as np

    try:
        if path.suffix == ".json":
            mask = _from_lists(json.loads(path.read_text()), blocks, path)
        else:
            mask = np.load(path, allow_pickle=False)
    except OSError as error:
        raise ConfigError(f"mask file {str(path)!r} cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError) as error:
        raise ConfigError(f"mask file {str(path)!r} is not a valid {path.suffix or 'npy'} file: {error}") from None
    if mask.dtype != bool:
        if not np.issubdtype(mask.dtype, np.integer) or not np.isin(mask, (0, 1)).all():
            raise ConfigError(f"mask file {str(path)!r} holds {mask.dtype}; a block mask is bool, or integers 0 and 1")
        mask = mask.astype(bool)
    if mask.ndim == 2:
        mask = mask[None]
    if mask.ndim != 3:
        raise ConfigError(f"mask file {str(path)!r} has {mask.ndim} dimensions; it must be [n, n] or [heads, n, n]")
    return mask


def _from_lists(content: Any, blocks: int, path: Path) -> Mask:
    import numpy as np

    if not isinstance(content, list) or not content:
        raise ConfigError(f"mask file {str(path)!r} must hold a list with one list of key blocks per row of blocks")
    per_head = bool(content[0]) and isinstance(content[0], list) and bool(content[0]) and isinstance(content[0][0], list)
    heads = content if per_head else [content]
    mask = np.zeros((len(heads), len(heads[0]), blocks), dtype=bool)
    for place, key in _entries(heads, path):
        if place[1] >= mask.shape[1]:
            raise ConfigError(f"mask file {str(path)!r}: head {place[0]} has more rows than head 0 ({mask.shape[1]})")
        if not isinstance(key, int) or isinstance(key, bool) or not 0 <= key < blocks:
            raise ConfigError(f"mask file {str(path)!r}, head {place[0]}, row {place[1]}: key block {key!r} is not in 0..{blocks - 1}")
        mask[(*place, key)] = True
    return mask


def _entries(heads: list[Any], path: Path) -> Iterator[tuple[tuple[int, int], Any]]:
    for head, rows in enumerate(heads):
        for row, keys in enumerate(rows):
            if not isinstance(keys, list):
                raise ConfigError(f"mask file {str(path)!r}, head {head}, row {row}: {keys!r} is not a list of key blocks")
            for key in keys:
                yield (head, row), key
