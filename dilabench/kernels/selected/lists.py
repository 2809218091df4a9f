# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""Lists of a selection, made on the device: by query which blocks it sees, by block which queries selected it.

Both begin with one kernel that sorts the indices of a query and keeps each block once, so that no attention kernel
meets a repeated or an absent index. Sizes follow from shapes alone: the host waits for no list.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dilabench.kernels.launch_cache import LaunchCache
from dilabench.kernels.selected import tiles as tuned
from dilabench.kernels.selected.operands import launch
from dilabench.kernels.selected.selection import PER_SELECTION, TokenSelection, sequence_of_row
from dilabench.kernels.streams import is_captured
from dilabench.kernels.tuning import TileConfig

MadeT = TypeVar("MadeT")

# Elements that a program of four warps sorts at a time.
_ELEMENTS = 1024
_SORT = TileConfig(0, 0, 4, 1)
# Edges of lists that a program finds at a time, and lists that it divides into shares.
_EDGES, _LISTS = 128, 1024
_NONE = tl.constexpr(2**31 - 1)


class QueryLists(NamedTuple):
    """The blocks that ``queries`` successive tokens see, by tile of tokens and key/value head.

    ``keys`` int32 [tiles, K, queries * S]: first rows of the union of their blocks, ascending; ``counts`` int32
    [tiles, K]: how many. ``members`` int32, like keys: bit i if query i sees the block; None for one query.
    """

    keys: Tensor
    counts: Tensor
    members: Tensor | None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by the names under which kernels take them."""
        members = {} if self.members is None else {"members": self.members}
        return {"keys": self.keys, "counts": self.counts, **members}


def are_alike(
    selection: TokenSelection,
    queries: int,
    most_blocks: int,
    cache: LaunchCache,
    name: Hashable,
    meanwhile: Callable[[], object],
) -> bool | None:
    """Return True if a share `tiles.ALIKE` of the tiles of ``queries`` tokens, or more, see at most ``most_blocks``.

    The host waits for a sample of about `tiles.LEAST_READ` lists; before, it queues what is needed ``meanwhile``. None
    if it does not wait: for fewer lists, while a graph is captured, and while memory is traced. The launch has a name
    in its cache.
    """
    indices = selection.indices
    rows, kv_heads, _ = indices.shape
    lists = -(-rows // queries) * kv_heads
    if isinstance(indices, FakeTensor) or lists < tuned.LEAST_READ or is_captured(indices):
        return None
    # An odd step, so that the sample has every place in a stretch of tokens.
    step = lists // tuned.LEAST_READ | 1
    counts = indices.new_empty((-(-rows // (queries * step)), kv_heads))
    _launch(selection, {"counts": counts}, queries, cache, name, step)
    on_host = counts.to("cpu", non_blocking=True)
    copied = torch.cuda.current_stream(counts.device).record_event() if counts.is_cuda else None
    meanwhile()
    if copied is not None:
        copied.synchronize()
    return bool((on_host <= most_blocks).float().mean() >= tuned.ALIKE)


class KeyLists(NamedTuple):
    """The queries that selected each block, ascending; the lists of one key/value head are adjacent.

    ``places`` int32 [K * T * S]: (kv head * T + token) * S + n for the n-th block of a token. ``starts`` int32
    [K * n_blocks + 1]: where in places the list of a block begins. ``counts`` int32 [T, K]: blocks of a token.
    """

    places: Tensor
    starts: Tensor
    counts: Tensor


class KeptLists(dict[Hashable, Any]):
    """Lists of one selection by name, which passes make when they first need them, for as long as its indices do not
    change. All passes must be on one stream: nothing orders the work of two.
    """

    def once(self, name: Hashable, make: Callable[[], MadeT]) -> MadeT:
        """The result of `make`, which is called at the first pass only."""
        if name not in self:
            self[name] = make()
        made: MadeT = self[name]
        return made


class Shares(NamedTuple):
    """Lists by key of each part of the tokens, in shares of up to ``entries`` queries.

    ``lists`` int32 [parts, programs]: the list of a share, the number of lists behind the last share of a part.
    ``first`` int32 [parts, lists]: the first share of a list. ``edges`` int32 [parts + 1, lists]: where in
    `KeyLists.places` the tokens of a part begin in a list; behind the last part where the list ends. ``slot`` int32
    [lists] of a single part: where the sums of a list in several shares begin, -1 for a list in one share, which writes
    its result; an empty list has no share, and its sum of no slots is 0.
    """

    lists: Tensor
    first: Tensor
    edges: Tensor
    entries: int
    slot: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by the names under which kernels take them."""
        slot = {} if self.slot is None else {"slot": self.slot}
        return {"lists": self.lists, "share": self.first, "edges": self.edges, **slot}


@triton.jit
def _both(key, members, other_key, other_members):
    """The later key, with the members of both where the keys are equal."""
    return other_key, tl.where(key == other_key, members | other_members, other_members)


