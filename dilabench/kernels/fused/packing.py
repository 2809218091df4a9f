"""Documents that follow each other along one axis: where the fused kernels find the super-segments of each.

A super-segment of documents has the lists of tiles that one of a single sequence has, whose beginning and end the
kernels are told. So all that a packing has of its own is where its super-segments lie (`span_table`) and which programs
visit them (`visit_table`): a few numbers for each document and each tile. How many there are at most follows from the
tokens and from a rounded number of documents alone, so that launches of one packing serve every other one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dilabench.kernels.bwd_preprocess import StatsLayout
from dilabench.kernels.fused.branch_group import SPAN_COLUMNS, BranchGroup
from dilabench.kernels.fused.tile_lists import Integers
from dilabench.kernels.fused.tile_tables import (
    DocumentTables,
    document_tables,
    on_a_stream_of_its_own,
    on_device,
    tile_tables,
)
from dilabench.kernels.streams import record
from dilabench.kernels.tuning import TileConfig

# Beyond every token.
_NEVER = np.iinfo(np.int32).max


class ListRequest(NamedTuple):
    """Lists of tiles of ``other`` rows for tiles of ``own`` rows, and statistics in tiles of ``stats_tile`` rows."""

    group: BranchGroup
    own: int
    other: int
    by_key: bool = False
    stats_tile: int = 1

    @property
    def most_visits(self) -> int:
        """How many tiles of all classes documents have at most."""
        group = self.group
        classes = group.modulus
        if group.one_frame_per_kv_head or not self.by_key:
            classes = max(sum(bool(group.active(k, u)) for u in range(classes)) for k in range(len(group.kinds)))
        return classes * (group.length // (group.modulus * self.own) + group.most_supers)

    def stats_layout(self, block: int) -> StatsLayout:
        """Of as many rows as documents have at most, in blocks of so many, which divide the tile."""
        group = self.group
        rows = group.length // group.modulus + group.most_supers * self.stats_tile
        return StatsLayout(group.modulus, 1, group.length, -(-rows // block) * block, block)


class DocumentLists(NamedTuple):
    """What a launch over documents is given.

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
        self._made: dict[int, tuple[tuple[ListRequest, ...], PassLists]] = {}
        self._streams: set[tuple[int, int]] = set()

    def lists(self, requests: tuple[ListRequest, ...], causal: bool, device: torch.device) -> PassLists:
        """For each request of a pass; made once for the same object."""
        made = self._made.get(id(requests))
        if made is None:
            while len(self._made) >= _MOST_PASSES:
                del self._made[next(iter(self._made))]
            # Kept with its lists, so that no other object takes its identity.
            made = self._made[id(requests)] = requests, _pass_lists(np.array(self.bounds), requests, causal, device)
        if device.type == "cuda":
            use = id(requests), torch.cuda.current_stream(device).cuda_stream
            if use not in self._streams:
                # The lists are exchanged from launch to launch, which records only what stays.
                self._streams.add(use)
                record(x for lists in made[1].of_groups for x in (*lists.by_query.values(), *lists.by_key().values()))
        return made[1]


def _pass_lists(bounds: Integers, requests: Sequence[ListRequest], causal: bool, device: torch.device) -> PassLists:
    most = max(request.group.most_supers for request in requests)
    spans = np.full((len(requests), most, SPAN_COLUMNS), _NEVER, np.int64)
    tables, visits = [], []
    for request, own in zip(requests, spans, strict=True):
        group = request.group
        needed = span_table(bounds, request, own)
        lists = document_tables(
            group, np.unique(needed[needed >= 0]), request.own, request.other, causal, request.by_key, device
        )
        own[: len(needed), 2] = np.where(needed < 0, 0, 1 + np.searchsorted(lists.tails, needed))
        of_variant = lists.by_key if request.by_key else lists.by_query
        own[:, 6] = listed = (lists.tables.order if request.by_key else lists.tables.items).shape[-2]
        visits.append(visit_table(own[: len(needed)], of_variant, request.most_visits, listed - 1)[None])
        tables.append(lists)
    with on_a_stream_of_its_own(device):
        spans_there, *visits_there = on_device(device, spans, *visits)
    of_groups = zip(tables, (x[0] for x in visits_there), spans_there, strict=True)
    return PassLists(tuple(DocumentLists(*each) for each in of_groups), spans_there)


def span_table(bounds: Integers, request: ListRequest, spans: Integers) -> Integers:
    """Write super-segments as `DocumentLists.spans` in the order of their tokens, without variants and items. Returns
    of each the tail of its lists (`BranchGroup.tails_in_tiles`), -1 for a whole one.
    """
    group, tile = request.group, min(request.own, request.other)
    most, modulus = group.super_tokens, group.modulus
    lengths = np.diff(bounds)
    supers = -(-lengths // most)
    document = np.repeat(np.arange(len(lengths)), supers)
    inside = (np.arange(len(document)) - np.repeat(np.cumsum(supers) - supers, supers)) * most
    tokens = np.minimum(most, lengths[document] - inside)
    rows = -(-tokens // modulus)
    in_tiles = -(-rows // tile) * tile
    tails = np.minimum(modulus * in_tiles - (tokens // modulus < in_tiles), most - 1)
    there = spans[: len(document)]
    there[:, 0], there[:, 1] = bounds[document] + inside, tokens
    stats = -(-rows // request.stats_tile) * request.stats_tile
    there[:, 3], there[:, 4] = np.cumsum(stats) - stats, np.cumsum(rows) - rows
    spans[:, 5] = group.stored_rows
    return np.where(tokens < most, tails, -1)


def visit_table(spans: Integers, items_of_variant: Integers, most: int, none: int) -> Integers:
    """Every item of every super-segment, the longest first, filled up to ``most`` by an item that there is none of."""
    order = np.argsort(-spans[:, 1], kind="stable")
    items = items_of_variant[spans[order, 2]]
    first = np.cumsum(items) - items
    visits = np.zeros((most, 2), np.int64)
    total = int(items.sum())
    visits[:total, 0] = np.repeat(order, items)
    visits[:total, 1] = np.arange(total) - np.repeat(first, items)
    visits[total:, 1] = none
    return visits


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
