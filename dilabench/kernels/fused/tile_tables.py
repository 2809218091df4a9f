"""Work lists of the fused kernels: which key tiles each query tile visits, and the reverse, with multiplicities."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dilabench.kernels.fused.branch_group import CLASS_BITS, TILE_BITS, BranchGroup

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TileTables:
    """Work lists for one group, direction and tile shape.

    ``items``   int32 [variants, kinds, n_items, 5]: class, tile, first entry, full entries, masked entries. A class
    of -1 pads. ``lookup``  int32 [variants, kinds, R, n_tiles, 3]: first entry, full entries, masked entries of any
    (class, tile).
    ``order``   int32 [variants, n, 2]: (class, tile) to visit by key, in the frame of kind 0, heaviest first; -1 pads.
    ``entries`` int32: packed (multiplicity, class, tile) of the partner tiles, full ones first.
    Variant 0 is a whole super-segment, variant 1 the shorter last one. Its last tile may reach beyond the sequence:
    among key tiles that is a masked entry.
    """

    items: Int32Array
    lookup: Int32Array
    order: Int32Array
    entries: Int32Array


@lru_cache(maxsize=256)
def tile_tables(group: BranchGroup, own: int, other: int, causal: bool, by_key: bool) -> TileTables:
    """Partner tiles of ``other`` rows for every tile of ``own`` rows; own rows are queries, or keys if ``by_key``.

    Raises ValueError when a tile does not divide the shortest segment.
    """
    for tile in (own, other):
        if group.largest_tile % tile:
            raise ValueError(
                f"tile of {tile} rows does not divide segments of {group.segment_rows[0]} rows"
                f"; use at most {group.largest_tile}"
            )
    chunks: list[Int32Array] = []
    filled = 0
    n_tiles = group.super_rows // own
    lookup = np.zeros((2, len(group.kinds), group.modulus, n_tiles, 3), dtype=np.int32)
    rows_of_variant = (group.super_rows if group.full_supers else 0, group.tail_rows)
    for kind in range(len(group.kinds)):
        for u in range(group.modulus):
            partners = _partners(group, kind, u)
            for variant, rows in enumerate(rows_of_variant):
                for tile in range(-(-rows // own)):
                    full, masked = _partner_tiles(partners, tile * own, own, other, rows, causal, by_key)
                    lookup[variant, kind, u, tile] = (filled, full.size, masked.size)
                    chunks += (full, masked)
                    filled += full.size + masked.size
    entries = np.concatenate(chunks) if filled else np.zeros(1, dtype=np.int32)
    items = _heaviest_first(lookup)
    if group.one_frame_per_kv_head:
        order = np.ascontiguousarray(items[:, 0, :, :2])
    else:
        order = _every_tile(lookup, [-(-rows // own) for rows in rows_of_variant])
    return TileTables(items, lookup, order, entries)


def _partners(group: BranchGroup, kind: int, u: int) -> list[tuple[int, list[int]]]:
    """(partner class, rising segment lengths of the shared branches) for every class that shares a branch with
    ``u``.
    """
    mine = set(group.active(kind, u))
    found = []
    for partner in range(group.modulus):
        shared = [group.segment_rows[i] for i in group.active(kind, partner) if i in mine]
        if shared:
            found.append((partner, shared))
    return found


def _partner_tiles(
    partners: list[tuple[int, list[int]]], start: int, own: int, other: int, limit: int, causal: bool, by_key: bool
) -> tuple[Int32Array, Int32Array]:
    """Packed partner tiles of the own rows [start, start + own), split into those that need no mask and those that the
    causal edge cuts, or for keys the end of the sequence (``limit``). Queries beyond the end have weight 0 anyway.
    """
    full: list[Int32Array] = []
    masked: list[Int32Array] = []
    for partner, lengths in partners:
        inner = (start, start)
        for i, length in enumerate(lengths):
            first = start - start % length
            outer = (first, min(first + length, limit))
            tag = ((len(lengths) - i) << (TILE_BITS + CLASS_BITS)) | (partner << TILE_BITS)
            for low, high in ((outer[0], inner[0]), (inner[1], outer[1])) if i else (outer,):
                tiles = np.arange(-(-low // other), -(-high // other), dtype=np.int32)
                if causal and by_key:
                    tiles = tiles[(tiles + 1) * other > start]
                    whole = tiles * other >= start + own
                elif by_key:
                    whole = np.ones(tiles.size, dtype=np.bool_)
                else:
                    tiles = tiles[tiles * other < start + own] if causal else tiles
                    whole = (tiles + 1) * other <= (start if causal else limit)
                full.append(tiles[whole] | tag)
                masked.append(tiles[~whole] | tag)
            inner = outer
    return np.concatenate(full or [np.zeros(0, np.int32)]), np.concatenate(masked or [np.zeros(0, np.int32)])


def _heaviest_first(lookup: Int32Array) -> Int32Array:
    """Items with work, per variant and kind, by falling length of their list; neighbours in time then share partner
    tiles.
    """
    work = lookup[..., 1] + lookup[..., 2]
    n_items = max(1, int((work > 0).sum(axis=(2, 3)).max()))
    items = np.zeros((*lookup.shape[:2], n_items, 5), dtype=np.int32)
    items[..., 0] = -1
    for variant, kind in np.ndindex(*lookup.shape[:2]):
        u, tile = np.nonzero(work[variant, kind])
        order = np.lexsort((u, tile, -work[variant, kind, u, tile]))
        u, tile = u[order], tile[order]
        items[variant, kind, : u.size, 0] = u
        items[variant, kind, : u.size, 1] = tile
        items[variant, kind, : u.size, 2:] = lookup[variant, kind, u, tile]
    return items


def _every_tile(lookup: Int32Array, tiles_of_variant: list[int]) -> Int32Array:
    """(class, tile) pairs with or without work: heads that share keys may be idle where the first of them works."""
    work = (lookup[..., 1] + lookup[..., 2])[:, 0]
    order = np.full((2, work.shape[1] * work.shape[2], 2), -1, dtype=np.int32)
    for variant, n_tiles in enumerate(tiles_of_variant):
        by_weight = np.argsort(-work[variant, :, :n_tiles].T, axis=None, kind="stable")
        tile, u = np.unravel_index(by_weight, (n_tiles, work.shape[1]))
        order[variant, : by_weight.size, 0] = u
        order[variant, : by_weight.size, 1] = tile
    return order


def computed_pairs(group: BranchGroup, tile: int, causal: bool) -> int:
    """Query-key pairs that square tiles of ``tile`` rows compute per batch element, over all heads."""
    tables = tile_tables(group, tile, tile, causal, by_key=False)
    per_variant = (tables.items[..., 3] + tables.items[..., 4]).sum(axis=2) * tile * tile
    total = 0
    for kind in group.head_kind:
        total += int(per_variant[0, kind]) * group.full_supers + int(per_variant[1, kind]) * (group.tail_rows > 0)
    return total
