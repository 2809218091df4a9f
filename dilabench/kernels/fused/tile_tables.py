"""Work lists of the fused kernels: which key tiles each query tile visits, and the reverse, with multiplicities.

Every sequence length has lists of its own, so they are made in closed form: where the lists begin on the host, from
arrays of a few thousand numbers; their entries, which can be millions, where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilabench.kernels.fused.branch_group import CLASS_BITS, TILE_BITS, BranchGroup

Integers = npt.NDArray[np.int64]
# Entries are made for as many tiles at a time as need this many of the numbers that lead to them.
_AT_ONCE = 1 << 23


@dataclass(frozen=True, slots=True)
class TileTables:
    """Work lists for one group, direction and tile shape, on a device.

    ``items``   int32 [variants, kinds, n_items, 5]: class, tile, first entry, full entries, masked entries. A class
    of -1 pads. ``lookup``  int32 [variants, kinds, R, n_tiles, 3]: first entry, full entries, masked entries of any
    (class, tile).
    ``order``   int32 [variants, n, 2]: (class, tile) to visit by key, in the frame of kind 0, heaviest first; -1 pads.
    ``entries`` int32: packed (multiplicity, class, tile) of the partner tiles, full ones first.
    ``heads``   int32 [H, 2]: kind and class shift of each head.
    Variant 0 is a whole super-segment, variant 1 the shorter last one. The last tile of either may reach beyond it:
    such a partner tile is a masked entry.
    """

    items: Tensor
    lookup: Tensor
    order: Tensor
    entries: Tensor
    heads: Tensor


@dataclass(frozen=True, slots=True)
class _Partners:
    """The classes that share a branch with each class: ``classes`` [kinds, R, P], and ``shared`` [kinds, R, P, n], how
    many of the branches from i on are shared: the multiplicity of keys in segment i that lie outside of segment i - 1.
    """

    classes: Integers
    shared: Integers


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of consecutive partner tiles of every own tile: ``begin`` and ``count`` [variants, tiles, ranges, 3].

    Ranges are the innermost segment and then, outwards, what the next one adds before and behind; the last axis is the
    tiles without a mask, the masked ones before them, and those behind. ``level`` [ranges]: the segment's index.
    """

    begin: Integers
    count: Integers
    level: Integers


