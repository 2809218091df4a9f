"""Block masks as lists of tiles: which key tiles a query tile visits, and the other way round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dilabench.patterns.hidden_rows import HiddenRows

SMALLEST_TILE = 16

BoolArray = npt.NDArray[np.bool_]
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TileLists:
    """For each (head, own tile): its partner tiles, those that are wholly visible first.

    ``spans`` int32 [heads, own tiles, 3]: first entry, wholly visible entries, partly visible entries.
    ``entries`` int32: partner tile indices. ``order`` int32 [heads, own tiles]: own tiles, the longest list first.
    """

    spans: Int32Array
    entries: Int32Array
    order: Int32Array


@dataclass(frozen=True, slots=True)
class Visibility:
    """What hides pairs inside the mask's blocks: the causal edge, a window in rows (-1: unbounded), the ragged end.

    ``key_rows``: how many keys there are where they are not the rows of the queries (None: they are). ``hidden``: the
    rows, as the queries count them, that single keys are hidden from.
    """

    rows: int
    causal: bool
    left: int = -1
    right: int = -1
    key_rows: int | None = None
    hidden: HiddenRows | None = None

    @property
    def keys(self) -> int:
        """Rows of keys."""
        return self.rows if self.key_rows is None else self.key_rows

    @property
    def ahead(self) -> int:
        """Rows a query sees ahead of it, none behind a causal edge; -1 for all."""
        return 0 if self.causal else self.right


@dataclass(frozen=True, slots=True)
class HiddenTiles:
    """Bounds over the keys of each tile, of each range of rows; int64 [ranges, key tiles].

    A range hides all keys of a tile from the rows ``all_from`` <= i < ``all_to``, and none from rows outside of
    ``some_from`` <= i < ``some_to``. Rows outside of ``first`` <= i < ``end``, int64 [key tiles], see none of its keys,
    whichever of a key's ranges it is that hides it: the one range of a first document's key is the second of another's.
    """

    all_from: npt.NDArray[np.int64]
    all_to: npt.NDArray[np.int64]
    some_from: npt.NDArray[np.int64]
    some_to: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]

    @classmethod
    def of(cls, hidden: HiddenRows, rows: int, block_n: int) -> HiddenTiles:
        """Over key tiles of ``block_n`` keys."""
        tiles = np.arange(0, hidden.keys, block_n)
        some = hidden.starts < hidden.stops
        first, end = np.zeros(hidden.keys, np.int64), np.full(hidden.keys, rows)
        for starts, stops in zip(hidden.starts, hidden.stops, strict=True):
            first = np.where(starts <= first, np.maximum(first, stops), first)
        for starts, stops in zip(hidden.starts[::-1], hidden.stops[::-1], strict=True):
            end = np.where(stops >= end, np.minimum(end, starts), end)
        return cls(
            np.maximum.reduceat(hidden.starts, tiles, axis=1),
            np.minimum.reduceat(hidden.stops, tiles, axis=1),
            np.minimum.reduceat(np.where(some, hidden.starts, rows), tiles, axis=1),
            np.maximum.reduceat(np.where(some, hidden.stops, 0), tiles, axis=1),
            np.minimum.reduceat(first, tiles),
            np.maximum.reduceat(end, tiles),
        )


def largest_tile(block_size: int) -> int:
    """The largest power of two, at most 128, that divides the block size; 0 when it is below 16."""
    tile = min(128, block_size & -block_size)
    return tile if tile >= SMALLEST_TILE else 0


def tile_lists(
    mask: BoolArray, block_size: int, visibility: Visibility, block_m: int, block_n: int, by_key: bool
) -> TileLists:
    """Lists over query tiles of ``block_m`` rows and key tiles of ``block_n`` rows; ``by_key`` lists for key tiles.

    ``mask`` [heads, blocks of queries, blocks of keys] over blocks of ``block_size`` rows, which both tile sizes must
    divide. Tiles in which no pair is visible are left out.
    """
    if block_size % block_m or block_size % block_n:
        raise ValueError(f"tiles {block_m}x{block_n} must divide the block size {block_size}")
    queries, keys = -(-visibility.rows // block_m), -(-visibility.keys // block_n)
    tiles = mask.repeat(block_size // block_m, axis=1).repeat(block_size // block_n, axis=2)[:, :queries, :keys]
    some, whole = visible_tiles(visibility, np.arange(queries), block_m, block_n)
    listed, full = tiles & some, tiles & whole
    if by_key:
        listed, full = listed.transpose(0, 2, 1), full.transpose(0, 2, 1)
    heads, own, _ = listed.shape
    n_listed, n_full = listed.sum(-1), full.sum(-1)
    first = np.concatenate(([0], np.cumsum(n_listed.ravel())[:-1])).reshape(heads, own)
    # Sorting by (head, own tile, partly visible) puts the wholly visible partners of a tile first, in order.
    head, tile, partner = np.nonzero(listed)
    entries = partner[np.lexsort((partner, ~full[head, tile, partner], tile, head))]
    return TileLists(
        spans=np.stack((first, n_full, n_listed - n_full), axis=-1).astype(np.int32),
        entries=entries.astype(np.int32) if len(entries) else np.zeros(1, np.int32),
        order=(-n_listed).argsort(axis=1, kind="stable").astype(np.int32),
    )


def visible_tiles(
    seen: Visibility, queries: npt.NDArray[np.int64], block_m: int, block_n: int, hidden: HiddenTiles | None = None
) -> tuple[BoolArray, BoolArray]:
    """[Q, key tiles], of some query tiles: whether some pair of the tile may be visible, and whether all are (but for
    rows past the end).

    ``hidden``: that of the visibility where it is known already. With ranges of rows, a tile of which each pair is
    hidden by another range counts as visible in part.
    """
    q_low = (queries * block_m)[:, None]
    q_high = np.minimum(q_low + block_m, seen.rows) - 1
    k_low = np.arange(0, seen.keys, block_n)[None, :]
    k_high = np.minimum(k_low + block_n, seen.keys) - 1
    some = np.ones((len(queries), k_low.shape[1]), bool)
    whole = np.broadcast_to(k_low + block_n <= seen.keys, some.shape).copy()
    if seen.ahead >= 0:
        some &= k_low <= q_high + seen.ahead
        whole &= k_high <= q_low + seen.ahead
    if seen.left >= 0:
        some &= k_high >= q_low - seen.left
        whole &= k_low >= q_high - seen.left
    if seen.hidden is not None:
        tiles = hidden or HiddenTiles.of(seen.hidden, seen.rows, block_n)
        some &= (q_high >= tiles.first) & (q_low < tiles.end)
        for all_from, all_to, some_from, some_to in zip(
            tiles.all_from, tiles.all_to, tiles.some_from, tiles.some_to, strict=True
        ):
            some &= (q_low < all_from) | (q_high >= all_to)
            whole &= (q_high < some_from) | (q_low >= some_to)
    return some, whole


@dataclass(frozen=True, slots=True)
class PaddedLists:
    """The same lists as rectangles, as FlexAttention and FlashAttention 4 take them.

    ``full_count``, ``partly_count`` int32 [1, heads, own tiles]; ``full``, ``partly`` int32 [1, heads, own tiles,
    longest], rising partner tiles, then zeros.
    """

    full_count: Int32Array
    full: Int32Array
    partly_count: Int32Array
    partly: Int32Array


def padded_lists(lists: TileLists, length: int | None = None) -> PaddedLists:
    """Lists of equal length (None: that of the longest), with a leading batch axis of one."""
    first, n_full, n_partly = (np.ascontiguousarray(column) for column in np.moveaxis(lists.spans, -1, 0))
    full = _rectangle(lists.entries, first, n_full, length)
    partly = _rectangle(lists.entries, first + n_full, n_partly, length)
    return PaddedLists(n_full[None], full[None], n_partly[None], partly[None])


def _rectangle(entries: Int32Array, first: Int32Array, count: Int32Array, length: int | None) -> Int32Array:
    place = np.arange(length or max(1, int(count.max(initial=0))))
    index = np.minimum(first[..., None] + place, len(entries) - 1)
    return np.where(place < count[..., None], entries[index], 0).astype(np.int32)
