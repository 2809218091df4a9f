# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""The gathered form: tiles of queries that selected one block, whose partial results are then merged token by token.

A share of a block's list is a program's work. Rows of a tile are (list entry, query head of the group), in this order.
A block that fits one tile of keys stays in memory for all tiles of queries; for a longer block each tile of queries
walks over its keys. Each selected block of a token has its own partial result, so no two programs write the same memory
and the merge adds in a fixed order.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dilabench.kernels.bwd_preprocess import STATS_BLOCK
from dilabench.kernels.launch_cache import LaunchCache
from dilabench.kernels.row_programs import row_program
from dilabench.kernels.selected.by_query import lse_at, stats_at
from dilabench.kernels.selected.lists import KeyLists, Shares
from dilabench.kernels.selected.operands import PER_LENGTH, launch
from dilabench.kernels.selected.selection import TokenSelection, load_rows, rows_of_block, tile_at
from dilabench.kernels.softmax import finite
from dilabench.kernels.tuning import TileConfig

_STATS_BLOCK = tl.constexpr(STATS_BLOCK)
# A pass over memory, which has no tiles.
_MERGE = TileConfig(0, 0, 4, 1)


@triton.jit
def share_of_list(share, number, share_ptr, edges_ptr, n_lists, share_entries):
    """(first entry of a share, how many it has, how many of its list precede it), in the part of the tokens at whose
    lists the addresses begin.
    """
    start = tl.load(edges_ptr + number)
    before = (share - tl.load(share_ptr + number)) * share_entries
    return start + before, tl.minimum(share_entries, tl.load(edges_ptr + n_lists + number) - start - before), before