# A table of one length stays on the device for as long as it is here: few, for lengths change from call to call.
@lru_cache(maxsize=32)
def tile_tables(
    group: BranchGroup, own: int, other: int, causal: bool, by_key: bool, device: torch.device
) -> TileTables:
    """Partner tiles of ``other`` rows for every tile of ``own`` rows; own rows are queries, or keys if ``by_key``.

    Raises ValueError when a tile is larger than the segments allow.
    """
    for tile in (own, other):
        if tile > group.largest_tile:
            raise ValueError(
                f"tile of {tile} rows does not divide segments of {group.segment_rows[0]} rows"
                f"; use at most {group.largest_tile}"
            )
    partners = _partners(group.rates, group.kinds, group.modulus)
    runs = _runs(group, own, other, causal, by_key)
    lookup = _lookup(runs, partners)
    items = _heaviest_first(lookup)
    if group.one_frame_per_kv_head:
        order = np.ascontiguousarray(items[:, 0, :, :2])
    else:
        rows_of_variant = (group.super_rows if group.full_supers else 0, group.tail_rows)
        order = _every_tile(lookup, [-(-rows // own) for rows in rows_of_variant])
    heads = np.stack([group.head_kind, group.head_shift], 1)
    on_device = (_to(x.astype(np.int32), device) for x in (items, lookup, order, heads))
    items_there, lookup_there, order_there, heads_there = on_device
    entries = _entries(runs, partners, int(lookup[..., 1:].sum()), device)
    return TileTables(items_there, lookup_there, order_there, entries, heads_there)


def computed_pairs(group: BranchGroup, tile: int, causal: bool) -> int:
    """Query-key pairs that square tiles of ``tile`` rows compute per batch element, over all heads."""
    per_variant = table_entries(group, tile, causal) * tile * tile
    supers = np.array([group.full_supers, group.n_supers - group.full_supers])
    return int((per_variant[:, list(group.head_kind)] * supers[:, None]).sum())


def table_entries(group: BranchGroup, tile: int, causal: bool) -> Integers:
    """Entries of the query tables of square tiles: [variants, kinds]."""
    partners = _partners(group.rates, group.kinds, group.modulus)
    runs = _runs(group, tile, tile, causal, by_key=False)
    kept = (partners.shared[..., runs.level] > 0).sum((1, 2))
    return np.einsum("vg,kg->vk", runs.count.sum((1, 3)), kept)


@lru_cache(maxsize=256)
def _partners(rates: tuple[int, ...], kinds: tuple[tuple[int, ...], ...], modulus: int) -> _Partners:
    classes = np.arange(modulus)
    # active [kinds, n, R]
    active = classes % np.array(rates)[:, None] == np.array(kinds)[..., None]
    both = (active[:, :, :, None] & active[:, :, None, :]).astype(np.int64)
    shared = np.moveaxis(np.flip(np.cumsum(np.flip(both, 1), 1), 1), 1, -1)
    most = max(1, int((shared[..., 0] > 0).sum(2).max()))
    # Classes with a shared branch first, in rising order.
    order = np.argsort(shared[..., 0] == 0, axis=2, kind="stable")[..., :most]
    return _Partners(order, np.take_along_axis(shared, order[..., None], 2))


def _runs(group: BranchGroup, own: int, other: int, causal: bool, by_key: bool) -> _Runs:
    rows = np.array([group.super_rows if group.full_supers else 0, group.tail_rows])[:, None]
    # Rows that all classes have: a tile that passes them is masked.
    sure = np.array([group.super_rows, group.whole_rows - group.full_supers * group.super_rows])[:, None]
    start = np.arange(-(-int(rows.max()) // own)) * own
    ranges: list[tuple[Integers, Integers]] = []
    inner = (start, start)
    for segment in group.segment_rows:
        first = start - start % segment
        outer = (first, np.minimum(first + segment, rows))
        ranges += [(outer[0], inner[0]), (inner[1], outer[1])] if ranges else [outer]
        inner = outer
    limits = np.stack([np.stack(np.broadcast_arrays(low, high, rows), -1) for low, high in ranges], -2)
    begin, end = (-(-limits[..., side] // other) for side in (0, 1))
    # No tile of its own begins behind the last row of the variant.
    end = np.where((start < rows)[..., None], np.maximum(begin, end), begin)
    start, sure = start[:, None], sure[..., None]
    if causal and by_key:
        begin = np.clip(start // other, begin, end)
        from_whole = np.clip(-(-(start + own) // other), begin, end)
    else:
        end = np.clip(-(-(start + own) // other), begin, end) if causal else end
        from_whole = begin
    # Causal queries before the end of the sequence see nothing beyond it anyway.
    to_whole = np.clip((start if causal and not by_key else sure) // other, from_whole, end)
    begins = np.stack([from_whole, begin, to_whole], -1)
    counts = np.stack([to_whole - from_whole, from_whole - begin, end - to_whole], -1)
    return _Runs(begins, counts, (np.arange(len(ranges)) + 1) // 2)


def _lookup(runs: _Runs, partners: _Partners) -> Integers:
    """[variants, kinds, R, tiles, 3]: first entry, full and masked entries; lists lie tile by tile."""
    kept = (partners.shared[..., runs.level] > 0).sum(2)
    full_and_masked = np.stack([runs.count[..., 0], runs.count[..., 1:].sum(-1)], -1)
    # einsum has no fast path for integers of this shape; products of small floats are exact.
    lengths = np.tensordot(full_and_masked.astype(np.float64), kept.astype(np.float64), ([2], [2]))
    lengths = np.ascontiguousarray(np.moveaxis(lengths, 2, -1)).astype(np.int64)
    flat = lengths.sum(-1).ravel()
    first = (np.cumsum(flat) - flat).reshape(lengths.shape[:-1])
    # [variants, tiles, kinds, R, ...] as stored, [variants, kinds, R, tiles, ...] as looked up.
    return np.moveaxis(np.concatenate([first[..., None], lengths], -1), 1, 3)


def _entries(runs: _Runs, partners: _Partners, total: int, device: torch.device) -> Tensor:
    """Every list, variant by variant, tile by tile: its runs written out."""
    if not total:
        return torch.zeros(1, dtype=torch.int32, device=device)
    shared = partners.shared[..., runs.level]
    tags = (shared << (TILE_BITS + CLASS_BITS)) | (partners.classes[..., None] << TILE_BITS)
    kinds, classes, width, ranges = shared.shape
    # A list: [3 sorts of tiles, partners, ranges]; lists: [tiles of both variants, kinds, R].
    kept = _to((shared > 0).astype(np.int32), device).view(1, kinds, classes, 1, width, ranges)
    tag = _to(tags.astype(np.int32), device).view(1, kinds, classes, 1, width, ranges)
    as_lists = (-1, 1, 1, 3, 1, ranges)
    count = _to(np.moveaxis(runs.count, -1, -2).astype(np.int32), device).reshape(as_lists)
    begin = _to(np.moveaxis(runs.begin, -1, -2).astype(np.int32), device).reshape(as_lists)
    per_tile = runs.count.reshape(-1, ranges, 3).sum(2) @ (shared > 0).sum((0, 1, 2))
    step = max(1, _AT_ONCE // (kinds * classes * 3 * width * ranges))
    parts = [
        _written_out(count[at : at + step] * kept, begin[at : at + step] + tag, int(per_tile[at : at + step].sum()))
        for at in range(0, count.shape[0], step)
    ]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _written_out(counts: Tensor, begins: Tensor, total: int) -> Tensor:
    """begin, begin + 1, ... of each run, one run after another; the total is given, so that no device is waited for."""
    counts = counts.flatten()
    ends = counts.cumsum(0)
    runs = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts.long(), output_size=total)
    skipped = (begins.flatten() - (ends - counts)).to(torch.int32)
    return torch.arange(total, dtype=torch.int32, device=counts.device) + skipped[runs]


def _heaviest_first(lookup: Integers) -> Integers:
    """Items with work, per variant and kind, by falling length of their list; neighbours in time then share partner
    tiles.
    """
    work = lookup[..., 1] + lookup[..., 2]
    n_items = max(1, int((work > 0).sum(axis=(2, 3)).max()))
    items = np.zeros((*lookup.shape[:2], n_items, 5), dtype=np.int64)
    items[..., 0] = -1
    for variant, kind in np.ndindex(*lookup.shape[:2]):
        u, tile = np.nonzero(work[variant, kind])
        order = np.lexsort((u, tile, -work[variant, kind, u, tile]))
        u, tile = u[order], tile[order]
        items[variant, kind, : u.size, 0] = u
        items[variant, kind, : u.size, 1] = tile
        items[variant, kind, : u.size, 2:] = lookup[variant, kind, u, tile]
    return items


def _every_tile(lookup: Integers, tiles_of_variant: list[int]) -> Integers:
    """(class, tile) pairs with or without work: heads that share keys may be idle where the first of them works."""
    work = (lookup[..., 1] + lookup[..., 2])[:, 0]
    order = np.full((2, work.shape[1] * work.shape[2], 2), -1, dtype=np.int64)
    for variant, n_tiles in enumerate(tiles_of_variant):
        by_weight = np.argsort(-work[variant, :, :n_tiles].T, axis=None, kind="stable")
        tile, u = np.unravel_index(by_weight, (n_tiles, work.shape[1]))
        order[variant, : by_weight.size, 0] = u
        order[variant, : by_weight.size, 1] = tile
    return order


def _to(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)
