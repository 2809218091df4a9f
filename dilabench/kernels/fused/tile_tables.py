"""Work lists of the fused kernels on a device: their entries, which can be millions, are written out there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilabench.kernels import tuning
from dilabench.kernels.fused.branch_group import CLASS_BITS, TILE_BITS, BranchGroup
from dilabench.kernels.fused.tile_lists import (
    Integers,
    Runs,
    entries_of,
    every_tile,
    heaviest_first,
    lookup_of,
    partners_of,
    rows_of_variants,
    runs_of,
)
from dilabench.kernels.streams import on_a_stream_of_its_own

# Elements of int32 in 16 bytes.
_ALIGNED = 4


@dataclass(frozen=True, slots=True)
class TileTables:
    """Work lists for one group, direction and tile shape, on a device.

    ``items``   int32 [variants, kinds, n_items, 5]: class, tile, first entry, full entries, masked entries. A class
    of -1 pads. ``lookup``  int32 [variants, kinds, R, n_tiles, 3]: first entry, full entries, masked entries of any
    (class, tile).
    ``order``   int32 [variants, n, 2]: (class, tile) to visit by key, in the frame of the first head that reads the
    keys, heaviest first; -1 pads.
    ``entries`` int32: packed (multiplicity, class, tile) of the partner tiles, full ones first.
    ``heads``   int32 [H, 2]: kind and class shift of each head.
    Variant 0 is a whole super-segment, variant 1 the shorter last one. The last tile of either may reach beyond it:
    such a partner tile is a masked entry. Tables that differ in the last one alone may lie in the same memory.
    """

    items: Tensor
    lookup: Tensor
    order: Tensor
    entries: Tensor
    heads: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        return self.items, self.lookup, self.order, self.entries, self.heads

    @property
    def nbytes(self) -> int:
        """Bytes of the device's memory that it holds, with others perhaps; entries may count twice."""
        return self.items.untyped_storage().nbytes() + self.entries.nbytes


def tile_tables(
    group: BranchGroup, own: int, other: int, causal: bool, by_key: bool, device: torch.device
) -> TileTables:
    """Partner tiles of ``other`` rows for every tile of ``own`` rows; own rows are queries, or keys if ``by_key``.

    They are complete for all streams; a reader records its stream (`LaunchCache`). Raises ValueError when a tile is
    larger than the segments allow.
    """
    by_key = _checked(group, own, other, causal, by_key)
    shared, tail = group.in_tiles(min(own, other))
    many = _made_together(shared, own, other, causal, by_key) if group.n_supers > 1 else ()
    tails = many or (tail,)
    key = (shared, tails, own, other, causal, by_key, device)
    tables = _kept.get(key)
    if tables is None:
        with on_a_stream_of_its_own(device):
            tables = _kept.put(key, _tables(*key))
    return tables[tail]


def _checked(group: BranchGroup, own: int, other: int, causal: bool, by_key: bool) -> bool:
    """Whether lists by key differ from those by query. Raises ValueError as `tile_tables`."""
    for tile in (own, other):
        if tile > group.largest_tile:
            raise ValueError(
                f"tile of {tile} rows does not divide segments of {group.segment_rows[0]} rows"
                f"; use at most {group.largest_tile}"
            )
    # Without an order among positions or a window, a query sees the keys that see it.
    return by_key and (causal or group.is_windowed)


