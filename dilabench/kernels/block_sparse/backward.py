"""Backward of block-sparse attention through the kernels of dilated attention.

One is by query tiles (dQ), one by key tiles (dK and dV): no atomics, so it is deterministic. On a Hopper GPU one kernel
does both (`fused.sm90.backward`) if that is faster and torch is not set to deterministic algorithms. All rebuild p =
exp(scale * q.k - lse) from a *given* lse, which may belong to a larger softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dilabench.kernels.block_sparse.forward import (
    check,
    cut,
    kernel_arguments,
    padded,
    query_arguments,
    serves,
)
from dilabench.kernels.block_sparse.key_lists import KeyLists, add_slots
from dilabench.kernels.block_sparse.plan import Plan
from dilabench.kernels.bwd_preprocess import StatsLayout, bwd_preprocess
from dilabench.kernels.dq_accumulate import convert_dq, dq_accumulator
from dilabench.kernels.fused.backward import _key_kernel, _query_kernel
from dilabench.kernels.fused.row_layout import LOG2E, segment_arguments
from dilabench.kernels.launch_cache import Launch, LaunchCache
from dilabench.kernels.tuning import TileConfig, blocks_at_once_are_faster, padded_dim, select_kernel


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
    dim = q.shape[-1]
    dout, q, k, v, out = padded(dout, q, k, v, out)
    may_add = not torch.are_deterministic_algorithms_enabled()
    options = scale, query_config, key_config, may_add
    cache = plan.launch_cache("backward", (dout, q, k, v, out, lse), *options)
    cache.once("checked", lambda: check(q, k, v, plan))
    at_once = None
    if may_add and not (query_config or key_config):
        at_once = cache.once("at once", lambda: backward_tiles(q, k, v, dout, plan))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    tensors = {"q": q, "k": k, "v": v, "dout": dout, "dk": dk, "dv": dv}
    sums = dq_accumulator(q, k, at_once) if at_once else None
    if at_once and sums is not None:
        stats_layout = StatsLayout.of(q.shape[1], tile=at_once.block_m, block=at_once.block_m)
        stats = bwd_preprocess(out, dout, lse.contiguous(), stats_layout, cache, "blocks of sums")
        tensors |= {"sums": sums, "stats": stats}
        lists, slots = _key_lists(plan, at_once, q, k)
        _run_at_once(tensors | {"slots": slots}, dq, lists, plan, scale, at_once, cache)
    else:
        kind = q.shape[-1], q.element_size()
        by_query = cache.once("by query", lambda: plan.config(kind[0], "backward_query", kind[1], query_config))
        by_key = cache.once("by key", lambda: plan.config(kind[0], "backward_key", kind[1], key_config))
        stats_layout = StatsLayout.of(q.shape[1], tile=max(by_query.block_m, by_key.block_m))
        stats = bwd_preprocess(out, dout, lse.contiguous(), stats_layout, cache, "row sums")
        lists, slots = _key_lists(plan, by_key, q, k)
        tensors |= {"dq": dq, "slots": slots, "stats": stats}

        def prepare() -> Iterator[Launch]:
            yield _query_launch(tensors, plan, scale, by_query)
            yield _key_launch(tensors, lists, plan, scale, by_key)

        cache.launch("passes", [tensors] * 2, prepare)
    add_slots(slots, lists, dk, dv, scale, cache)
    return cut(dq, dim), cut(dk, dim), cut(dv, dim)


def _key_lists(plan: Plan, tiles: TileConfig, q: Tensor, k: Tensor) -> tuple[KeyLists, Tensor]:
    """The lists by key, and memory for the sums of tiles that several programs share."""
    batch, _, num_heads, dim = q.shape
    lists = plan.key_lists(tiles, num_heads, k.shape[2], q.device)
    shape = (batch * k.shape[2], lists.slots, 2, tiles.block_n, padded_dim(dim))
    return lists, q.new_empty(shape, dtype=torch.float32)


def _query_launch(tensors: dict[str, Tensor], plan: Plan, scale: float, config: TileConfig) -> Launch:
    grid, shared = query_arguments(tensors, _rows(config), plan, scale, config)
    own = _of_backward(tensors, scale) | {"dq_ptr": tensors["dq"]}
    return Launch(_query_kernel, lambda _: (grid, shared | own))


def _key_launch(tensors: dict[str, Tensor], lists: KeyLists, plan: Plan, scale: float, config: TileConfig) -> Launch:
    sets, n_items, _ = lists.items.shape
    heads, kv_heads = tensors["q"].shape[2], tensors["k"].shape[2]
    group = plan.group(heads, kv_heads, by_key=True)
    grid, shared = kernel_arguments(tensors, _rows(config), n_items, group, kv_heads, plan, scale, config)
    own = _of_backward(tensors, scale) | {
        "dk_ptr": tensors["dk"],
        "dv_ptr": tensors["dv"],
        "slots_ptr": tensors["slots"] if lists.slots else None,
        "lookup_ptr": lists.lookup,
        "order_ptr": lists.items,
        "entries_ptr": lists.entries,
        "n_tiles": lists.lookup.shape[1],
        "n_kv_heads": kv_heads,
        "n_slots": lists.slots,
        "GROUP": group.heads_per_kv,
        "CUT": False,
        "PER_HEAD": sets > 1,
        "SLOT_DIM": tensors["slots"].shape[-1],
    }
    return Launch(_key_kernel, lambda _: (grid, shared | own))


def _rows(config: TileConfig) -> dict[str, int]:
    """How many each operand has in a tile."""
    return {"q": config.block_m, "dout": config.block_m, "k": config.block_n, "v": config.block_n}


def _of_backward(tensors: dict[str, Tensor], scale: float) -> dict[str, Any]:
    """The further arguments of both kernels."""
    stats = tensors["stats"]
    return {"stats_ptr": stats, "stats_blocks": stats.shape[4], "scale": scale, "ADD": False, "OVERLAPS": False}


def backward_tiles(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, plan: Plan) -> TileConfig | None:
    """The tiles of the Hopper kernel, which adds in any order, if it takes these tensors and is faster, else None."""
    # The pairs are counted last: that makes lists.
    if plan.hidden is not None:
        return None
    pairs = plan.pairs(q.shape[2])
    if pairs is None:
        return None
    dim, tile = q.shape[-1], plan.block_size
    kernel, tiles = select_kernel("backward_key", dim, causal=plan.causal, largest_tile=tile, hopper=True, blocks=True)
    key_rows = k.numel() // dim
    steps = q.shape[0] * pairs / (tiles.block_m * key_rows)
    if kernel != "at_once" or not blocks_at_once_are_faster(dim, key_rows / tiles.block_n, steps):
        return None
    return tiles if serves((q, k, v, dout), plan, tiles, plan.rows // tiles.block_m) else None


def _run_at_once(
    tensors: dict[str, Tensor],
    dq: Tensor,
    lists: KeyLists,
    plan: Plan,
    scale: float,
    tiles: TileConfig,
    cache: LaunchCache,
) -> None:
    """Write dq, dk and dv by the Hopper kernel; the sums of key tiles that several programs share, to their slots."""
    sums, heads, kv_heads = tensors["sums"], dq.shape[2], tensors["k"].shape[2]
    for first in range(0, heads, sums.shape[2]):
        if first:
            sums.zero_()
        first_kv_head = first * kv_heads // heads

        def prepare(first_kv_head: int = first_kv_head) -> list[Launch]:
            return [_launch_at_once(tensors, lists, plan, first_kv_head, scale, tiles)]

        cache.launch(("at once", first), [tensors], prepare)
        convert_dq(sums, scale, dq[:, :, first : first + sums.shape[2]], cache, ("dq", first))


def _launch_at_once(
    tensors: dict[str, Tensor], lists: KeyLists, plan: Plan, first_kv_head: int, scale: float, tiles: TileConfig
) -> Launch:
    # The kernel module needs a Triton with Gluon's Hopper instructions.
    from dilabench.kernels.fused.sm90.backward import _backward_kernel, tile_arguments

    q, k = tensors["q"], tensors["k"]
    sets, n_items, _ = lists.items.shape
    shared = tile_arguments(tensors, 1, first_kv_head, tiles)
    n_blocks = q.shape[0] * shared["some_kv_heads"]
    own = {
        "slots_ptr": tensors["slots"],
        "items_ptr": lists.items,
        "lookup_ptr": lists.lookup,
        "entries_ptr": lists.entries,
        "heads_ptr": plan.head_kinds(q.shape[2], q.device),
        "scale": scale,
        "scale_log2": scale * LOG2E,
        "n_supers": 1,
        "full_supers": 1,
        "n_kinds": plan.mask_heads,
        "n_items": n_items,
        "n_tiles": lists.lookup.shape[1],
        **segment_arguments(plan.group(q.shape[2], k.shape[2], by_key=True)),
        "n_blocks": n_blocks,
        "item_major": 0,
        "n_slots": lists.slots,
        "CAUSAL": plan.causal,
        "RAGGED": False,
        "ADD": False,
        "SHARED": True,
        "PER_HEAD": sets > 1,
        "COUNTED": False,
    }
    return Launch(_backward_kernel, lambda _: ((n_items * n_blocks,), shared | own))