@triton.jit(do_not_specialize=(*PER_SELECTION, "tile_step"))
def _lists_kernel(
    indices_ptr,
    keys_ptr,
    members_ptr,
    blocks_ptr,
    counts_ptr,
    spans_ptr,
    rows,
    first_row,
    length,
    blocks_each,
    n_blocks,
    n_kv_heads,
    left,
    right,
    tile_step,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    QUERIES: tl.constexpr,
    LISTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    # A program makes LISTS lists, each of a key/value head and every tile_step-th tile of QUERIES tokens.
    number = tl.program_id(0) * LISTS + tl.arange(0, LISTS)
    place = tl.arange(0, WIDTH)[None, :]
    tile, kv_head = (number // n_kv_heads * tile_step)[:, None], (number % n_kv_heads)[:, None]
    query = place // SLOTS
    row = tile * QUERIES + query
    there = (query < QUERIES) & (row < rows)
    at = (row.to(tl.int64) * n_kv_heads + kv_head) * SLOTS + place % SLOTS
    index = tl.load(indices_ptr + at, there, -1)
    token = first_row + row
    first, end, first_block = sequence_of_row(spans_ptr, token, there, length, blocks_each)
    there = there & (index >= 0) & (index < (end - first + BLOCK - 1) // BLOCK)
    key = first + index * BLOCK
    if CAUSAL:
        there = there & (key <= token)
    if WINDOWED:
        there = there & (key <= token + right) & (key + BLOCK > token - left)
    ordered = tl.sort(tl.where(there, key * QUERIES + query, _NONE))
    key = tl.where(ordered == _NONE, _NONE, ordered // QUERIES)
    following = tl.gather(key, tl.broadcast_to(tl.minimum(place + 1, WIDTH - 1), [LISTS, WIDTH]), 1)
    last = (key != _NONE) & ((place == WIDTH - 1) | (following != key))
    count = tl.sum(last.to(tl.int32), 1)
    position = tl.cumsum(last.to(tl.int32), 1) - 1
    is_list = (number < tl.cdiv(rows, QUERIES * tile_step) * n_kv_heads)[:, None]
    tl.store(counts_ptr + number[:, None], count[:, None], is_list)
    list_at = number.to(tl.int64)[:, None] * (QUERIES * SLOTS)
    if keys_ptr is not None:
        tl.store(keys_ptr + list_at + position, key, is_list & last)
    if members_ptr is not None:
        _, members = tl.associative_scan((key, 1 << (ordered % QUERIES)), 1, _both)
        tl.store(members_ptr + list_at + position, members, is_list & last)
    if blocks_ptr is not None:
        first, _, first_block = sequence_of_row(spans_ptr, first_row + tile, tile < rows, length, blocks_each)
        block = kv_head * n_blocks + first_block + (key - first) // BLOCK
        list_at = (kv_head * rows + tile).to(tl.int64) * SLOTS
        tl.store(blocks_ptr + list_at + position, block, is_list & last)
        behind = is_list & (place < SLOTS) & (place >= count[:, None])
        tl.store(blocks_ptr + list_at + place, tl.zeros_like(key) + n_kv_heads * n_blocks, behind)


def query_lists(selection: TokenSelection, queries: int, cache: LaunchCache, name: Hashable) -> QueryLists:
    """Lists by tile of ``queries`` tokens. The launch has a name in its cache."""
    rows, kv_heads, slots = selection.indices.shape
    tiles = -(-rows // queries)
    keys, counts = (
        selection.indices.new_empty(shape, dtype=torch.int32)
        for shape in ((tiles, kv_heads, queries * slots), (tiles, kv_heads))
    )
    lists = QueryLists(keys, counts, torch.empty_like(keys) if queries > 1 else None)
    _launch(selection, lists.tensors, queries, cache, name)
    return lists


def key_lists(selection: TokenSelection, cache: LaunchCache, name: Hashable) -> KeyLists:
    """Lists by block, from one stable sort of the blocks that tokens see. The launch has a name in its cache."""
    rows, kv_heads, slots = selection.indices.shape
    lists = kv_heads * selection.n_blocks
    # A radix sort takes as many passes as its keys have bytes.
    dtype = torch.int16 if lists <= torch.iinfo(torch.int16).max else torch.int32
    blocks = selection.indices.new_empty((kv_heads, rows, slots), dtype=dtype)
    counts = selection.indices.new_empty((rows, kv_heads), dtype=torch.int32)
    _launch(selection, {"blocks": blocks, "counts": counts}, 1, cache, name)
    ordered, places = blocks.flatten().sort(stable=True)
    starts = torch.searchsorted(ordered, torch.arange(lists + 1, dtype=dtype, device=blocks.device), out_int32=True)
    return KeyLists(places.int(), starts, counts)


def shares_of(lists: KeyLists, selection: TokenSelection, entries: int, cache: LaunchCache, rows: int = 0) -> Shares:
    """Lists in shares of at most this many queries, for parts of ``rows`` tokens; 0: all tokens are one part."""
    total, kv_heads, slots = selection.indices.shape
    count, parts = lists.starts.shape[0] - 1, -(-total // rows) if rows else 1
    edges = lists.starts.new_empty((parts + 1, count))
    tensors = {"edges": edges, "starts": lists.starts}
    if parts > 1:
        own = {"part_rows": rows, "n_edges": edges.numel(), "steps": total.bit_length(), "WIDTH": _EDGES}
        programs = triton.cdiv(edges.numel(), _EDGES)
        of_places = tensors | {"places": lists.places}
        launch(_edges_kernel, programs, of_places, lambda: selection.arguments | own, _SORT, cache, ("edges", rows))
        tensors = {"edges": edges}
    most = kv_heads * min(rows or total, total) * slots // entries + count
    made = Shares(edges.new_empty((parts, most)), torch.empty_like(edges[:parts]), edges, entries)
    if parts == 1:
        made = made._replace(slot=edges.new_empty(count))
    facts = {"n_lists": count, "programs": most, "share_entries": entries, "WIDTH": _LISTS}
    launch(_shares_kernel, parts, made.tensors | tensors, lambda: facts, _SORT, cache, ("shares", entries, rows))
    return made


@triton.jit(do_not_specialize=("n_lists", "programs", "share_entries"))
def _shares_kernel(
    starts_ptr,
    edges_ptr,
    lists_ptr,
    share_ptr,
    slot_ptr,
    n_lists,
    programs,
    share_entries,
    WIDTH: tl.constexpr,
):
    # A program has a part of the tokens. With starts_ptr there is one part, whose edges are written, too.
    part = tl.program_id(0).to(tl.int64)
    edges_ptr += part * n_lists
    share_ptr += part * n_lists
    lists_ptr += part * programs
    shares, slots = 0, 0
    for first in range(0, n_lists, WIDTH):
        number = first + tl.arange(0, WIDTH)
        there = number < n_lists
        if starts_ptr is not None:
            begin, end = tl.load(starts_ptr + number, there, 0), tl.load(starts_ptr + number + 1, there, 0)
            tl.store(edges_ptr + number, begin, there)
            tl.store(edges_ptr + n_lists + number, end, there)
        else:
            begin, end = tl.load(edges_ptr + number, there, 0), tl.load(edges_ptr + n_lists + number, there, 0)
        count = (end - begin + share_entries - 1) // share_entries
        before = shares + tl.cumsum(count, 0) - count
        tl.store(share_ptr + number, before, there)
        if slot_ptr is not None:
            several = tl.where(count > 1, count, 0)
            taken = slots + tl.cumsum(several, 0) - several
            tl.store(slot_ptr + number, tl.where(count == 1, -1, taken), there)
            slots += tl.sum(several, 0)
        for share in range(tl.max(count, 0)):
            tl.store(lists_ptr + before + share, number, share < count)
        shares += tl.sum(count, 0)
    for first in range(shares, programs, WIDTH):
        at = first + tl.arange(0, WIDTH)
        tl.store(lists_ptr + at, tl.zeros([WIDTH], tl.int32) + n_lists, at < programs)


@triton.jit(do_not_specialize=(*PER_SELECTION, "part_rows", "n_edges", "steps"))
def _edges_kernel(
    places_ptr,
    starts_ptr,
    edges_ptr,
    rows,
    n_blocks,
    n_kv_heads,
    part_rows,
    n_edges,
    steps,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    # By bisection: the first place in a list that belongs to a token of a part, or to a later one.
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    there = at < n_edges
    part, number = at // (n_kv_heads * n_blocks), at % (n_kv_heads * n_blocks)
    low, high = tl.load(starts_ptr + number), tl.load(starts_ptr + number + 1)
    wanted = (number // n_blocks * rows + tl.minimum(part * part_rows, rows)) * SLOTS
    for _ in range(steps):
        middle = (low + high) // 2
        earlier = tl.load(places_ptr + middle, there & (low < high), 2147483647) < wanted
        low = tl.where(earlier, middle + 1, low)
        high = tl.where(earlier, high, middle)
    tl.store(edges_ptr + at, low, there)


def _launch(
    selection: TokenSelection,
    results: dict[str, Tensor],
    queries: int,
    cache: LaunchCache,
    name: Hashable,
    tile_step: int = 1,
) -> None:
    rows, kv_heads, slots = selection.indices.shape
    width = max(2, triton.next_power_of_2(queries * slots))
    lists = max(1, _ELEMENTS // width)
    programs = triton.cdiv(triton.cdiv(rows, queries * tile_step) * kv_heads, lists)
    tensors = {"indices": selection.indices, **results, **selection.tensors}
    own = {"QUERIES": queries, "LISTS": lists, "WIDTH": width, "tile_step": tile_step}
    launch(_lists_kernel, programs, tensors, lambda: selection.arguments | own, _SORT, cache, name)
