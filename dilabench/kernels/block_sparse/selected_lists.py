# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""The kernels that make lists of tiles from indices of selected key blocks, in one launch for the forward pass.

A selection is new in every call of a model, so its lists are part of the cost of attention: a sort of all pairs takes
more than a tenth of the attention itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dilabench.kernels.block_sparse.lists import COUNTED_ONCE, QueryLists, Selection, TileLists
from dilabench.kernels.launch_cache import launch_once

# Words of 32 query blocks that a program of the lists by key looks at together: with more, or with more than a warp,
# its sums over them take longer (0.16 against 0.20 to 0.28 ms for 7 x 1713 lists of 64, H200).
_WORDS = 4
# As PER_LENGTH of the other kernels: values that change with a sequence or a selection cause no compilation.
_PER_LENGTH = ("blocks", "width", "words", "tiles", "rows", "left", "right")
_ONCE = tl.constexpr(COUNTED_ONCE)


@triton.jit
def _seen(query, key, listed, rows, left, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """For listed pairs of tiles: whether some, and whether all of their pairs of rows are visible."""
    low, key_low = query * BLOCK_M, key * BLOCK_N
    high, key_high = tl.minimum(low + BLOCK_M, rows) - 1, tl.minimum(key_low + BLOCK_N, rows) - 1
    some = listed & (key_low < rows) & (low < rows)
    whole = some & (key_low + BLOCK_N <= rows)
    if right >= 0:
        some = some & (key_low <= high + right)
        whole = whole & (key_high <= low + right)
    if left >= 0:
        some = some & (key_high >= low - left)
        whole = whole & (key_low >= high - left)
    return some & ~whole, whole


@triton.jit
def _store_span(span_ptr, first, n_whole, n_partly):
    """The start of a list, and its numbers of wholly and partly visible tiles."""
    tl.store(span_ptr, first)
    tl.store(span_ptr + 1, n_whole)
    tl.store(span_ptr + 2, n_partly)


@triton.jit(do_not_specialize=_PER_LENGTH)
def _by_query_kernel(
    indices_ptr,
    items_ptr,
    entries_ptr,
    blocks,
    width,
    tiles,
    rows,
    left,
    right,
    WIDTH: tl.constexpr,
    QUERY_TILES: tl.constexpr,
    KEY_TILES: tl.constexpr,
    SPREAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    head, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    place = tl.arange(0, WIDTH)
    index = tl.load(indices_ptr + (head * blocks + tile // QUERY_TILES) * width + place, place < width, -1).to(tl.int32)
    index = tl.sort(tl.where((index >= 0) & (index < blocks), index, blocks))
    before = tl.gather(index, tl.maximum(place - 1, 0), 0)
    listed = (index < blocks) & ((place == 0) | (index != before))
    inside = tl.arange(0, SPREAD)[None, :]
    key = tl.reshape(index[:, None] * KEY_TILES + inside, [WIDTH * SPREAD])
    listed = tl.reshape(listed[:, None] & (inside < KEY_TILES), [WIDTH * SPREAD])
    partly, whole = _seen(tile, key, listed, rows, left, right, BLOCK_M, BLOCK_N)
    n_whole, n_partly = tl.sum(whole.to(tl.int32), 0), tl.sum(partly.to(tl.int32), 0)
    at = tl.where(whole, tl.cumsum(whole.to(tl.int32), 0), n_whole + tl.cumsum(partly.to(tl.int32), 0)) - 1
    first = tl.program_id(0) * width * KEY_TILES
    tl.store(entries_ptr + first + at, key | _ONCE, whole | partly)
    # Behind a causal edge later rows can see more blocks.
    place = tl.where(right >= 0, tiles - 1 - tile, tile)
    item_ptr = items_ptr + 5 * (head * tiles + place)
    tl.store(item_ptr, 0)
    tl.store(item_ptr + 1, tile)
    _store_span(item_ptr + 2, first, n_whole, n_partly)


@triton.jit(do_not_specialize=_PER_LENGTH)
def _mark_kernel(indices_ptr, bits_ptr, blocks, width, words, WIDTH: tl.constexpr):
    """Bit i of the words of (head, key block): block i of queries selected it."""
    head, query = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    place = tl.arange(0, WIDTH)
    index = tl.load(indices_ptr + (head * blocks + query) * width + place, place < width, -1).to(tl.int32)
    at = (head * blocks + index).to(tl.int64) * words + query // 32
    bit = tl.full([WIDTH], 1, tl.int32) << (query % 32)
    tl.atomic_or(bits_ptr + at, bit, (index >= 0) & (index < blocks), sem="relaxed")


@triton.jit
def _marked(bits_ptr, start, words, WORDS: tl.constexpr, QUERY_TILES: tl.constexpr, SPREAD: tl.constexpr):
    """Query tiles of `WORDS` words of bits, ascending, and which of them are listed."""
    size: tl.constexpr = WORDS * 32 * SPREAD
    place = tl.arange(0, size)
    block, inside = start * 32 + place // SPREAD, place % SPREAD
    bits = tl.load(bits_ptr + block // 32, block // 32 < words, 0)
    return block * QUERY_TILES + inside, (((bits >> (block % 32)) & 1) != 0) & (inside < QUERY_TILES)


@triton.jit(do_not_specialize=_PER_LENGTH)
def _by_key_kernel(
    bits_ptr,
    spans_ptr,
    counts_ptr,
    entries_ptr,
    used_ptr,
    blocks,
    words,
    tiles,
    rows,
    left,
    right,
    WORDS: tl.constexpr,
    QUERY_TILES: tl.constexpr,
    KEY_TILES: tl.constexpr,
    SPREAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    head, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    bits_ptr += (head * blocks + tile // KEY_TILES).to(tl.int64) * words
    n_whole, n_partly = 0, 0
    for start in range(0, words, WORDS):
        query, listed = _marked(bits_ptr, start, words, WORDS, QUERY_TILES, SPREAD)
        partly, whole = _seen(query, tile, listed, rows, left, right, BLOCK_M, BLOCK_N)
        n_whole += tl.sum(whole.to(tl.int32), 0)
        n_partly += tl.sum(partly.to(tl.int32), 0)
    # The place of a list depends on the order of programs; its content does not.
    first = tl.atomic_add(used_ptr, n_whole + n_partly, sem="relaxed")
    at_whole, at_partly = first - 1, first + n_whole - 1
    for start in range(0, words, WORDS):
        query, listed = _marked(bits_ptr, start, words, WORDS, QUERY_TILES, SPREAD)
        partly, whole = _seen(query, tile, listed, rows, left, right, BLOCK_M, BLOCK_N)
        own, other = whole.to(tl.int32), partly.to(tl.int32)
        at = tl.where(whole, at_whole + tl.cumsum(own, 0), at_partly + tl.cumsum(other, 0))
        tl.store(entries_ptr + at, query | _ONCE, whole | partly)
        at_whole += tl.sum(own, 0)
        at_partly += tl.sum(other, 0)
    _store_span(spans_ptr + 3 * tl.program_id(0), first, n_whole, n_partly)
    tl.store(counts_ptr + tl.program_id(0), n_whole + n_partly)


def lists_by_query(selection: Selection, block_m: int, block_n: int) -> QueryLists:
    """On the indices' device, later rows first behind a causal edge."""
    indices, block_size, seen = selection
    heads, blocks, width = indices.shape
    tiles = -(-seen.rows // block_m)
    key_tiles = block_size // block_n
    items = indices.new_empty((heads, tiles, 5), dtype=torch.int32)
    entries = indices.new_empty(heads * tiles * width * key_tiles, dtype=torch.int32)
    launch_once(
        _by_query_kernel,
        (heads * tiles,),
        indices.contiguous(),
        items,
        entries,
        blocks,
        width,
        tiles,
        seen.rows,
        seen.left,
        seen.ahead,
        WIDTH=max(2, triton.next_power_of_2(width)),
        QUERY_TILES=block_size // block_m,
        KEY_TILES=key_tiles,
        SPREAD=triton.next_power_of_2(key_tiles),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=4 if width > 128 else 1,
    )
    return QueryLists(items, entries)


def lists_by_key(selection: Selection, block_m: int, block_n: int) -> TileLists:
    """On the indices' device, the longest list first."""
    indices, block_size, seen = selection
    heads, blocks, width = indices.shape
    tiles = -(-seen.rows // block_n)
    query_tiles, key_tiles = block_size // block_m, block_size // block_n
    words = -(-blocks // 32)
    bits = indices.new_zeros(heads * blocks * words + 1, dtype=torch.int32)
    spans = indices.new_empty((heads, tiles, 3), dtype=torch.int32)
    counts = indices.new_empty((heads, tiles), dtype=torch.int32)
    entries = indices.new_empty(heads * blocks * width * query_tiles * key_tiles, dtype=torch.int32)
    launch_once(
        _mark_kernel,
        (heads * blocks,),
        indices.contiguous(),
        bits,
        blocks,
        width,
        words,
        WIDTH=max(2, triton.next_power_of_2(width)),
        num_warps=1,
    )
    launch_once(
        _by_key_kernel,
        (heads * tiles,),
        bits,
        spans,
        counts,
        entries,
        bits[-1:],
        blocks,
        words,
        tiles,
        seen.rows,
        seen.left,
        seen.ahead,
        WORDS=max(1, min(_WORDS, triton.next_power_of_2(words)) // triton.next_power_of_2(query_tiles)),
        QUERY_TILES=query_tiles,
        KEY_TILES=key_tiles,
        SPREAD=triton.next_power_of_2(query_tiles),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=1,
    )
    return TileLists(spans, entries, counts.argsort(dim=1, descending=True, stable=True).int())
