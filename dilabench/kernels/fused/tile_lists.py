"""Work lists of the fused kernels in closed form: which key tiles each query tile visits, and the reverse, with
multiplicities. Numbers only; `tile_tables` puts them on a device.

Every sequence length has separate lists, so their starts come from arrays of a few thousand numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
import numpy.typing as npt

from dilabench.kernels.fused.branch_group import BranchGroup

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Partners:
    """The classes that share a branch with each class: ``classes`` [kinds, R, P], and ``shared`` [kinds, R, P, n], how
    many of the branches from i on are shared: the multiplicity of keys in segment i that lie outside of segment i - 1.
    """

    classes: Integers
    shared: Integers


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of consecutive partner tiles of every own tile: ``begin`` and ``count`` [variants, tiles, ranges, 3].

    Ranges are the innermost segment and then, outwards, what the next one adds before and behind; the last axis is the
    tiles without a mask, the masked ones before them, and those behind. ``level`` [ranges]: the segment's index. Ranges
    without any tile are omitted.
    """

    begin: Integers
    count: Integers
    level: Integers


def computed_pairs(group: BranchGroup, tile: int, causal: bool) -> int:
    """Query-key pairs that square tiles of ``tile`` rows compute per batch element, over all heads."""
    entries = _entries_in_squares(*group.in_tiles(tile), tile, causal)
    supers = np.array([group.full_supers, group.n_supers - group.full_supers])
    return int((entries[:, list(group.head_kind)] * supers[:, None]).sum()) * tile * tile


@lru_cache(maxsize=256)
def _entries_in_squares(group: BranchGroup, tail_tokens: int, tile: int, causal: bool) -> Integers:
    return entries_of(group, (tail_tokens,), tile, tile, causal, by_key=False)


def entries_of(
    group: BranchGroup, tails: tuple[int, ...], own: int, other: int, causal: bool, by_key: bool
) -> Integers:
    """Pairs of tiles in a whole super-segment and in tails of these numbers of tokens, [variants, kinds]."""
    partners = partners_of(group.rates, group.kinds, group.modulus)
    runs = runs_of(group, tails, own, other, causal, by_key)
    kept = (partners.shared[..., runs.level] > 0).sum((1, 2))
    found: Integers = np.einsum("vg,kg->vk", runs.count.sum((1, 3)), kept)
    return found


@lru_cache(maxsize=256)
def partners_of(rates: tuple[int, ...], kinds: tuple[tuple[int, ...], ...], modulus: int) -> Partners:
    classes = np.arange(modulus)
    # active [kinds, n, R]
    active = classes % np.array(rates)[:, None] == np.array(kinds)[..., None]
    both = (active[:, :, :, None] & active[:, :, None, :]).astype(np.int64)
    shared = np.moveaxis(np.flip(np.cumsum(np.flip(both, 1), 1), 1), 1, -1)
    most = max(1, int((shared[..., 0] > 0).sum(2).max()))
    # Classes with a shared branch first, in ascending order.
    order = np.argsort(shared[..., 0] == 0, axis=2, kind="stable")[..., :most]
    return Partners(order, np.take_along_axis(shared, order[..., None], 2))


