"""Documents that follow each other along one axis: where the fused kernels find the super-segments of each.

A super-segment of documents has the lists of tiles that one of a single sequence has, whose beginning and end the
kernels are told. So all that a packing has of its own is where its super-segments lie and which programs visit them
(`DocumentLists`): a few numbers for each document and each tile. How many there are at most follows from the tokens and
from a rounded number of documents alone, so that launches of one packing serve every other one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from operator import sub
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilabench.kernels.bwd_preprocess import StatsLayout
from dilabench.kernels.fused.branch_group import SPAN_COLUMNS, VISIT_COLUMNS, BranchGroup
from dilabench.kernels.fused.document_lists import AT_ONCE, BLOCK_TOKENS, REQUEST_COLUMNS, lists_kernel
from dilabench.kernels.fused.tile_lists import Integers
from dilabench.kernels.fused.tile_tables import DocumentTables, document_tables, tile_tables
from dilabench.kernels.launch_cache import COPY_BYTES, Launch, LaunchCache
from dilabench.kernels.streams import is_captured, on_a_stream_of_its_own, record
from dilabench.kernels.tuning import TileConfig

_Written = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class ListRequest:
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
        """The layout of as many rows as documents have at most, in blocks that divide the tile."""
        group = self.group
        rows = group.length // group.modulus + group.most_supers * self.stats_tile
        return StatsLayout(group.modulus, 1, group.length, -(-rows // block) * block, block)


class DocumentLists(NamedTuple):
    """The lists for a launch over documents.

    spans: int32 [n, `SPAN_COLUMNS`], of each super-segment its first token, tokens, and first row among statistics and
    among stored rows. visits: int32 [n, `VISIT_COLUMNS`], of each program the same of its super-segment; then the
    variant of lists, the item among the variant's items, all items of a variant, and all stored rows. Rows that pad
    come last.
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
    """Lists of each group of branches, and where documents are.

    documents: int32 [n + 1, 1 + groups], of each document its first token and its first row among the stored rows of
    each group; then the end of all. blocks: int32, the document that holds the first token of each `BLOCK_TOKENS`; a
    few more pad.
    """

    of_groups: tuple[DocumentLists, ...]
    documents: Tensor
    blocks: Tensor


