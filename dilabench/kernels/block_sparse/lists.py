"""Lists of tiles as the fused kernels read them: which key tiles a query tile visits, and the other way round.

Blocks, windows, documents and selections are one class of rows (rate 1) to those kernels, in which every tile counts
once. Each kind of plan makes its lists here, or on the device of its inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilabench.kernels.fused.branch_group import CLASS_BITS, TILE_BITS
from dilabench.patterns.answers import HiddenRows

SMALLEST_TILE = 16
# A list entry whose tile counts once; of one class, so that tiles may use the bits of classes, too.
COUNTED_ONCE = 1 << (TILE_BITS + CLASS_BITS)

BoolArray = npt.NDArray[np.bool_]


class TileLists(NamedTuple):
    """For each (mask head, own tile) its partner tiles, those that are wholly visible first; int32 on one device.

    ``spans`` [mask heads, own tiles, 3]: first entry, full entries, masked entries. ``entries``: partner tiles, packed
    as in `fused.tile_tables.TileTables`. ``order`` [mask heads, own tiles]: own tiles, the longest list first.
    """

    spans: Tensor
    entries: Tensor
    order: Tensor

    @classmethod
    def of(cls, partners: Tensor, first: Tensor, n_full: Tensor, n_masked: Tensor) -> TileLists:
        """Make lists of partner tiles, from the first entry and the counts of each (mask head, own tile)."""
        order = (n_full + n_masked).argsort(dim=1, descending=True, stable=True)
        entries = partners | COUNTED_ONCE if len(partners) else partners.new_zeros(1)
        return cls(torch.stack((first, n_full, n_masked), -1).int(), entries.int(), order.int())

    @property
    def lengths(self) -> Tensor:
        """[mask heads, own tiles]."""
        return self.spans[..., 1:].sum(-1)

    def partners(self, mask_head: int, own: int) -> tuple[Tensor, Tensor]:
        """The full and the masked partner tiles of one tile."""
        first, n_full, n_masked = self.spans[mask_head, own].tolist()
        full, masked = (self.entries[first : first + n_full + n_masked] & (COUNTED_ONCE - 1)).split([n_full, n_masked])
        return full, masked


class QueryLists(NamedTuple):
    """The lists for programs by query: ``items`` int32 [mask heads, tiles, 5], ``entries``, as in `TileTables`."""

    items: Tensor
    entries: Tensor

    @classmethod
    def of(cls, lists: TileLists) -> QueryLists:
        """Items in the order of the lists."""
        order = lists.order.long()[..., None]
        spans = lists.spans.gather(1, order.expand_as(lists.spans))
        return cls(torch.cat((torch.zeros_like(order), order, spans), -1).int(), lists.entries)


@dataclass(frozen=True, slots=True)
class Visibility:
    """Rules that hide pairs inside the mask's blocks: the causal edge, a window in rows (-1: unbounded), the ragged
    end.

    ``key_rows``: number of keys if they are not the rows of the queries (None: they are). ``hidden``: the query rows
    that single keys are hidden from.
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
        """The number of rows that a query sees ahead of it: 0 if causal, -1 for all."""
        return 0 if self.causal else self.right


class Selection(NamedTuple):
    """``indices`` int [heads, n, k] of key blocks for each of n blocks of ``block_size`` queries, and what is visible.

    Indices may have any order; a repeated index counts once, and one outside of 0..n-1 means no block.
    """

    indices: Tensor
    block_size: int
    visibility: Visibility


class HiddenTiles(NamedTuple):
    """Bounds of each range of rows over the keys of each tile; [ranges, key tiles].

    A range hides all keys of a tile from the rows ``all_from`` <= i < ``all_to``, and none from rows outside of
    ``some_from`` <= i < ``some_to``. Rows outside of ``first`` <= i < ``end``, [key tiles], see none of its keys, by
    any of a key's ranges: the only range of a key in a first document is the second range in another.
    """

    all_from: Tensor
    all_to: Tensor
    some_from: Tensor
    some_to: Tensor
    first: Tensor
    end: Tensor

    @classmethod
    def of(cls, limits: Tensor, rows: int, block_n: int) -> HiddenTiles:
        """The bounds of tiles of ``block_n`` keys, from limits [ranges, 2, keys] (`limits_of`)."""
        starts, stops = limits.unbind(1)
        first, end = torch.zeros_like(starts[0]), torch.full_like(starts[0], rows)
        for start, stop in limits:
            first = torch.where(start <= first, torch.maximum(first, stop), first)
        for start, stop in limits.flip(0):
            end = torch.where(stop >= end, torch.minimum(end, start), end)
        some = starts < stops
        return cls(
            _most(starts, block_n),
            _least(stops, block_n, rows),
            _least(torch.where(some, starts, rows), block_n, rows),
            _most(torch.where(some, stops, 0), block_n),
            _least(first, block_n, rows),
            _most(end, block_n),
        )


