"""Documents that follow each other along one axis: where the fused kernels find the super-segments of each.

A super-segment of documents has the lists of tiles that one of a single sequence has, whose beginning and end the
kernels are told. So all that a packing has of its own is where its super-segments lie and which programs visit them
(`DocumentLists`): a few numbers for each document and each tile. How many there are at most follows from the tokens and
from a rounded number of documents alone, so that launches of one packing serve every other one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilabench.kernels.bwd_preprocess import StatsLayout
from dilabench.kernels.fused.branch_group import SPAN_COLUMNS, BranchGroup
from dilabench.kernels.fused.tile_lists import Integers
from dilabench.kernels.fused.tile_tables import DocumentTables, document_tables, on_a_stream_of_its_own, tile_tables
from dilabench.kernels.streams import record
from dilabench.kernels.tuning import TileConfig

_Written = npt.NDArray[np.int32]

# Beyond every token.
_NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True, eq=False)
class ListRequest:
    """Lists of tiles of ``other`` rows for tiles of ``own`` rows, and statistics in tiles of ``stats_tile`` rows.

    What all packings have of them in common stays with the request.
    """

    group: BranchGroup
    own: int
    other: int
    by_key: bool = False
    stats_tile: int = 1
    _tables: dict[tuple[bool, torch.device, type[Tensor]], DocumentTables] = field(default_factory=dict, repr=False)

    @cached_property
    def most_visits(self) -> int:
        """How many tiles of all classes documents have at most."""
        group = self.group
        classes = group.modulus
        if group.one_frame_per_kv_head or not self.by_key:
            classes = max(sum(bool(group.active(k, u)) for u in range(classes)) for k in range(len(group.kinds)))
        most = classes * (group.length // (group.modulus * self.own) + group.most_supers)
        # Two visits are 16 bytes: kernels are compiled again for lists that begin elsewhere.
        return most + most % 2

    @property
    def tile(self) -> int:
        """The rows by whose number lists of shorter super-segments differ."""
        return min(self.own, self.other)

    def stats_layout(self, block: int) -> StatsLayout:
        """The layout of as many rows as documents have at most, in blocks that divide the tile."""
        group = self.group
        rows = group.length // group.modulus + group.most_supers * self.stats_tile
        return StatsLayout(group.modulus, 1, group.length, -(-rows // block) * block, block)

    def tables(self, tails: Integers, causal: bool, x: Tensor) -> DocumentTables:
        """Lists for super-segments of documents with these tails (`document_tables`), on the device of x."""
        where = causal, x.device, type(x)
        found = self._tables.get(where)
        if found is None:
            tiles = self.group, self.own, self.other, causal, self.by_key
            found = document_tables(*tiles, x, np.unique(tails[tails >= 0]))
            if found.serve_all:
                self._tables[where] = found
        return found


class DocumentLists(NamedTuple):
    """The lists for a launch over documents.

    visits: int32 [n, 2], of each program its super-segment and its item among those of the super-segment's variant.
    spans: int32 [n, `SPAN_COLUMNS`], of each super-segment its first token, tokens, variant of lists, and first row
    among statistics and among stored rows; then all stored rows, and the items of a variant. Rows that pad come last.
    """

    tables: DocumentTables
    visits: Tensor
    spans: Tensor

    @property
    def by_query(self) -> dict[str, Tensor]:
        """Tensors by their names in kernels."""
        lists = self.tables.tables
        common = {"entries": lists.entries, "heads": lists.heads, "visits": self.visits, "spans": self.spans}
        return common | {"items": lists.items}

    def by_key(self, order: str = "order") -> dict[str, Tensor]:
        """The same for kernels by key, which have another name for their order."""
        lists = self.tables.tables
        common = {"entries": lists.entries, "heads": lists.heads, "visits": self.visits, "spans": self.spans}
        return common | {"lookup": lists.lookup, order: lists.order}


class PassLists(NamedTuple):
    """Lists of each group of branches, and the spans of all of them, [groups, n, `SPAN_COLUMNS`]."""

    of_groups: tuple[DocumentLists, ...]
    spans: Tensor


# Passes over one packing whose lists are kept: forward and backward of a few layouts of tensors.
_MOST_PASSES = 8


class Packing:
    """Documents from ``bounds[i]`` to ``bounds[i + 1]``, none of them empty, with the lists that passes were given."""

    def __init__(self, bounds: Sequence[int]) -> None:
        self.bounds = tuple(bounds)
        self._made: dict[int, _Made] = {}
        # Passes and groups of branches share them.
        self._ends: Integers | None = None
        self._supers: dict[tuple[int, int], _Supers] = {}

    def lists(self, requests: tuple[ListRequest, ...], causal: bool, x: Tensor) -> PassLists:
        """For each request of a pass, on the device of x; made once for the same object."""
        made = self._made.get(id(requests))
        if made is None:
            while len(self._made) >= _MOST_PASSES:
                del self._made[next(iter(self._made))]
            made = self._made[id(requests)] = _Made.of(self.supers, requests, causal, x)
        if x.is_cuda and made.streams is not None:
            stream = torch.cuda.current_stream(x.device)
            if stream.cuda_stream not in made.streams:
                made.streams.add(stream.cuda_stream)
                if made.copied is not None:
                    stream.wait_event(made.copied)
                # The lists are exchanged from launch to launch, which records only what stays.
                record(
                    x for lists in made.lists.of_groups for x in (*lists.by_query.values(), *lists.by_key().values())
                )
        return made.lists

    def supers(self, group: BranchGroup) -> _Supers:
        """The super-segments of a group, made once for groups that cut documents alike."""
        key = group.super_tokens, group.modulus
        found = self._supers.get(key)
        if found is None:
            if self._ends is None:
                self._ends = np.array(self.bounds)
            found = self._supers[key] = _Supers.of(self._ends, *key)
        return found


class _Made(NamedTuple):
    """Lists with what they were made for, so that no other object takes its identity, and the streams that use them.

    copied: when they are on the device, where the call that copied them did not wait for it.
    """

    requests: tuple[ListRequest, ...]
    lists: PassLists
    copied: torch.cuda.Event | None
    streams: set[int] | None

    @classmethod
    def of(
        cls,
        of_documents: Callable[[BranchGroup], _Supers],
        requests: tuple[ListRequest, ...],
        causal: bool,
        x: Tensor,
    ) -> _Made:
        """A row of numbers with all of them is copied at once."""
        most = max(request.group.most_supers for request in requests)
        visits = [request.most_visits for request in requests]
        numbers_of_spans = len(requests) * most * SPAN_COLUMNS
        numbers = np.empty(numbers_of_spans + 2 * sum(visits), np.int32)
        spans = numbers[:numbers_of_spans].reshape(len(requests), most, SPAN_COLUMNS)
        spans.fill(_NEVER)
        pairs, stop = numbers[numbers_of_spans:].reshape(-1, 2), 0
        tables = []
        for request, own, count in zip(requests, spans, visits, strict=True):
            supers = of_documents(request.group)
            lists = request.tables(supers.tails(request), causal, x)
            variants = supers.variants(request, lists)
            own[: len(variants), :5] = supers.spans(request, lists)
            own[:, 5] = request.group.stored_rows
            own[:, 6] = listed = (lists.tables.order if request.by_key else lists.tables.items).shape[-2]
            of_variant = lists.by_key if request.by_key else lists.by_query
            write_visits(variants, supers.order, of_variant, listed - 1, pairs[stop : stop + count])
            stop += count
            tables.append(lists)
        there, copied = _copied(numbers, x)
        spans_there = there[:numbers_of_spans].view(len(requests), most, SPAN_COLUMNS)
        visits_there = there[numbers_of_spans:].view(-1, 2).split(visits)
        of_groups = tuple(map(DocumentLists, tables, visits_there, spans_there.unbind()))
        return cls(requests, PassLists(of_groups, spans_there), copied, set() if x.is_cuda else None)


def _copied(numbers: _Written, x: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Numbers on the device of x, and an event for their arrival unless it was waited for."""
    here = torch.from_numpy(numbers)
    if type(x) is not Tensor or not x.is_cuda or torch.cuda.is_current_stream_capturing():
        with on_a_stream_of_its_own(x.device):
            return here.to(x.device), None
    there, copied = here.pin_memory().to(x.device, non_blocking=True), torch.cuda.Event()
    copied.record(torch.cuda.current_stream(x.device))
    return there, copied


