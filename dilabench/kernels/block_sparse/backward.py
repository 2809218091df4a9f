# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""Backward of block-sparse attention: dQ by query tiles, dK and dV by key tiles; no atomics, so it is deterministic.

On a Hopper GPU one kernel does both (`backward_sm90`) where that is faster and nobody asked torch for deterministic
algorithms. All rebuild p = exp(scale * q.k - lse) from a *given* lse, which may be that of a larger softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilabench.kernels.block_sparse.backward_sm90 import backward_tiles, run_backward
from dilabench.kernels.block_sparse.forward import (
    check,
    head_rows,
    key_bounds,
    launch_arguments,
    visible_pairs,
)
from dilabench.kernels.block_sparse.key_items import KeyItems, add_slots, slot_places
from dilabench.kernels.block_sparse.plan import Plan
from dilabench.kernels.bwd_preprocess import STATS_BLOCK, StatsLayout, bwd_preprocess, stats_places
from dilabench.kernels.dq_accumulate import dq_accumulator
from dilabench.kernels.fused.row_layout import PER_LENGTH
from dilabench.kernels.launch_cache import Launch
from dilabench.kernels.tuning import TileConfig, padded_dim

_LOG2E = 1.4426950408889634
_STATS_BLOCK = tl.constexpr(STATS_BLOCK)


@triton.jit(do_not_specialize=PER_LENGTH)
def _block_query_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    dq_desc,
    stats_ptr,
    spans_ptr,
    entries_ptr,
    order_ptr,
    bounds_ptr,
    scale,
    scale_log2,
    n_heads,
    heads_per_kv,
    heads_per_mask,
    n_tiles,
    stats_blocks,
    key_rows,
    left,
    right,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    RANGES: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    pid = tl.program_id(0)
    batch = pid // n_tiles // n_heads
    head = pid // n_tiles % n_heads
    mask_head = head // heads_per_mask
    tile = tl.load(order_ptr + mask_head * n_tiles + pid % n_tiles)
    span_ptr = spans_ptr + (mask_head * n_tiles + tile) * 3
    entry_ptr = entries_ptr + tl.load(span_ptr)
    n_full = tl.load(span_ptr + 1)
    n_partly = tl.load(span_ptr + 2)
    kv_head = head // heads_per_kv

    q = q_desc.load([batch, head, tile * BLOCK_M, 0]).reshape([BLOCK_M, DIM])
    dout = dout_desc.load([batch, head, tile * BLOCK_M, 0]).reshape([BLOCK_M, DIM])
    query_row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    stats_at = (batch * n_heads + head).to(tl.int64) * (stats_blocks * (2 * _STATS_BLOCK))
    stats = stats_ptr + stats_at + stats_places(query_row)
    log2_lse, delta = tl.load(stats), tl.load(stats + _STATS_BLOCK)
    dq = tl.zeros([BLOCK_M, DIM], tl.float32)
    for _ in tl.range(0, n_full, num_stages=STAGES):
        key = tl.load(entry_ptr) * BLOCK_N
        entry_ptr += 1
        k = k_desc.load([batch, kv_head, key, 0]).reshape([BLOCK_N, DIM])
        v = v_desc.load([batch, kv_head, key, 0]).reshape([BLOCK_N, DIM])
        logits = tl.dot(q, k.T, input_precision=PRECISION)
        dp = tl.dot(dout, v.T, input_precision=PRECISION)
        p = tl.math.exp2(logits * scale_log2 - log2_lse[:, None])
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    for _ in tl.range(0, n_partly, num_stages=STAGES):
        key = tl.load(entry_ptr) * BLOCK_N
        entry_ptr += 1
        k = k_desc.load([batch, kv_head, key, 0]).reshape([BLOCK_N, DIM])
        v = v_desc.load([batch, kv_head, key, 0]).reshape([BLOCK_N, DIM])
        logits = tl.dot(q, k.T, input_precision=PRECISION)
        dp = tl.dot(dout, v.T, input_precision=PRECISION)
        key_row = (key + tl.arange(0, BLOCK_N))[None, :]
        bounds = key_bounds(bounds_ptr, key_row, key_rows, RANGES)
        seen = (key_row < key_rows) & visible_pairs(
            query_row[:, None], key_row, left, right, bounds, LEFT, RIGHT, RANGES
        )
        p = tl.where(seen, tl.math.exp2(logits * scale_log2 - log2_lse[:, None]), 0.0)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    dq = (dq * scale).to(dq_desc.dtype)
    dq_desc.store([batch, head, tile * BLOCK_M, 0], dq.reshape([1, 1, BLOCK_M, DIM]))