def rows_of_variants(group: BranchGroup, tails: tuple[int, ...]) -> list[int]:
    """Rows of the longest classes of a whole super-segment, if there is one, and of tails of that many tokens."""
    return [group.super_rows if group.full_supers else 0, *(-(-tail // group.modulus) for tail in tails)]


def runs_of(group: BranchGroup, tails: tuple[int, ...], own: int, other: int, causal: bool, by_key: bool) -> Runs:
    rows_of_variant = rows_of_variants(group, tails)
    rows = np.array(rows_of_variant)[:, None]
    # Rows that all classes have: a tile that passes them is masked.
    sure = np.array([group.super_tokens, *tails])[:, None] // group.modulus
    start = np.arange(0, max(rows_of_variant), own)
    ranges: list[tuple[Integers, Integers]] = []
    inner = (start, start)
    for segment in group.segment_rows:
        first = start - start % segment
        outer = (first, np.minimum(first + segment, rows))
        ranges += [(outer[0], inner[0]), (inner[1], outer[1])] if ranges else [outer]
        inner = outer
    limits = np.empty((2, len(rows), start.size, len(ranges)), np.int64)
    for at, range_ in enumerate(ranges):
        limits[0, ..., at], limits[1, ..., at] = range_
    begin, end = -(-limits // other)
    # No tile begins behind the last row of the variant.
    end = np.where((start < rows)[..., None], np.maximum(begin, end), begin)
    start, sure = start[:, None], sure[..., None]
    if causal and by_key:
        begin = _within(start // other, begin, end)
        from_whole = _within(-(-(start + own) // other), begin, end)
    else:
        end = _within(-(-(start + own) // other), begin, end) if causal else end
        from_whole = begin
    # Causal queries before the end of the sequence never see beyond it.
    to_whole = _within((start if causal and not by_key else sure) // other, from_whole, end)
    if group.window is not None:
        # Seen from a key, the left side of the window is the right one.
        window_left, window_right = reversed(group.window) if by_key else group.window
        sure_left, most_left = group.sure_and_most(window_left)
        sure_right, most_right = group.sure_and_most(window_right)
        begin = _within((start - most_left) // other, begin, end)
        end = _within(-(-(start + own + most_right) // other), begin, end)
        from_whole = _within(-((sure_left - start - own + 1) // other), np.maximum(from_whole, begin), end)
        to_whole = np.maximum(np.minimum((start + sure_right + 1) // other, np.minimum(to_whole, end)), from_whole)
    begins, counts = np.empty((2, *begin.shape, 3), np.int64)
    begins[..., 0], begins[..., 1], begins[..., 2] = from_whole, begin, to_whole
    counts[..., 0], counts[..., 1], counts[..., 2] = to_whole - from_whole, from_whole - begin, end - to_whole
    level = (np.arange(len(ranges)) + 1) // 2
    # Equal segments add no ranges.
    some = counts.any((0, 1, 3))
    return Runs(begins, counts, level) if some.all() else Runs(begins[:, :, some], counts[:, :, some], level[some])


def _within(x: Integers, low: Integers, high: Integers) -> Integers:
    """`np.clip`, which takes several times as long for a few numbers."""
    found: Integers = np.minimum(np.maximum(x, low), high)
    return found


def lookup_of(runs: Runs, kept: npt.NDArray[np.bool_]) -> Integers:
    """[variants, kinds, R, tiles, 3]: first entry, full and masked entries; lists lie tile by tile.

    kept: [kinds, R, P, ranges], which runs a pair of classes has.
    """
    variants, tiles, ranges, _ = runs.count.shape
    kinds, classes = kept.shape[:2]
    partners = kept.sum(2).reshape(-1, ranges)
    masked = runs.count[..., 1] + runs.count[..., 2]
    found = np.zeros((variants, tiles, kinds * classes, 3), np.int64)
    # Products of integer matrices have no fast path, and float products start threads for a few numbers.
    for at in range(ranges):
        found[..., 1] += runs.count[..., at, :1] * partners[:, at]
        found[..., 2] += masked[..., at, None] * partners[:, at]
    lengths = found[..., 1] + found[..., 2]
    found[..., 0] = lengths.cumsum().reshape(lengths.shape) - lengths
    # [variants, tiles, kinds, R, ...] as stored, [variants, kinds, R, tiles, ...] as looked up.
    return found.reshape(variants, tiles, kinds, classes, 3).transpose(0, 2, 3, 1, 4)


def heaviest_first(lookup: Integers) -> Integers:
    """Items with work, per variant and kind, by falling length of their list; neighbours in time then share partner
    tiles.
    """
    work = lookup[..., 1] + lookup[..., 2]
    n_items = max(1, int((work > 0).sum(axis=(2, 3)).max()))
    items = np.zeros((*lookup.shape[:2], n_items, 5), dtype=np.int64)
    items[..., 0] = -1
    variants, kinds = lookup.shape[:2]
    for variant, kind in product(range(variants), range(kinds)):
        lists, lengths = lookup[variant, kind], work[variant, kind].T.ravel()
        (some,) = lengths.nonzero()
        order = some[np.argsort(-lengths[some], kind="stable")]
        tile, u = np.divmod(order, lists.shape[0])
        of_kind = items[variant, kind, : order.size]
        of_kind[:, 0], of_kind[:, 1], of_kind[:, 2:] = u, tile, lists[u, tile]
    return items


def every_tile(lookup: Integers, tiles_of_variant: list[int]) -> Integers:
    """(class, tile) pairs with or without work: heads that share keys may be idle where the first of them works. The
    heaviest first by all kinds together, as if these were in one frame.
    """
    work = (lookup[..., 1] + lookup[..., 2]).sum(1)
    order = np.full((len(work), work.shape[1] * work.shape[2], 2), -1, dtype=np.int64)
    for variant, n_tiles in enumerate(tiles_of_variant):
        by_weight = np.argsort(-work[variant, :, :n_tiles].T, axis=None, kind="stable")
        tile, u = np.unravel_index(by_weight, (n_tiles, work.shape[1]))
        order[variant, : by_weight.size, 0] = u
        order[variant, : by_weight.size, 1] = tile
    return order