class PassRequests:
    """The lists that the launches of a pass need, with the numbers that they depend on besides the bounds.

    sizes: how many numbers of spans, visits, blocks and documents `Packing.lists` writes, one after another.
    """

    def __init__(self, *requests: ListRequest) -> None:
        self.requests = requests
        self.most_supers = max(request.group.most_supers for request in requests)
        self.visits = [request.most_visits for request in requests]
        n, group = len(requests), requests[0].group
        blocks = -(-group.length // BLOCK_TOKENS)
        # Each begins at a multiple of 16 bytes: kernels are compiled again for others.
        blocks += -blocks % (COPY_BYTES // 4)
        of_documents = (group.documents + 1) * (n + 1)
        self.sizes = n * self.most_supers * SPAN_COLUMNS, sum(self.visits) * VISIT_COLUMNS, blocks, of_documents
        self.cache = LaunchCache()
        self._kept: dict[tuple[bool, torch.device, type[Tensor]], _Tables] = {}

    def tables(self, packing: Packing, causal: bool, x: Tensor) -> _Tables:
        """The lists for super-segments of these documents, on the device of x."""
        key = causal, x.device, type(x)
        kept = self._kept.get(key)
        if kept is not None:
            return kept
        tables, numbers = [], []
        visits_at, *_ = self.sizes
        tails_at = len(self.requests) * REQUEST_COLUMNS
        for request, visits in zip(self.requests, self.visits, strict=True):
            group, tile = request.group, min(request.own, request.other)
            made = document_tables(
                group, request.own, request.other, causal, request.by_key, x, partial(packing.tails, group, tile)
            )
            counts = made.by_key if request.by_key else made.by_query
            listed = (made.tables.order if request.by_key else made.tables.items).shape[-2]
            sizes = group.super_tokens, group.modulus, tile, request.stats_tile, group.stored_rows, listed
            tables.append(made)
            numbers.append((*sizes, visits_at, visits, tails_at, len(made.tails)))
            visits_at, tails_at = visits_at + visits * VISIT_COLUMNS, tails_at + len(made.tails) + len(counts)
        lists = (half for made, request in zip(tables, self.requests, strict=True) for half in made.of(request.by_key))
        there = _copied(np.concatenate([np.array(numbers).ravel(), *lists]).astype(np.int32), x)
        of_tables = (x for made in tables for x in made.tables.tensors)
        # Tables are memory of another stream, so the current one is recorded, too.
        found = _Tables(tuple(tables), there._replace(tensors=(*there.tensors, *of_tables), streams=set()))
        if all(made.serve_all for made in tables):
            self._kept[key] = found
        return found


# Passes over one packing whose lists are kept: forward and backward of a few layouts of tensors.
_MOST_PASSES = 8


class Packing:
    """Documents from ``bounds[i]`` to ``bounds[i + 1]``, none of them empty, with the lists that passes were given.

    tokens, longest: of all documents, and of the longest one or more. Both are given for bounds on the device (int32
    [n]), which are not read: some documents may be empty, and tokens behind the last bound are one more.
    """

    def __init__(self, bounds: Sequence[int] | Tensor, tokens: int = 0, longest: int = 0) -> None:
        self._numbers: tuple[int, ...] | None = None
        self._there: _There | None = None
        self._on_device = isinstance(bounds, Tensor)
        if isinstance(bounds, Tensor):
            self.tokens, self.longest, self.count = tokens, longest, len(bounds)
            self._there = _There((bounds,), None, set())
        else:
            self._numbers = tuple(bounds)
            self.tokens, self.count = self._numbers[-1], len(self._numbers) - 1
            self.longest = max(map(sub, self._numbers[1:], self._numbers))
        self._made: dict[PassRequests, _Made] = {}

    @property
    def documents(self) -> int:
        """A rounded number of documents, as many as there are or more."""
        step = 1 << max(0, self.count.bit_length() - 3)
        return -(-self.count // step) * step

    def bounds(self, x: Tensor) -> Tensor:
        """int32 on the device of x: the bounds, perhaps followed by further ones at the last token."""
        if self._there is None:
            assert self._numbers is not None
            filled = np.full(self.documents + 1, self.tokens, np.int32)
            filled[: len(self._numbers)] = self._numbers
            self._there = _copied(filled, x)
        return self._there.used(x)

    def is_read_by_graph(self, x: Tensor) -> bool:
        """Whether a graph is being captured that reads the bounds at each replay."""
        return self._on_device and is_captured(x)

    def tails(self, group: BranchGroup, tile: int) -> Integers:
        """The tails of the group's lists (`BranchGroup.tails_in_tiles`) that these documents need."""
        if self._numbers is None:
            assert self._there is not None
            self._numbers = (*self._there.tensors[0].tolist(), self.tokens)
        rest = np.diff(self._numbers) % group.super_tokens
        in_tiles = -(-rest // (group.modulus * tile)) * tile
        tails = np.minimum(group.modulus * in_tiles - (rest // group.modulus < in_tiles), group.super_tokens - 1)
        return np.unique(tails[rest > 0])

    def lists(self, of_pass: PassRequests, causal: bool, x: Tensor) -> PassLists:
        """The lists of a pass on the device of x, by one launch; made once for the same object."""
        if self.is_read_by_graph(x):
            return self._launched(of_pass, causal, x).lists
        made = self._made.get(of_pass)
        if made is None:
            # A captured launch would write them with the first replay.
            with on_a_stream_of_its_own(x.device) if is_captured(x) else nullcontext():
                made = self._launched(of_pass, causal, x)
            while len(self._made) >= _MOST_PASSES:
                del self._made[next(iter(self._made))]
            self._made[of_pass] = made
        made.numbers.used(x)
        made.tables.numbers.used(x)
        return made.lists

    def _launched(self, of_pass: PassRequests, causal: bool, x: Tensor) -> _Made:
        tables, bounds = of_pass.tables(self, causal, x), self.bounds(x)
        of_requests, requests = len(of_pass.requests), tables.numbers.used(x)
        sizes, most, documents = of_pass.sizes, of_pass.most_supers, of_pass.requests[0].group.documents
        numbers = torch.empty(sum(sizes), dtype=torch.int32, device=x.device)
        own = {"bounds": bounds, "requests": requests, "lists": numbers}

        def prepare() -> list[Launch]:
            arguments = {
                **{f"{name}_ptr": tensor for name, tensor in own.items()},
                "n_bounds": len(bounds),
                "n_documents": documents,
                "n_spans": most,
                "n_requests": of_requests,
                "tokens": self.tokens,
                "blocks_at": sizes[0] + sizes[1],
                "documents_at": sum(sizes[:3]),
                "BLOCK": AT_ONCE,
                "SPAN": SPAN_COLUMNS,
                "VISIT": VISIT_COLUMNS,
                "REQUEST": REQUEST_COLUMNS,
                "TOKENS": BLOCK_TOKENS,
            }
            return [Launch(lists_kernel, lambda _: ((of_requests * (documents + 1),), arguments))]

        of_pass.cache.launch((len(bounds), bounds.data_ptr() % COPY_BYTES), [own], prepare)
        of_spans, of_visits, blocks, of_documents = numbers.split_with_sizes(sizes)
        spans = of_spans.view(of_requests, most, SPAN_COLUMNS).unbind()
        visits = of_visits.view(-1, VISIT_COLUMNS).split_with_sizes(of_pass.visits)
        of_groups = tuple(map(DocumentLists, tables.of_requests, visits, spans))
        lists = PassLists(of_groups, of_documents.view(documents + 1, -1), blocks)
        return _Made(lists, tables, _There.of((numbers,), x))


class _There(NamedTuple):
    """Tensors on a device, when they are complete (None: for every stream), and the streams that use them."""

    tensors: tuple[Tensor, ...]
    complete: torch.cuda.Event | None
    streams: set[int]

    @classmethod
    def of(cls, tensors: tuple[Tensor, ...], x: Tensor) -> _There:
        """Made by the current stream of the device of x."""
        if type(x) is not Tensor or not x.is_cuda or is_captured(x):
            return cls(tensors, None, set())
        complete, stream = torch.cuda.Event(), torch.cuda.current_stream(x.device)
        complete.record(stream)
        # This stream need neither wait nor be recorded: the memory is its own.
        return cls(tensors, complete, {stream.cuda_stream})

    def used(self, x: Tensor) -> Tensor:
        """The first one, for the current stream of the device of x."""
        if type(x) is Tensor and x.is_cuda:
            stream = torch.cuda.current_stream(x.device)
            if stream.cuda_stream not in self.streams:
                self.streams.add(stream.cuda_stream)
                # A captured stream cannot wait for what was launched before: `torch.cuda.graph` has waited.
                if self.complete is not None and not is_captured(x):
                    stream.wait_event(self.complete)
                # Launches record only what stays from call to call.
                record(self.tensors)
        return self.tensors[0]


class _Tables(NamedTuple):
    """The lists for super-segments of each request, and the numbers that `lists_kernel` reads of all requests, which
    record the streams of both.
    """

    of_requests: tuple[DocumentTables, ...]
    numbers: _There


class _Made(NamedTuple):
    """The lists of a pass, and what they consist of."""

    lists: PassLists
    tables: _Tables
    numbers: _There


def _copied(numbers: _Written, x: Tensor) -> _There:
    """Numbers on the device of x, by a copy that nothing waits for on the host."""
    here = torch.from_numpy(numbers)
    if type(x) is not Tensor or not x.is_cuda or is_captured(x):
        with on_a_stream_of_its_own(x.device):
            return _There((here.to(x.device),), None, set())
    return _There.of((here.pin_memory().to(x.device, non_blocking=True),), x)


def query_lists(
    operands: Mapping[str, Tensor], group: BranchGroup, tiles: TileConfig, causal: bool
) -> tuple[int, dict[str, Tensor]]:
    """How many items a launch by query has, and the arguments that say where they are; lists of documents are among the
    operands (`DocumentLists.by_query`).
    """
    if group.documents:
        names = ("items", "entries", "heads", "visits")
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
        names = ("lookup", order, "entries", "heads", "visits")
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