@triton.jit
def _query_tile(
    dk,
    dv,
    k,
    v,
    key_row,
    query,
    q_desc,
    dout_desc,
    stats_at,
    batch,
    head,
    scale_log2,
    left,
    right,
    bounds,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    RANGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk and dv with the share of one query tile added; with LEFT, RIGHT or RANGES, of its visible pairs only."""
    # A tile may reach past the last query: the statistics of those rows are infinity and 0, so that p = 0.
    query_row = query + tl.arange(0, BLOCK_M)
    q = q_desc.load([batch, head, query, 0]).reshape([BLOCK_M, DIM])
    stats = stats_at + query * 2
    log2_lse = tl.load(stats)
    logits = tl.dot(k, q.T, input_precision=PRECISION)
    dout = dout_desc.load([batch, head, query, 0]).reshape([BLOCK_M, DIM])
    p = tl.math.exp2(logits * scale_log2 - log2_lse[None, :])
    if LEFT or RIGHT or RANGES > 0:
        seen = visible_pairs(query_row[None, :], key_row, left, right, bounds, LEFT, RIGHT, RANGES)
        p = tl.where(seen, p, 0.0)
    delta = tl.load(stats + _STATS_BLOCK)
    dp = tl.dot(v, dout.T, input_precision=PRECISION)
    dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
    ds = p * (dp - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=PER_LENGTH)
def _block_key_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    dk_desc,
    dv_desc,
    slots_ptr,
    stats_ptr,
    spans_ptr,
    entries_ptr,
    items_ptr,
    bounds_ptr,
    scale,
    scale_log2,
    n_heads,
    heads_per_mask,
    n_tiles,
    n_items,
    n_slots,
    stats_blocks,
    key_rows,
    left,
    right,
    PER_HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    RANGES: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    pid = tl.program_id(0)
    n_kv_heads = n_heads // GROUP
    batch = pid // n_items // n_kv_heads
    kv_head = pid // n_items % n_kv_heads
    item_ptr = items_ptr + ((kv_head if PER_HEAD else 0) * n_items + pid % n_items) * 4
    tile = tl.load(item_ptr)
    if tile < 0:
        return
    low, high, slot = tl.load(item_ptr + 1), tl.load(item_ptr + 2), tl.load(item_ptr + 3)

    k = k_desc.load([batch, kv_head, tile * BLOCK_N, 0]).reshape([BLOCK_N, DIM])
    v = v_desc.load([batch, kv_head, tile * BLOCK_N, 0]).reshape([BLOCK_N, DIM])
    key_row = (tile * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    bounds = key_bounds(bounds_ptr, key_row, key_rows, RANGES)
    dk = tl.zeros([BLOCK_N, DIM], tl.float32)
    dv = tl.zeros([BLOCK_N, DIM], tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        span_ptr = spans_ptr + ((head // heads_per_mask) * n_tiles + tile) * 3
        first = entries_ptr + tl.load(span_ptr)
        n_full = tl.load(span_ptr + 1)
        n_listed = n_full + tl.load(span_ptr + 2)
        if not (LEFT or RIGHT or RANGES > 0):
            # Only the end of the keys cuts tiles, and gradients of rows past it are never stored.
            n_full = n_listed
        stats_at = (batch * n_heads + head).to(tl.int64) * (stats_blocks * (2 * _STATS_BLOCK))
        stats_at = stats_ptr + stats_at + stats_places(tl.arange(0, BLOCK_M))
        entry_ptr = first + low
        for _ in tl.range(low, tl.minimum(high, n_full), num_stages=STAGES):
            query = tl.load(entry_ptr) * BLOCK_M
            entry_ptr += 1
            dk, dv = _query_tile(
                dk,
                dv,
                k,
                v,
                key_row,
                query,
                q_desc,
                dout_desc,
                stats_at,
                batch,
                head,
                scale_log2,
                left,
                right,
                bounds,
                DIM,
                BLOCK_M,
                False,
                False,
                0,
                PRECISION,
            )
        if LEFT or RIGHT or RANGES > 0:
            # Not pipelined: such tiles are few, and with their masks a second one in flight would spill registers.
            entry_ptr = first + tl.maximum(low, n_full)
            for _ in tl.range(tl.maximum(low, n_full), tl.minimum(high, n_listed), num_stages=1):
                query = tl.load(entry_ptr) * BLOCK_M
                entry_ptr += 1
                dk, dv = _query_tile(
                    dk,
                    dv,
                    k,
                    v,
                    key_row,
                    query,
                    q_desc,
                    dout_desc,
                    stats_at,
                    batch,
                    head,
                    scale_log2,
                    left,
                    right,
                    bounds,
                    DIM,
                    BLOCK_M,
                    LEFT,
                    RIGHT,
                    RANGES,
                    PRECISION,
                )
    if slot >= 0:
        at = slot_places(slots_ptr, batch * n_kv_heads + kv_head, slot, n_slots, BLOCK_N, DIM)
        tl.store(at, dk)
        tl.store(at + BLOCK_N * DIM, dv)
    else:
        dk_desc.store([batch, kv_head, tile * BLOCK_N, 0], (dk * scale).to(dk_desc.dtype).reshape([1, 1, BLOCK_N, DIM]))
        dv_desc.store([batch, kv_head, tile * BLOCK_N, 0], dv.to(dv_desc.dtype).reshape([1, 1, BLOCK_N, DIM]))


def block_sparse_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: Plan,
    *,
    scale: float,
    query_config: TileConfig | None = None,
    key_config: TileConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` in the shapes and dtypes of q [B, N, H, D] and k, v [B, N, K, D] (or as many rows as the plan
    has keys); lse [B, H, N] float32.

    A row with lse -inf (it sees no key) has zero gradient. Raises ValueError on shapes that do not fit the plan.
    """
    at_once = None if query_config or key_config else backward_tiles(q, k, v, dout, plan)
    cache = plan.launch_cache("backward", dout, q, k, v, out, lse, scale, query_config, key_config, at_once)
    cache.once("checked", lambda: check(q, k, v, plan))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    tensors = {"q": q, "k": k, "v": v, "dout": dout, "dk": dk, "dv": dv}
    sums = dq_accumulator(q, k, at_once) if at_once else None
    if at_once and sums is not None:
        stats_layout = StatsLayout.of(q.shape[1], tile=at_once.block_m, block=at_once.block_m)
        tensors |= {
            "sums": sums,
            "stats": bwd_preprocess(out, dout, lse.contiguous(), stats_layout, cache, "blocks of sums"),
        }
        work, slots = _key_work(plan, at_once, q, k)
        run_backward(tensors, dq, slots, work, plan, scale, at_once, cache)
        add_slots(slots, work, dk, dv, scale)
        return dq, dk, dv
    batch, rows, num_heads, _ = q.shape
    dim, num_kv_heads = padded_dim(q.shape[-1]), k.shape[2]
    by_query = plan.config(dim, "backward_query", q.element_size(), query_config)
    by_key = plan.config(dim, "backward_key", q.element_size(), key_config)
    stats_layout = StatsLayout.of(rows, tile=max(by_query.block_m, by_key.block_m))
    stats = bwd_preprocess(out, dout, lse.contiguous(), stats_layout, cache, "row sums")
    work, slots = _key_work(plan, by_key, q, k)
    of_queries, of_keys = tensors | {"dq": dq, "stats": stats}, tensors | {"slots": slots, "stats": stats}

    def prepare() -> Iterator[Launch]:
        tiles = -(-rows // by_query.block_m)
        own = {"dq_desc": head_rows(dq, by_query.block_m), "heads_per_kv": num_heads // num_kv_heads, "n_tiles": tiles}
        shared = _arguments(of_queries, plan, scale, by_query, by_key=False)
        query_arguments = shared | own
        yield Launch(_block_query_kernel, lambda _: ((batch * num_heads * tiles,), query_arguments))
        sets, n_items, _ = work.items.shape
        own = {
            "dk_desc": head_rows(dk, by_key.block_n),
            "dv_desc": head_rows(dv, by_key.block_n),
            "slots_ptr": slots,
            "items_ptr": work.items,
            "n_tiles": -(-plan.keys // by_key.block_n),
            "n_items": n_items,
            "n_slots": work.slots,
            "PER_HEAD": sets > 1,
            "GROUP": num_heads // num_kv_heads,
        }
        shared = _arguments(of_keys, plan, scale, by_key, by_key=True)
        key_arguments = shared | own
        yield Launch(_block_key_kernel, lambda _: ((batch * num_kv_heads * n_items,), key_arguments))

    cache.launch("passes", [of_queries, of_keys], prepare)
    add_slots(slots, work, dk, dv, scale)
    return dq, dk, dv


def _key_work(plan: Plan, tiles: TileConfig, q: Tensor, k: Tensor) -> tuple[KeyItems, Tensor]:
    """The lists by key as work of programs, and room for the sums of tiles that several of them share."""
    batch, _, num_heads, dim = q.shape
    work = plan.key_items(tiles, num_heads, k.shape[2], q.device)
    shape = (batch * k.shape[2], work.slots, 2, tiles.block_n, padded_dim(dim))
    return work, q.new_empty(shape, dtype=torch.float32)


def _arguments(
    tensors: dict[str, Tensor], plan: Plan, scale: float, config: TileConfig, by_key: bool
) -> dict[str, Any]:
    """What both kernels are given."""
    rows = {"q": config.block_m, "k": config.block_n, "v": config.block_n, "dout": config.block_m}
    return launch_arguments(tensors["q"], plan, config, by_key) | {
        **{f"{name}_desc": head_rows(tensors[name], size) for name, size in rows.items()},
        "stats_ptr": tensors["stats"],
        "stats_blocks": tensors["stats"].shape[4],
        "scale": scale,
        "scale_log2": scale * _LOG2E,
    }