@lru_cache(maxsize=256)
def _made_together(
    group: BranchGroup,
    own: int,
    other: int,
    causal: bool,
    by_key: bool,
    most_entries: int = tuning.TOGETHER_ENTRIES,
    most_tiles: int = tuning.TOGETHER_TILES,
) -> tuple[int, ...]:
    """All tails that sequences may end with, where lists for all of them are so short that the first length that has
    one makes them for every other; else none.
    """
    ends = 2 * -(-group.super_rows // min(own, other))
    if ends * -(-group.super_rows // own) * group.modulus * len(group.kinds) > most_tiles:
        return ()
    tails = group.tails_in_tiles(min(own, other))
    return tails if entries_of(group, tails, own, other, causal, by_key).sum() <= most_entries else ()


class DocumentTables(NamedTuple):
    """Lists for super-segments of documents: variant 0 of a whole one, variant 1 + i of one of ``tails[i]`` tokens.

    by_query, by_key: per variant, how many of `TileTables.items` of any kind, or of its order, there are; one that pads
    stands last. serve_all: these are the tails that there can be.
    """

    tables: TileTables
    tails: Integers
    by_query: Integers
    by_key: Integers
    serve_all: bool

    def of(self, by_key: bool) -> tuple[Integers, Integers]:
        """The tails, and how many items each variant has."""
        return self.tails, self.by_key if by_key else self.by_query

    @property
    def nbytes(self) -> int:
        """As of `TileTables`."""
        return self.tables.nbytes


def document_tables(
    group: BranchGroup, own: int, other: int, causal: bool, by_key: bool, x: Tensor, needed: Callable[[], Integers]
) -> DocumentTables:
    """As `tile_tables` for super-segments of documents, on the device of x. If lists are short, they are made for all
    tails that documents may have (`BranchGroup.tails_in_tiles`), else for the `needed` ones.
    """
    by_key = _checked(group, own, other, causal, by_key)
    whole = replace(group, length=group.super_tokens, documents=0)
    most = tuning.DOCUMENT_ENTRIES, tuning.DOCUMENT_TILES
    together = _made_together(whole, own, other, causal, by_key, *most)
    tails = together or tuple(needed().tolist())
    # Tables of tensors with data, or only traced.
    device, kind = x.device, type(x)
    key = ("documents", whole, tails, own, other, causal, by_key, device, kind)
    found = _kept.get(key)
    if found is None:
        with on_a_stream_of_its_own(device):
            items, lookup, order, entries = _lists(whole, tails, own, other, causal, by_key)
            items, order = _with_one_that_pads(items), _with_one_that_pads(order)
            (tables,) = _there(whole, [x[None] for x in (items, lookup, order)], entries, device)
        by_query, of_keys = (items[..., 0] >= 0).sum(2).max(1), (order[..., 0] >= 0).sum(1)
        found = _kept.put(key, DocumentTables(tables, np.array(tails), by_query, of_keys, bool(together)))
    return found


class _ByTail(dict[int, TileTables]):
    """Tables that differ in the last super-segment."""

    @property
    def nbytes(self) -> int:
        """Tables that are made together share memory."""
        return next(iter(self.values())).nbytes


class _Bytes(Protocol):
    @property
    def nbytes(self) -> int: ...


_TablesT = TypeVar("_TablesT", bound=_Bytes)


class _Kept:
    """The latest tables that fit into a number of bytes of their device: many lengths share the
    small ones.

    Several threads may use it at a time; two of them may make the same tables.
    """

    def __init__(self, most_bytes: int) -> None:
        self._lock = threading.Lock()
        self._most_bytes = most_bytes
        self._bytes = 0
        self._tables: dict[Hashable, Any] = {}

    def get(self, key: Hashable) -> Any:
        with self._lock:
            found = self._tables.pop(key, None)
            if found is not None:
                # Dicts keep the order in which keys were put in: the latest comes last.
                self._tables[key] = found
        return found

    def put(self, key: Hashable, tables: _TablesT) -> _TablesT:
        with self._lock:
            if key in self._tables:
                self._drop(key)
            self._tables[key] = tables
            self._bytes += tables.nbytes
            while self._bytes > self._most_bytes and len(self._tables) > 1:
                self._drop(next(iter(self._tables)))
        return tables

    def _drop(self, key: Hashable) -> None:
        self._bytes -= self._tables.pop(key).nbytes


_kept = _Kept(256 << 20)


@cache
def _load_operators(device: torch.device) -> None:
    """Let torch load what writes entries out on a device, which takes tens of milliseconds, with the first tables."""
    if device.type != "cpu":
        ones = torch.ones(2, 2, dtype=torch.int32, device=device)
        _written_out(ones.index_select(1, ones[0]), ones.index_select(1, ones[0]) + ones[1], 4)


def _tables(
    group: BranchGroup,
    tails: tuple[int, ...],
    own: int,
    other: int,
    causal: bool,
    by_key: bool,
    device: torch.device,
) -> _ByTail:
    """The lists of whole super-segments, if any, and of each of these tails."""
    *of_variants, entries = _lists(group, tails, own, other, causal, by_key)
    found = _there(group, [_behind_the_whole(x) for x in of_variants], entries, device)
    return _ByTail(zip(tails, found, strict=True))


def _lists(
    group: BranchGroup, tails: tuple[int, ...], own: int, other: int, causal: bool, by_key: bool
) -> tuple[Integers, Integers, Integers, _Entries]:
    """Items, lookup and order of a whole super-segment and of each of these tails, and their entries."""
    partners = partners_of(group.rates, group.kinds, group.modulus)
    runs = runs_of(group, tails, own, other, causal, by_key)
    shared = partners.shared[..., runs.level]
    kept = shared > 0
    lookup = lookup_of(runs, kept)
    items = heaviest_first(lookup)
    if group.one_frame_per_kv_head:
        order = items[:, 0, :, :2]
    else:
        order = every_tile(lookup, [-(-rows // own) for rows in rows_of_variants(group, tails)])
    tags = (shared << (TILE_BITS + CLASS_BITS)) | (partners.classes[..., None] << TILE_BITS)
    return items, lookup, order, _Entries.of(runs, kept, tags)


def _there(
    group: BranchGroup, lists: Sequence[Integers], entries: _Entries, device: torch.device
) -> Iterator[TileTables]:
    """Items, lookup and order [n, ...] on a device, each of the n with all entries."""
    _load_operators(device)
    heads = np.stack([group.head_kind, group.head_shift], 1)
    if entries.are_few:
        *there, (heads_there,), (listed,) = _on_device(device, *lists, heads[None], entries.here()[None])
    else:
        more = (x[None] for x in (heads, entries.count, entries.begin, entries.column, entries.tag))
        *there, (heads_there,), (count,), (begin,), (column,), (tag,) = _on_device(device, *lists, *more)
        listed = entries.there(count, begin, column, tag)
    return (TileTables(items, lookup, order, listed, heads_there) for items, lookup, order in zip(*there, strict=True))


def _with_one_that_pads(items: Integers) -> Integers:
    """The items [..., n, numbers] of each variant, with a last one without a class: [..., n + 1, numbers]."""
    pad = np.zeros((*items.shape[:-2], 1, items.shape[-1]), items.dtype)
    pad[..., 0] = -1
    return np.concatenate((items, pad), -2)


def _behind_the_whole(of_variants: Integers) -> Integers:
    """[tails, 2, ...] of [1 + tails, ...]: the whole super-segment, and that tail."""
    tails = of_variants[1:]
    if len(tails) == 1:
        # The same, and faster: every length with new tables waits for it.
        return of_variants[None]
    return np.stack((np.broadcast_to(of_variants[0], tails.shape), tails), 1)


@dataclass(frozen=True, slots=True)
class _Entries:
    """Every list, variant by variant, tile by tile, as runs of consecutive tiles to be written out.

    count, begin [tiles of all variants, 3 sorts of tiles times ranges]: how many tiles a run has, and where it begins.
    column, tag: of every run that a tile has, its column in those, and its packed multiplicity and class. per_tile:
    entries of each tile.
    """

    count: Integers
    begin: Integers
    column: Integers
    tag: Integers
    per_tile: Integers

    @classmethod
    def of(cls, runs: Runs, kept: npt.NDArray[np.bool_], tags: Integers) -> _Entries:
        """kept, tags: [kinds, R, P, ranges]."""
        kinds, classes, width, ranges = kept.shape
        count, begin = (x.swapaxes(-1, -2).reshape(-1, 3 * ranges) for x in (runs.count, runs.begin))
        # For every class, in the order of sorts, partners, ranges.
        kind, own, sort, partner, span = np.broadcast_to(kept[:, :, None], (kinds, classes, 3, width, ranges)).nonzero()
        column = sort * ranges + span
        some = (count.sum(0) > 0)[column]
        column, tag = column[some], tags[kind[some], own[some], partner[some], span[some]]
        per_tile = (count * np.bincount(column, minlength=3 * ranges)).sum(1)
        return cls(count, begin, column, tag, per_tile)

    @property
    def are_few(self) -> bool:
        """Whether to write them out costs less than the launches that do so on a device."""
        return max(int(self.per_tile.sum()), self.per_tile.size * self.column.size) <= tuning.FEW_ENTRIES

    def here(self) -> Integers:
        """All of them; without any, a zero."""
        counts, begins = self.count[:, self.column].ravel(), (self.begin[:, self.column] + self.tag).ravel()
        total = int(self.per_tile.sum())
        skipped = begins + counts - counts.cumsum()
        return np.repeat(skipped, counts) + np.arange(total) if total else np.zeros(1, np.int64)

    def there(self, count: Tensor, begin: Tensor, column: Tensor, tag: Tensor) -> Tensor:
        """The same in int32 from the same numbers on a device."""
        if not self.per_tile.any():
            return torch.zeros(1, dtype=torch.int32, device=count.device)
        step = max(1, tuning.NUMBERS_AT_ONCE // self.column.size)
        parts = [
            _written_out(
                count[at : at + step].index_select(1, column),
                begin[at : at + step].index_select(1, column) + tag,
                int(self.per_tile[at : at + step].sum()),
            )
            for at in range(0, count.shape[0], step)
        ]
        return torch.cat(parts) if len(parts) > 1 else parts[0]


def _written_out(counts: Tensor, begins: Tensor, total: int) -> Tensor:
    """begin, begin + 1, ... of each run, one run after another; the total is given, so that no device is waited for."""
    counts = counts.flatten()
    skipped = begins.flatten() + counts - counts.cumsum(0)
    steps = torch.repeat_interleave(skipped, counts, output_size=total)
    return (torch.arange(total, device=counts.device) + steps).to(torch.int32)


def _on_device(device: torch.device, *arrays: npt.NDArray[Any]) -> list[Tensor]:
    """int32 tensors of these arrays, in one copy, each [row] of each at a multiple of 16 bytes: kernels are compiled
    again for others.
    """
    rows = [x.reshape(len(x), -1) for x in arrays]
    widths = [x.shape[1] + -x.shape[1] % _ALIGNED for x in rows]
    *begins, total = accumulate((len(x) * width for x, width in zip(rows, widths, strict=True)), initial=0)
    packed = np.zeros(total, np.int32)
    for x, width, begin in zip(rows, widths, begins, strict=True):
        packed[begin : begin + len(x) * width].reshape(len(x), width)[:, : x.shape[1]] = x
    there = torch.from_numpy(packed).to(device)
    # In a third of the time that slices and views take.
    return [
        there.as_strided(x.shape, [width, *_steps(x.shape[1:])], begin)
        for x, width, begin in zip(arrays, widths, begins, strict=True)
    ]


def _steps(shape: tuple[int, ...]) -> list[int]:
    """The strides of a contiguous tensor."""
    return [*accumulate(shape[:0:-1], mul, initial=1)][::-1]