@dataclass(frozen=True, slots=True, eq=False)
class _Supers:
    """Super-segments of documents in the order of their tokens: first token, tokens, and the rows that the longest
    classes and all of them have; then the numbers of the longest first. What requests share of them is kept.
    """

    most: int
    modulus: int
    first: Integers
    tokens: Integers
    rows: Integers
    sure: Integers
    order: Integers
    _kept: dict[tuple[int | str, ...], Integers] = field(default_factory=dict)

    @classmethod
    def of(cls, bounds: Integers, most: int, modulus: int) -> _Supers:
        """The super-segments of documents, each of at most `most` tokens, in rows of `modulus` tokens."""
        lengths = bounds[1:] - bounds[:-1]
        supers = -(-lengths // most)
        document = np.arange(len(lengths)).repeat(supers)
        inside = (np.arange(len(document)) - (supers.cumsum() - supers).repeat(supers)) * most
        tokens = np.minimum(most, lengths[document] - inside)
        order = np.argsort(-tokens, kind="stable")
        return cls(most, modulus, bounds[document] + inside, tokens, -(-tokens // modulus), tokens // modulus, order)

    def tails(self, request: ListRequest) -> Integers:
        """The tail of each super-segment's lists (`BranchGroup.tails_in_tiles`), -1 for a whole one."""
        key = "tails", request.tile
        found = self._kept.get(key)
        if found is None:
            tile = request.tile
            in_tiles = -(-self.rows // tile) * tile
            tails = np.minimum(self.modulus * in_tiles - (self.sure < in_tiles), self.most - 1)
            found = self._kept[key] = np.where(self.tokens < self.most, tails, -1)
        return found

    def variants(self, request: ListRequest, lists: DocumentTables) -> Integers:
        """The variant of each super-segment's lists: 0 of a whole one."""
        key = "variants", request.tile, lists.serve_all
        found = self._kept.get(key)
        if found is None:
            # No tail is below 0, so that a whole one comes first.
            found = self._kept[key] = lists.tails.searchsorted(self.tails(request)) + (self.tokens < self.most)
        return found

    def spans(self, request: ListRequest, lists: DocumentTables) -> Integers:
        """The first columns of `DocumentLists.spans`: [n, 5]."""
        key = "spans", request.tile, lists.serve_all, request.stats_tile
        found = self._kept.get(key)
        if found is None:
            rows, stats = self.rows, request.stats_tile
            of_stats = rows if stats == 1 else -(-rows // stats) * stats
            columns = self.first, self.tokens, self.variants(request, lists), of_stats.cumsum() - of_stats
            found = self._kept[key] = np.stack((*columns, rows.cumsum() - rows), 1)
        return found


def write_visits(variants: Integers, order: Integers, items_of_variant: Integers, none: int, visits: _Written) -> None:
    """Every item of every super-segment, the longest first; those that pad have an item that there is none of."""
    items = items_of_variant[variants[order]]
    stop = items.cumsum()
    total = int(stop[-1])
    visits[:total, 0] = order.repeat(items)
    visits[:total, 1] = np.arange(total) - (stop - items).repeat(items)
    visits[total:, 0] = 0
    visits[total:, 1] = none


def query_lists(
    operands: Mapping[str, Tensor], group: BranchGroup, tiles: TileConfig, causal: bool
) -> tuple[int, dict[str, Tensor]]:
    """How many items a launch by query has, and the arguments that say where they are; lists of documents are among the
    operands (`DocumentLists.by_query`).
    """
    if group.documents:
        names = ("items", "entries", "heads", "visits", "spans")
        return len(operands["visits"]), {f"{name}_ptr": operands[name] for name in names}
    tables = tile_tables(group, tiles.block_m, tiles.block_n, causal, False, operands["q"].device)
    lists = {"items_ptr": tables.items, "entries_ptr": tables.entries, "heads_ptr": tables.heads}
    return tables.items.shape[2], lists


def key_lists(
    operands: Mapping[str, Tensor], group: BranchGroup, tiles: TileConfig, causal: bool, order: str = "order"
) -> tuple[int, int, dict[str, Tensor]]:
    """How many items a launch by key has, and key tiles, and the arguments that say where they are, as `query_lists`
    gives them.
    """
    if group.documents:
        names = ("lookup", order, "entries", "heads", "visits", "spans")
        return (
            len(operands["visits"]),
            operands["lookup"].shape[3],
            {f"{name}_ptr": operands[name] for name in names},
        )
    tables = tile_tables(group, tiles.block_n, tiles.block_m, causal, True, operands["q"].device)
    lists = {
        "lookup_ptr": tables.lookup,
        f"{order}_ptr": tables.order,
        "entries_ptr": tables.entries,
        "heads_ptr": tables.heads,
    }
    return tables.order.shape[1], tables.lookup.shape[3], lists