def limits_of(hidden: HiddenRows) -> Tensor:
    """int32 [ranges, 2, keys]: key j is hidden from the rows limits[r, 0, j] <= i < limits[r, 1, j]."""
    return torch.from_numpy(np.stack((hidden.starts, hidden.stops), axis=1).astype(np.int32))


def _least(x: Tensor, tile: int, largest: int) -> Tensor:
    """[..., tiles]: the least of each tile of x [..., keys], whose numbers are at most ``largest``."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % tile), value=largest)
    return padded.unflatten(-1, (-1, tile)).amin(-1)


def _most(x: Tensor, tile: int) -> Tensor:
    """[..., tiles]: the greatest of each tile of x [..., keys], whose numbers are at least 0."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % tile)).unflatten(-1, (-1, tile)).amax(-1)


def largest_tile(block_size: int) -> int:
    """The largest power of two, at most 128, that divides the block size; 0 when it is below 16."""
    tile = min(128, block_size & -block_size)
    return tile if tile >= SMALLEST_TILE else 0


def visible_tiles(
    seen: Visibility, queries: Tensor, block_m: int, block_n: int, hidden: HiddenTiles | None = None
) -> tuple[Tensor, Tensor]:
    """bool [Q, key tiles], of some query tiles, on their device: whether some pair of the tile may be visible, and
    whether all are (but for rows past the end).

    ``hidden``: what `Visibility.hidden` hides of whole tiles. With ranges of rows, a tile of which each pair is hidden
    by another range counts as visible in part.
    """
    # One dtype with `limits_of`: torch compares others many times as long.
    keys = torch.arange(-(-seen.keys // block_n), dtype=torch.int32, device=queries.device)
    return _visible(seen, queries.int()[:, None], keys[None], block_m, block_n, hidden)


def _visible(
    seen: Visibility, query: Tensor, key: Tensor, block_m: int, block_n: int, hidden: HiddenTiles | None
) -> tuple[Tensor, Tensor]:
    """`visible_tiles` of query tiles and key tiles of one shape, or of shapes that fit each other; ``hidden``: of these
    key tiles.
    """
    q_low, k_low = query * block_m, key * block_n
    q_high, k_high = ((q_low + block_m).clamp_max(seen.rows) - 1, (k_low + block_n).clamp_max(seen.keys) - 1)
    some = (q_low >= 0) & (k_low >= 0)
    whole = (k_low + block_n <= seen.keys).expand_as(some)
    if seen.ahead >= 0:
        some = some & (k_low <= q_high + seen.ahead)
        whole = whole & (k_high <= q_low + seen.ahead)
    if seen.left >= 0:
        some = some & (k_high >= q_low - seen.left)
        whole = whole & (k_low >= q_high - seen.left)
    if hidden is not None:
        some = some & (q_high >= hidden.first) & (q_low < hidden.end)
        for all_from, all_to, some_from, some_to in zip(*hidden[:4], strict=True):
            some = some & ((q_low < all_from) | (q_high >= all_to))
            whole = whole & ((q_high < some_from) | (q_low >= some_to))
    return some, some & whole


def block_lists(
    mask: BoolArray,
    block_size: int,
    seen: Visibility,
    block_m: int,
    block_n: int,
    by_key: bool,
    hidden: HiddenTiles | None,
) -> TileLists:
    """Lists over query tiles of ``block_m`` rows and key tiles of ``block_n`` rows; ``by_key`` lists for key tiles.

    ``mask`` [heads, blocks of queries, blocks of keys] over blocks of ``block_size`` rows, which both tile sizes must
    divide. ``hidden``: as for `visible_tiles`. Tiles without a visible pair are omitted.
    """
    if block_size % block_m or block_size % block_n:
        raise ValueError(f"tiles {block_m}x{block_n} must divide the block size {block_size}")
    head, key, query = _tiles_in_reach(mask, block_size, seen, block_m, block_n, hidden)
    there = None if hidden is None else HiddenTiles(*(x[..., key.long()] for x in hidden))
    some, whole = _visible(seen, query, key, block_m, block_n, there)
    own, partner, n_own = (key, query, -(-seen.keys // block_n)) if by_key else (query, key, -(-seen.rows // block_m))
    return _sorted(len(mask), n_own, (head * n_own + own)[some], partner[some], whole[some])


def _sorted(heads: int, n_own: int, own: Tensor, partner: Tensor, whole: Tensor) -> TileLists:
    """Lists of pairs of tiles whose partners ascend; ``own``: (mask head, tile) in one number."""
    # Full partners first; the partners in a list ascend already. numpy sorts numbers of 16 bits in a pass.
    kind = (own * 2 + ~whole).numpy()
    n_kinds = heads * n_own * 2
    order = np.argsort(kind.astype(np.uint16) if n_kinds <= 1 << 16 else kind, kind="stable")
    counts = torch.from_numpy(np.bincount(kind, minlength=n_kinds)).view(heads, n_own, 2)
    lengths = counts.sum(-1)
    first = lengths.flatten().cumsum(0).view_as(lengths) - lengths
    return TileLists.of(partner[torch.from_numpy(order)], first, *counts.unbind(-1))


def transposed(lists: TileLists, n_partners: int) -> TileLists:
    """The lists of ``n_partners`` partner tiles that lists of `block_lists` have, as it makes them."""
    heads, n_own, _ = lists.spans.shape
    per_kind = lists.spans[..., 1:].flatten()
    numbers = torch.arange(heads * n_own * 2, dtype=torch.int32, device="cpu").repeat_interleave(per_kind)
    own, whole = numbers // 2, numbers % 2 == 0
    partner = lists.entries[: len(own)] & (COUNTED_ONCE - 1)
    return _sorted(heads, n_partners, own // n_own * n_partners + partner, own % n_own, whole)


def _tiles_in_reach(
    mask: BoolArray, block_size: int, seen: Visibility, block_m: int, block_n: int, hidden: HiddenTiles | None
) -> tuple[Tensor, Tensor, Tensor]:
    """int32 (mask head, key tile, query tile), ascending, of the tiles in the mask's blocks; with each key tile only
    query tiles from the first to the last that may see it.
    """
    query_tiles, key_tiles = -(-seen.rows // block_m), -(-seen.keys // block_n)
    low = np.arange(key_tiles) * block_n
    first, end = np.zeros(key_tiles, np.int64), np.full(key_tiles, seen.rows)
    if seen.ahead >= 0:
        first = np.maximum(first, low - seen.ahead)
    if seen.left >= 0:
        end = np.minimum(end, np.minimum(low + block_n, seen.keys) + seen.left)
    if hidden is not None:
        first, end = np.maximum(first, hidden.first.numpy()), np.minimum(end, hidden.end.numpy())
    first, end = first // block_m, np.minimum(-(-end // block_m), query_tiles)
    if not any(mask.strides[1:]) and mask.all():
        # All blocks, as bounds of columns have them.
        counts = np.tile(np.maximum(end - first, 0), len(mask))
        at = np.arange(len(counts)).repeat(counts)
        head, key = np.divmod(at, key_tiles)
        query = np.arange(len(at)) + (np.tile(first, len(mask)) - counts.cumsum() + counts)[at]
    else:
        of_keys = mask.transpose(0, 2, 1).repeat(block_size // block_n, axis=1)[:, :key_tiles]
        per_block, blocks = block_size // block_m, of_keys.shape[2]
        at, block = np.divmod(np.flatnonzero(of_keys), blocks)
        query = (block[:, None] * per_block + np.arange(per_block)).ravel()
        head, key = np.divmod(at.repeat(per_block), key_tiles)
        there = (query >= first[key]) & (query < end[key])
        head, key, query = head[there], key[there], query[there]
    heads_there, keys_there, queries_there = (torch.from_numpy(x.astype(np.int32)) for x in (head, key, query))
    return heads_there, keys_there, queries_there


def lists_with_room(listed: Tensor, full: Tensor) -> TileLists:
    """The same of bool [own tiles, partner tiles], which may be on any device: the host does not wait.

    Each list has space for all partners and one more.
    """
    own, partners = listed.shape
    n_full, n_listed = full.sum(1, dtype=torch.int32), listed.sum(1, dtype=torch.int32)
    masked = listed & ~full
    place = torch.where(full, full.cumsum(1, dtype=torch.int32), masked.cumsum(1, dtype=torch.int32) + n_full[:, None])
    # Unlisted partners are written to the space behind all lists.
    place = torch.where(listed, place - 1, partners)
    numbers = torch.arange(partners, dtype=torch.int32, device=listed.device).expand(own, partners)
    entries = numbers.new_empty(own, partners + 1).scatter_(1, place.long(), numbers)
    first = torch.arange(own, dtype=torch.int32, device=listed.device) * (partners + 1)
    return TileLists.of(entries.flatten(), *(x[None] for x in (first, n_full, n_listed - n_full)))
