# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""dK and dV of blocks: a program has a tile of keys and walks over the queries that selected their block.

A list that is far longer than others is shared by several programs. Each writes its sums in float32 to a slot of its
own, and a second kernel adds them in order: no atomics, so the result has the same bits from call to call.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilabench.kernels.bwd_preprocess import STATS_BLOCK
from dilabench.kernels.launch_cache import LaunchCache
from dilabench.kernels.selected import tiles as tuned
from dilabench.kernels.selected.by_query import stats_at
from dilabench.kernels.selected.gathered import keys_of_tile, rows_of_entries, share_of_list, token_of_place
from dilabench.kernels.selected.lists import KeyLists, Shares
from dilabench.kernels.selected.operands import PER_LENGTH, launch
from dilabench.kernels.selected.selection import TokenSelection, load_rows, rows_of_block, tile_at
from dilabench.kernels.tuning import TileConfig

_STATS_BLOCK = tl.constexpr(STATS_BLOCK)


@triton.jit
def _store(dk, dv, dk_ptr, dv_ptr, row, end, kv_head, scale, n_kv_heads, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    inside = (row < end)[:, None] & (tl.arange(0, DIM) < HEAD_DIM)[None, :]
    step = n_kv_heads * HEAD_DIM
    dk_at = tile_at(dk_ptr, row, step, kv_head, HEAD_DIM, 1, DIM)
    tl.store(dk_at, (dk * scale).to(dk_ptr.dtype.element_ty), inside)
    tl.store(tile_at(dv_ptr, row, step, kv_head, HEAD_DIM, 1, DIM), dv.to(dv_ptr.dtype.element_ty), inside)


@triton.jit
def _slots_of_list(slots_ptr, slot, tile, KEYS: tl.constexpr, TILES: tl.constexpr, DIM: tl.constexpr):
    """Addresses [KEYS, DIM] of the sums of dK / scale of a slot and a tile of keys, and one tile later of dV."""
    at = (slot * TILES + tile).to(tl.int64) * (2 * KEYS * DIM)
    return slots_ptr + at + tl.arange(0, KEYS)[:, None] * DIM + tl.arange(0, DIM)[None, :]


@triton.jit(do_not_specialize=PER_LENGTH)
def _key_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    dk_ptr,
    dv_ptr,
    slots_ptr,
    stats_ptr,
    places_ptr,
    lists_ptr,
    share_ptr,
    edges_ptr,
    slot_ptr,
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
    length,
    blocks_each,
    n_blocks,
    n_kv_heads,
    n_heads,
    key_rows,
    share_entries,
    left,
    right,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Tiles of one block follow each other, so that the queries of its list are in the L2 cache.
    TILES: tl.constexpr = (BLOCK + KEYS - 1) // KEYS
    share, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    number = tl.load(lists_ptr + share)
    if number >= n_kv_heads * n_blocks:
        return
    first_entry, entries, before = share_of_list(
        share, number, share_ptr, edges_ptr, n_kv_heads * n_blocks, share_entries
    )
    kv_head = number // n_blocks
    first, end = rows_of_block(bounds_ptr, number % n_blocks, length, blocks_each, BLOCK)
    key = first + tile * KEYS + tl.arange(0, KEYS)
    k = load_rows(k_ptr, key, k_token, kv_head, k_head, key < end, UNIT, HEAD_DIM, DIM, WIDE)
    v = load_rows(v_ptr, key, v_token, kv_head, v_head, key < end, UNIT, HEAD_DIM, DIM, WIDE)
    dk = tl.zeros([KEYS, DIM], tl.float32)
    dv = tl.zeros([KEYS, DIM], tl.float32)
    n_all = tl.cdiv(entries * GROUP, ROWS)
    # Causal queries that do not see the whole block are its own tokens: no more than it has, and first in the list.
    n_masked = 0
    if WINDOWED:
        n_masked = n_all
    elif CAUSAL:
        n_masked = tl.cdiv(tl.minimum(entries, tl.maximum(BLOCK - before, 0)) * GROUP, ROWS)
    for masked in tl.static_range(1 if CAUSAL or WINDOWED else 0, -1, -1):
        # Few tiles are masked: a second one in flight would take registers from the rest.
        for step in tl.range(
            0 if masked else n_masked, n_masked if masked else n_all, num_stages=1 if masked else STAGES
        ):
            place, head, there = rows_of_entries(places_ptr, step, entries, first_entry, GROUP, ROWS)
            token = token_of_place(place, kv_head, key_rows, there, SLOTS)
            head += kv_head * GROUP
            q = load_rows(q_ptr, token, q_token, head, q_head, there, UNIT, HEAD_DIM, DIM, WIDE)
            dout = load_rows(dout_ptr, token, dout_token, head, dout_head, there, UNIT, HEAD_DIM, DIM, WIDE)
            stats = stats_at(stats_ptr, token, head, n_heads, WIDE)
            # exp2(x - inf) is 0: a row without a query adds nothing.
            log2_lse = tl.load(stats, there, float("inf"))
            delta = tl.load(stats + _STATS_BLOCK, there, 0.0)
            logits = tl.dot(k, q.T, input_precision=PRECISION)
            if masked:
                seen = key[:, None] <= (token if CAUSAL else token + right)[None, :]
                if WINDOWED:
                    seen = seen & (key[:, None] >= (token - left)[None, :])
                logits = tl.where(seen, logits, float("-inf"))
            p = tl.math.exp2(logits * scale_log2 - log2_lse[None, :])
            dp = tl.dot(v, dout.T, input_precision=PRECISION)
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    slot = tl.load(slot_ptr + number)
    if slot < 0:
        _store(dk, dv, dk_ptr, dv_ptr, key, end, kv_head, scale, n_kv_heads, HEAD_DIM, DIM)
    else:
        at = _slots_of_list(slots_ptr, slot + before // share_entries, tile, KEYS, TILES, DIM)
        tl.store(at, dk)
        tl.store(at + KEYS * DIM, dv)


@triton.jit(do_not_specialize=PER_LENGTH)
def _sum_kernel(
    dk_ptr,
    dv_ptr,
    slots_ptr,
    edges_ptr,
    slot_ptr,
    bounds_ptr,
    scale,
    length,
    blocks_each,
    n_blocks,
    n_kv_heads,
    share_entries,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    TILES: tl.constexpr = (BLOCK + KEYS - 1) // KEYS
    number, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    slot = tl.load(slot_ptr + number)
    if slot >= 0:
        edges_ptr += number
        shares = tl.cdiv(tl.load(edges_ptr + n_kv_heads * n_blocks) - tl.load(edges_ptr), share_entries)
        dk = tl.zeros([KEYS, DIM], tl.float32)
        dv = tl.zeros([KEYS, DIM], tl.float32)
        for share in range(shares):
            at = _slots_of_list(slots_ptr, slot + share, tile, KEYS, TILES, DIM)
            dk += tl.load(at)
            dv += tl.load(at + KEYS * DIM)
        first, end = rows_of_block(bounds_ptr, number % n_blocks, length, blocks_each, BLOCK)
        key = first + tile * KEYS + tl.arange(0, KEYS)
        _store(dk, dv, dk_ptr, dv_ptr, key, end, number // n_blocks, scale, n_kv_heads, HEAD_DIM, DIM)


def key_gradients(
    tensors: dict[str, Tensor],
    given: dict[str, Any],
    selection: TokenSelection,
    lists: KeyLists,
    shares: Shares,
    tiles: TileConfig,
    cache: LaunchCache,
) -> None:
    """Write ``dk`` and ``dv`` [T, K, D] of ``tensors``; ``given``: `operands.operand_arguments`; shares of one part."""
    keys = keys_of_tile(selection.block, tiles)
    key_tiles = -(-selection.block // keys)
    # A list in several shares has more than half of `entries` in each, in the mean.
    slots = max(1, 2 * lists.places.shape[0] // shares.entries)
    sums = tensors["k"].new_empty((slots, key_tiles, 2, keys, given["DIM"]), dtype=torch.float32)
    own = tensors | {"places": lists.places, "slots": sums} | shares.tensors | selection.tensors

    def facts() -> dict[str, Any]:
        return given | selection.arguments | {"share_entries": shares.entries, "ROWS": tiles.block_m, "KEYS": keys}

    launch(_key_kernel, shares.lists.numel() * key_tiles, own, facts, tiles, cache, ("by key", shares.entries))
    launch(_sum_kernel, (lists.starts.shape[0] - 1) * key_tiles, own, facts, tiles, cache, ("sums", shares.entries))


def entries_of_share(indices: int, block: int, group: int, tiles: TileConfig) -> int:
    """How many queries of a list a program takes at most: enough programs for a GPU, and enough steps for each.

    indices: how many a selection has.
    """
    key_tiles = triton.cdiv(block, keys_of_tile(block, tiles))
    steps = indices * group * key_tiles // (tiles.block_m * tuned.SHARING_PROGRAMS)
    return max(1, max(tuned.LEAST_SHARED_STEPS, steps) * tiles.block_m // group)