@triton.jit
def rows_of_entries(places_ptr, tile, entries, first_entry, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """(place, head in the group, whether there is one) of the rows of a tile of (entry, head)."""
    number = tile * ROWS + tl.arange(0, ROWS)
    entry = number // GROUP
    there = entry < entries
    return tl.load(places_ptr + first_entry + entry, there, 0), number % GROUP, there


@triton.jit
def token_of_place(place, kv_head, key_rows, there, SLOTS: tl.constexpr):
    """The token of a place in `lists.KeyLists`; the first one where there is none."""
    return tl.where(there, place // SLOTS - kv_head * key_rows, 0)


@triton.jit
def _last_of_block(token, end, there, right, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """The last key row of a block that rows see; of rows without a query the last one."""
    last = tl.zeros_like(token) + (end - 1)
    if CAUSAL:
        last = tl.where(there, tl.minimum(token, end - 1), last)
    elif WINDOWED:
        last = tl.where(there, tl.minimum(token + right, end - 1), last)
    return last


@triton.jit
def keys_seen(key, first, last, WINDOWED: tl.constexpr):
    """[rows, keys]: whether a row sees a key, from the first to the last of its window."""
    seen = key[None, :] <= last[:, None]
    if WINDOWED:
        seen = seen & (key[None, :] >= first[:, None])
    return seen


@triton.jit
def _add_keys(q, k, v, top, total, acc, seen, scale_log2, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """A step of the running softmax over a tile of keys."""
    logits = tl.dot(q, k.T, input_precision=PRECISION)
    if MASKED:
        logits = tl.where(seen, logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1) * scale_log2)
    safe_top = finite(new_top) if MASKED else new_top
    p = tl.math.exp2(logits * scale_log2 - safe_top[:, None])
    decay = tl.math.exp2(top - safe_top)
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return new_top, total * decay + tl.sum(p, 1), acc


@triton.jit
def _add_gradient(q, dout, k, v, dq, log2_lse, delta, seen, scale_log2, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """dQ / scale with that of a tile of keys."""
    logits = tl.dot(q, k.T, input_precision=PRECISION)
    if MASKED:
        logits = tl.where(seen, logits, float("-inf"))
    p = tl.math.exp2(logits * scale_log2 - log2_lse[:, None])
    ds = p * (tl.dot(dout, v.T, input_precision=PRECISION) - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=PER_LENGTH)
def _gathered_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    partial_ptr,
    partial_lse_ptr,
    stats_ptr,
    places_ptr,
    lists_ptr,
    share_ptr,
    edges_ptr,
    bounds_ptr,
    scale,
    scale_log2,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    dout_token,
    dout_head,
    rows,
    first_row,
    length,
    blocks_each,
    n_blocks,
    n_kv_heads,
    n_heads,
    key_rows,
    part,
    left,
    right,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    GROUP: tl.constexpr,
    ENTRIES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Forward, or of the backward pass dQ, if there is a dout.
    share, n_lists = tl.program_id(0), n_kv_heads * n_blocks
    number = tl.load(lists_ptr + part * tl.num_programs(0) + share)
    if number >= n_lists:
        return
    share_ptr += part * n_lists
    edges_ptr += part * n_lists
    first_entry, entries, _ = share_of_list(share, number, share_ptr, edges_ptr, n_lists, ENTRIES)
    kv_head = number // n_blocks
    # Places of another key/value head, or before this part, have no partial result here.
    others = (kv_head * (key_rows - rows) + first_row) * SLOTS
    first, end = rows_of_block(bounds_ptr, number % n_blocks, length, blocks_each, BLOCK)
    WHOLE: tl.constexpr = BLOCK <= KEYS
    key = first + tl.arange(0, KEYS)
    if WHOLE:
        k = load_rows(k_ptr, key, k_token, kv_head, k_head, key < end, UNIT, HEAD_DIM, DIM, WIDE)
        v = load_rows(v_ptr, key, v_token, kv_head, v_head, key < end, UNIT, HEAD_DIM, DIM, WIDE)
    column = tl.arange(0, DIM)
    for tile in tl.range(0, tl.cdiv(entries * GROUP, ROWS), num_stages=STAGES if WHOLE else 1):
        place, head, there = rows_of_entries(places_ptr, tile, entries, first_entry, GROUP, ROWS)
        token = token_of_place(place, kv_head, key_rows, there, SLOTS)
        last = _last_of_block(token, end, there, right, CAUSAL, WINDOWED)
        window_first = tl.where(there, token - left, 0) if WINDOWED else last
        partial_row = (place - others).to(tl.int64) * GROUP + head
        head += kv_head * GROUP
        q = load_rows(q_ptr, token, q_token, head, q_head, there, UNIT, HEAD_DIM, DIM, WIDE)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        result = tl.zeros([ROWS, DIM], tl.float32)
        dout, log2_lse, delta = q, top, total
        if dout_ptr is not None:
            dout = load_rows(dout_ptr, token, dout_token, head, dout_head, there, UNIT, HEAD_DIM, DIM, WIDE)
            stats = stats_at(stats_ptr, token, head, n_heads, WIDE)
            log2_lse, delta = tl.load(stats, there, 0.0), tl.load(stats + _STATS_BLOCK, there, 0.0)
        if WHOLE:
            seen = keys_seen(key, window_first, last, WINDOWED)
            if dout_ptr is None:
                top, total, result = _add_keys(q, k, v, top, total, result, seen, scale_log2, True, PRECISION)
            else:
                result = _add_gradient(q, dout, k, v, result, log2_lse, delta, seen, scale_log2, True, PRECISION)
        else:
            # Tiles of keys that all rows see wholly, and the others that any row sees.
            n_hidden = 0
            n_full = (tl.min(last, 0) + 1 - first) // KEYS
            if WINDOWED:
                n_hidden = tl.maximum(tl.min(window_first, 0) - first, 0) // KEYS
                n_full = n_hidden
            n_all = tl.cdiv(tl.max(last, 0) + 1 - first, KEYS)
            for masked in tl.static_range(2):
                # Few tiles are cut: a second one in flight would take registers from the rest.
                for step in tl.range(
                    n_full if masked else n_hidden, n_all if masked else n_full, num_stages=1 if masked else STAGES
                ):
                    row = first + step * KEYS + tl.arange(0, KEYS)
                    keys = load_rows(k_ptr, row, k_token, kv_head, k_head, row < end, UNIT, HEAD_DIM, DIM, WIDE)
                    values = load_rows(v_ptr, row, v_token, kv_head, v_head, row < end, UNIT, HEAD_DIM, DIM, WIDE)
                    seen = keys_seen(row, window_first, last, WINDOWED)
                    if dout_ptr is None:
                        top, total, result = _add_keys(
                            q, keys, values, top, total, result, seen, scale_log2, masked, PRECISION
                        )
                    else:
                        result = _add_gradient(
                            q, dout, keys, values, result, log2_lse, delta, seen, scale_log2, masked, PRECISION
                        )
        if dout_ptr is None:
            result = result / total[:, None]
            tl.store(partial_lse_ptr + partial_row, top + tl.log2(total), there)
        else:
            result = result * scale
        at = partial_ptr + partial_row[:, None] * HEAD_DIM + column[None, :]
        tl.store(at, result.to(partial_ptr.dtype.element_ty), there[:, None] & (column < HEAD_DIM)[None, :])


@triton.jit(do_not_specialize=PER_LENGTH)
def _merge_kernel(
    partial_ptr,
    partial_lse_ptr,
    counts_ptr,
    result_ptr,
    lse_ptr,
    rows,
    first_row,
    length,
    n_kv_heads,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    # Rows (token, head) of a key/value head's group; with the weights of lse, or a sum, if there is none.
    kv_head = tl.program_id(0) % n_kv_heads
    number = tl.program_id(0) // n_kv_heads * ROWS + tl.arange(0, ROWS)
    row, head = number // GROUP, number % GROUP
    there = row < rows
    token = first_row + row
    count = tl.load(counts_ptr + token * n_kv_heads + kv_head, there, 0)
    partial_row = (kv_head * rows + row).to(tl.int64) * (SLOTS * GROUP) + head
    head = kv_head * GROUP + head
    column = tl.arange(0, DIM)
    inside = (column < HEAD_DIM)[None, :]
    top = tl.zeros([ROWS], tl.float32)
    if partial_lse_ptr is not None:
        slot = tl.arange(0, WIDTH)[None, :]
        lse = tl.load(partial_lse_ptr + partial_row[:, None] + slot * GROUP, slot < count[:, None], float("-inf"))
        top = finite(tl.max(lse, 1))
        total = tl.sum(tl.math.exp2(lse - top[:, None]), 1)
    result = tl.zeros([ROWS, DIM], tl.float32)
    # Several reads in flight: nothing else hides how long one takes.
    for slot in tl.range(0, tl.max(count, 0), loop_unroll_factor=4):
        read = slot < count
        at = partial_row + slot * GROUP
        part = tl.load(partial_ptr + at[:, None] * HEAD_DIM + column[None, :], read[:, None] & inside, 0.0)
        part = part.to(tl.float32)
        if partial_lse_ptr is not None:
            part *= tl.math.exp2(tl.load(partial_lse_ptr + at, read, float("-inf")) - top)[:, None]
        result += part
    n_heads = n_kv_heads * GROUP
    if partial_lse_ptr is not None:
        result *= tl.where(total == 0.0, 0.0, 1.0 / total)[:, None]
        tl.store(lse_at(lse_ptr, token, head, length, n_heads), (top + tl.log2(total)) * 0.6931471805599453, there)
    at = tile_at(result_ptr, token, n_heads * HEAD_DIM, head, HEAD_DIM, 1, DIM)
    tl.store(at, result.to(result_ptr.dtype.element_ty), there[:, None] & inside)


def keys_of_tile(block: int, tiles: TileConfig) -> int:
    """How many keys a tile has: the whole block where it fits, in a power of two."""
    return 1 << (block - 1).bit_length() if block <= tiles.block_n else tiles.block_n


class GatheredPart(NamedTuple):
    """A part of the tokens, by its number in the shares of a list, and the tables that its launches read.

    slots: (K, tokens, S). programs: of the first launch. names: of both launches, whatever tensors they are given.
    """

    selection: TokenSelection
    number: int
    entries: int
    slots: tuple[int, int, int]
    programs: int
    tables: dict[str, Tensor]
    names: tuple[Hashable, Hashable]

    @classmethod
    def of(cls, part: TokenSelection, number: int, lists: KeyLists, shares: Shares) -> GatheredPart:
        """A part of the tokens over the lists of all tokens."""
        rows, kv_heads, slots = part.indices.shape
        tables = {"places": lists.places, "counts": lists.counts} | shares.tensors | part.tensors
        name = part.first_row, part.rows, shares.entries
        names = ("gathered", *name), ("merge", *name)
        return cls(part, number, shares.entries, (kv_heads, rows, slots), shares.lists.shape[1], tables, names)


def gathered_form(
    tensors: dict[str, Tensor], given: dict[str, Any], part: GatheredPart, tiles: TileConfig, cache: LaunchCache
) -> None:
    """Write the partial results of a part of the tokens and merge them to its rows of ``result`` [T, H, D].

    ``tensors``: operands, results, `GatheredPart.tables`, and ``partial`` [K, tokens, S, G, D]. Forward: also
    ``partial_lse`` [K, tokens, S, G] float32, which is lse * log2(e), and ``lse`` [B, H, N].
    """
    kv_heads, rows, slots = part.slots

    def arguments() -> dict[str, Any]:
        own = {"part": part.number, "ENTRIES": part.entries}
        keys = keys_of_tile(part.selection.block, tiles)
        return given | part.selection.arguments | own | {"ROWS": tiles.block_m, "KEYS": keys}

    def of_merge() -> dict[str, Any]:
        return arguments() | {"WIDTH": triton.next_power_of_2(slots), "ROWS": at_a_time}

    launch(_gathered_kernel, part.programs, tensors, arguments, tiles, cache, part.names[0])
    at_a_time = row_program("combine", given["DIM"]).rows
    programs = -(-rows * given["GROUP"] // at_a_time) * kv_heads
    launch(_merge_kernel, programs, tensors, of_merge, _MERGE, cache, part.names[1])
