# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""Backward of dilated attention over the union of branches: dQ by query tiles, dK and dV by key tiles, no atomics.

Both kernels rebuild p = exp(scale * q.k + log m - lse) from the merged lse, so the gradient belongs to the merged
result, and groups of branches only add up. On a Hopper GPU one kernel does both (`sm90.backward`) if that is faster and
torch is not set to deterministic algorithms.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilabench.kernels.bwd_preprocess import STATS_BLOCK, OneClass, StatsLayout, bwd_preprocess, stats_places
from dilabench.kernels.dq_accumulate import dq_accumulator
from dilabench.kernels.fused.backward_at_once import AtOnce, groups_at_once, run_at_once
from dilabench.kernels.fused.branch_group import BranchGroup
from dilabench.kernels.fused.packing import DocumentLists, ListRequest, Packing, PassRequests, key_lists, query_lists
from dilabench.kernels.fused.partials import Partials, partial_places
from dilabench.kernels.fused.residue_plan import ResiduePlan
from dilabench.kernels.fused.row_layout import (
    PER_LENGTH,
    checked_scale,
    common_modulus,
    is_whole,
    launch_arguments,
    on_hopper,
    whole_classes,
)
from dilabench.kernels.fused.tile_walk import (
    add_weighted,
    box_place,
    capped,
    end_of,
    find_work,
    frame_of,
    hiding_ranges,
    load_tile,
    outside,
    place_of,
    query_item,
    scores,
    seen_keys,
    seen_queries,
    segment_of,
    slopes_of_cap,
    stats_row,
    store_tile,
    turned,
    unpack,
    zero_tail,
)
from dilabench.kernels.fused.wider_rows import with_columns
from dilabench.kernels.launch_cache import Arguments, Launch, LaunchCache, layout
from dilabench.kernels.tuning import TileConfig, columns_to_add, select_kernel

_STATS_BLOCK = tl.constexpr(STATS_BLOCK)


@triton.jit(do_not_specialize=PER_LENGTH)
def _query_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    q_tail_desc,
    k_tail_desc,
    v_tail_desc,
    dout_tail_desc,
    dq_ptr,
    stats_ptr,
    items_ptr,
    entries_ptr,
    heads_ptr,
    bounds_ptr,
    visits_ptr,
    cap,
    scale,
    scale_log2,
    n_supers,
    full_supers,
    n_kinds,
    n_items,
    n_heads,
    heads_per_kv,
    length,
    whole_rows,
    longer_classes,
    left_over,
    stats_blocks,
    super_rows,
    super_tokens,
    window_left,
    window_right,
    n_blocks,
    item_major,
    key_rows,
    R,
    HEAD_DIM: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    SHIFTED: tl.constexpr,
    WINDOWED: tl.constexpr,
    RAGGED: tl.constexpr,
    RANGES: tl.constexpr,
    ONE_CLASS: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    item, super_index, head, batch, variant, n_items = find_work(
        visits_ptr, n_items, n_blocks, item_major, n_supers, full_supers, n_heads
    )
    item_ptr, shift = query_item(item, variant, head, items_ptr, heads_ptr, n_kinds, n_items, n_heads, ONE_CLASS)
    u = tl.load(item_ptr)
    if u < 0:
        return
    tile = tl.load(item_ptr + 1)
    first = tl.load(item_ptr + 2)
    n_full = tl.load(item_ptr + 3)
    n_masked = tl.load(item_ptr + 4)

    residue = turned(u, shift, R)
    base_row, first_place, rows_left, longer_classes = segment_of(
        super_index, visits_ptr, super_rows, super_tokens, whole_rows, longer_classes, length, R, SHIFTED
    )
    row = base_row + tile * BLOCK_M
    kv_head = head // heads_per_kv
    place, box_row = box_place(residue, row, first_place, whole_rows, left_over, R, BLOCK_M, RAGGED, SHIFTED)
    q, q_tail = load_tile(q_desc, q_tail_desc, batch, box_row, place, head, HEAD, TAIL)
    dout, dout_tail = load_tile(dout_desc, dout_tail_desc, batch, box_row, place, head, HEAD, TAIL)
    query_row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    stats_at = (((batch * n_heads + head) * R + residue) * n_supers).to(tl.int64) * (stats_blocks * _STATS_BLOCK)
    stats_at += stats_row(super_index, visits_ptr, stats_blocks * _STATS_BLOCK)
    stats = stats_ptr + stats_at * 2 + stats_places(query_row)
    log2_lse, delta = tl.load(stats), tl.load(stats + _STATS_BLOCK)
    dq = tl.zeros([BLOCK_M, HEAD], tl.float32)
    dq_tail = zero_tail(BLOCK_M, TAIL)

    entry_ptr = entries_ptr + first
    for masked in tl.static_range(2 if CAUSAL or RAGGED or WINDOWED else 1):
        for _ in tl.range(0, n_masked if masked else n_full, num_stages=STAGES):
            entry = tl.load(entry_ptr)
            entry_ptr += 1
            key_tile, partner, bias = unpack(entry, shift, R, ONE_CLASS)
            key_row = base_row + key_tile * BLOCK_N
            place, key_row = box_place(
                partner,
                key_row,
                first_place,
                whole_rows,
                left_over,
                R,
                BLOCK_N,
                RAGGED if masked else SHIFTED,
                SHIFTED,
            )
            k, k_tail = load_tile(k_desc, k_tail_desc, batch, key_row, place, kv_head, HEAD, TAIL)
            v, v_tail = load_tile(v_desc, v_tail_desc, batch, key_row, place, kv_head, HEAD, TAIL)
            logits = scores(q, q_tail, k, k_tail, TAIL, PRECISION)
            if cap is not None:
                logits = capped(logits, cap, PRECISION)
            dp = scores(dout, dout_tail, v, v_tail, TAIL, PRECISION)
            if masked:
                end = key_rows if ONE_CLASS else end_of(partner, rows_left, longer_classes, super_rows)
                window = (window_left, window_right)
                seen = seen_keys(query_row, residue, key_tile, partner, end, window, R, BLOCK_N, CAUSAL, WINDOWED)
                ranges = hiding_ranges(bounds_ptr, (key_row + tl.arange(0, BLOCK_N))[None, :], key_rows, RANGES)
                logits = tl.where(outside(seen, query_row[:, None], ranges, RANGES), logits, float("-inf"))
            p = tl.math.exp2(logits * scale_log2 - (log2_lse - bias)[:, None])
            ds = p * (dp - delta[:, None])
            if cap is not None:
                ds *= slopes_of_cap(logits)
            dq, dq_tail = add_weighted(dq, dq_tail, ds, k, k_tail, TAIL, PRECISION)

    dq_ptr += place_of(row, residue + first_place, batch, head, length, n_heads, R, HEAD_DIM)
    rows = end_of(residue, rows_left, longer_classes, super_rows) - tile * BLOCK_M
    store_tile(dq * scale, dq_tail * scale, dq_ptr, rows, 1.0, n_heads, R, ADD, BLOCK_M, HEAD_DIM, HEAD, TAIL)


@triton.jit(do_not_specialize=PER_LENGTH)
def _key_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    q_tail_desc,
    k_tail_desc,
    v_tail_desc,
    dout_tail_desc,
    dk_ptr,
    dv_ptr,
    slots_ptr,
    stats_ptr,
    lookup_ptr,
    order_ptr,
    entries_ptr,
    heads_ptr,
    bounds_ptr,
    visits_ptr,
    cap,
    scale,
    scale_log2,
    n_supers,
    full_supers,
    n_kinds,
    n_items,
    n_tiles,
    n_heads,
    n_kv_heads,
    length,
    whole_rows,
    longer_classes,
    left_over,
    stats_blocks,
    super_rows,
    super_tokens,
    window_left,
    window_right,
    n_blocks,
    item_major,
    n_slots,
    key_rows,
    R,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    SHIFTED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CUT: tl.constexpr,
    RANGES: tl.constexpr,
    ONE_CLASS: tl.constexpr,
    PER_HEAD: tl.constexpr,
    SLOT_DIM: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # One program: one key tile of one class, over the query tiles of every head that shares the K/V head.
    item, super_index, kv_head, batch, variant, n_items = find_work(
        visits_ptr, n_items, n_blocks, item_major, n_supers, full_supers, n_kv_heads
    )
    # `order` lists (class, tile) in the frame of the first head of the group, heaviest first; of ONE_CLASS shares of
    # lists, as `block_sparse.key_lists.KeyLists.items`.
    if ONE_CLASS:
        order_at = order_ptr + ((kv_head if PER_HEAD else 0) * n_items + item) * 4
    else:
        order_at = order_ptr + (variant * n_items + item) * 2
    u = tl.load(order_at)
    if u < 0:
        return
    if ONE_CLASS:
        tile, residue = u, turned(0, 0, R)
        low, high = tl.load(order_at + 1), tl.load(order_at + 2)
    else:
        tile = tl.load(order_at + 1)
        residue = turned(u, tl.load(heads_ptr + kv_head * GROUP * 2 + 1), R)

    base_row, first_place, rows_left, longer_classes = segment_of(
        super_index, visits_ptr, super_rows, super_tokens, whole_rows, longer_classes, length, R, SHIFTED
    )
    class_stats = n_supers * stats_blocks * (2 * _STATS_BLOCK)
    row = base_row + tile * BLOCK_N
    place, box_row = box_place(residue, row, first_place, whole_rows, left_over, R, BLOCK_N, CUT, SHIFTED)
    k, k_tail = load_tile(k_desc, k_tail_desc, batch, box_row, place, kv_head, HEAD, TAIL)
    v, v_tail = load_tile(v_desc, v_tail_desc, batch, box_row, place, kv_head, HEAD, TAIL)
    key_row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    ranges = hiding_ranges(bounds_ptr, key_row[:, None], key_rows, RANGES)
    dk = tl.zeros([BLOCK_N, HEAD], tl.float32)
    dk_tail = zero_tail(BLOCK_N, TAIL)
    dv = tl.zeros([BLOCK_N, HEAD], tl.float32)
    dv_tail = zero_tail(BLOCK_N, TAIL)

    for member in range(GROUP):
        head = kv_head * GROUP + member
        kind, shift = frame_of(head, heads_ptr, n_heads, n_kinds, ONE_CLASS)
        own = turned(residue, R - shift, R)
        list_at = lookup_ptr + (((variant * n_kinds + kind) * R + own) * n_tiles + tile) * 3
        entry_ptr = entries_ptr + tl.load(list_at)
        # Queries beyond the end of a segment have weight 0 by their statistics: they need no mask.
        n_full = tl.load(list_at + 1)
        n_masked = tl.load(list_at + 2)
        if not (CAUSAL or WINDOWED or RANGES > 0):
            n_full += n_masked
        begin, masked_begin = 0, 0
        if ONE_CLASS:
            entry_ptr += low
            begin, masked_begin = low, tl.maximum(low - n_full, 0)
            n_masked = tl.minimum(high - n_full, n_masked)
            n_full = tl.minimum(high, n_full)
        stats_at = ((batch * n_heads + head) * R * n_supers).to(tl.int64) * (stats_blocks * _STATS_BLOCK)
        stats_at += stats_row(super_index, visits_ptr, stats_blocks * _STATS_BLOCK)
        stats_at = stats_ptr + stats_at * 2 + stats_places(tl.arange(0, BLOCK_M))
        for masked in tl.static_range(2 if CAUSAL or WINDOWED or RANGES > 0 else 1):
            # Tiles that a causal edge cuts are few: a second one in flight next to its mask takes registers from other
            # tiles. But windows and bounds of columns make most of a list of them.
            for _ in tl.range(
                masked_begin if masked else begin,
                n_masked if masked else n_full,
                num_stages=1 if masked and not (ONE_CLASS and (WINDOWED or RANGES > 0)) else STAGES,
            ):
                entry = tl.load(entry_ptr)
                entry_ptr += 1
                query_tile, partner, bias = unpack(entry, shift, R, ONE_CLASS)
                query_tile *= BLOCK_M
                # In causal lists whole tiles end before the last row, of the sequence if rows are not shifted.
                place, box_row = box_place(
                    partner,
                    base_row + query_tile,
                    first_place,
                    whole_rows,
                    left_over,
                    R,
                    BLOCK_M,
                    CUT and (masked or SHIFTED or not CAUSAL),
                    SHIFTED,
                )
                q, q_tail = load_tile(q_desc, q_tail_desc, batch, box_row, place, head, HEAD, TAIL)
                stats = stats_at + (partner * class_stats + query_tile * 2)
                log2_lse = tl.load(stats) - bias
                logits = scores(k, k_tail, q, q_tail, TAIL, PRECISION)
                if cap is not None:
                    logits = capped(logits, cap, PRECISION)
                dout, dout_tail = load_tile(dout_desc, dout_tail_desc, batch, box_row, place, head, HEAD, TAIL)
                if masked:
                    query_row = query_tile + tl.arange(0, BLOCK_M)
                    window = (window_left, window_right)
                    seen = seen_queries(query_row, partner, key_row, residue, window, R, CAUSAL, WINDOWED)
                    logits = tl.where(outside(seen, query_row[None, :], ranges, RANGES), logits, float("-inf"))
                p = tl.math.exp2(logits * scale_log2 - log2_lse[None, :])
                delta = tl.load(stats + _STATS_BLOCK)
                dp = scores(v, v_tail, dout, dout_tail, TAIL, PRECISION)
                dv, dv_tail = add_weighted(dv, dv_tail, p, dout, dout_tail, TAIL, PRECISION)
                ds = p * (dp - delta[None, :])
                if cap is not None:
                    ds *= slopes_of_cap(logits)
                dk, dk_tail = add_weighted(dk, dk_tail, ds, q, q_tail, TAIL, PRECISION)

    place = place_of(row, residue + first_place, batch, kv_head, length, n_kv_heads, R, HEAD_DIM)
    rows = end_of(residue, rows_left, longer_classes, super_rows) - tile * BLOCK_N
    if slots_ptr is not None:
        # If a tile has several shares, `add_slots` sums them.
        slot = tl.load(order_at + 3)
        rows = tl.where(slot < 0, rows, 0)
        if slot >= 0:
            slot_at = ((batch * n_kv_heads + kv_head).to(tl.int64) * n_slots + slot) * (2 * BLOCK_N * SLOT_DIM)
            store_tile(dk, dk_tail, slots_ptr + slot_at, BLOCK_N, 1.0, 1, 1, False, BLOCK_N, SLOT_DIM, HEAD, TAIL)
            slot_at += BLOCK_N * SLOT_DIM
            store_tile(dv, dv_tail, slots_ptr + slot_at, BLOCK_N, 1.0, 1, 1, False, BLOCK_N, SLOT_DIM, HEAD, TAIL)
    store_tile(
        dk * scale, dk_tail * scale, dk_ptr + place, rows, 1.0, n_kv_heads, R, ADD, BLOCK_N, HEAD_DIM, HEAD, TAIL
    )
    store_tile(dv, dv_tail, dv_ptr + place, rows, 1.0, n_kv_heads, R, ADD, BLOCK_N, HEAD_DIM, HEAD, TAIL)
    if OVERLAPS:
        # Waiting for this launch also waits for the one that ran concurrently.
        tl.extra.cuda.gdc_wait()


def fused_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: ResiduePlan,
    *,
    scale: float | None = None,
    query_config: TileConfig | None = None,
    key_config: TileConfig | None = None,
    partials: Partials | None = None,
    packing: Packing | None = None,
    cache: LaunchCache | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` of the branches in ``plan.groups`` from the *merged* ``out [B, N, H, D]`` and ``lse [B, H, N]``,
    with ``partials`` from each group's own results and the merged lse, for detached merge weights.

    The same bits from call to call if torch is set to deterministic algorithms or tiles are given. ``packing``: the
    documents of a plan for documents. ``cache``: instead of the one for these tensors. Raises ValueError as
    `fused_forward` does.
    """
    dim, lse, tiles = q.shape[-1], lse.contiguous(), (query_config, key_config)
    if cache is None:
        layouts = layout(q), layout(k), layout(v), layout(dout), layout(out), layout(lse)
        cache = LaunchCache.of("backward", plan, scale, tiles, partials is None, *layouts)
    operands = {"q": q, "k": k, "v": v, "dout": dout}
    scale = cache.once("scale", lambda: checked_scale(q, k, v, plan, scale))
    if more := cache.once("columns", lambda: columns_to_add(dim, q.element_size(), on_hopper(q.device))):
        operands = {name: with_columns(x, more, cache, f"columns of {name}") for name, x in operands.items()}
    q, k, v, _ = operands.values()
    if not cache.once("whole", lambda: all(is_whole(x, plan.groups) for x in operands.values())):
        operands = {name: whole_classes(x, plan.groups) for name, x in operands.items()}
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    at_once, sums = [], None
    if dq.element_size() == 2 and tiles == (None, None) and not torch.are_deterministic_algorithms_enabled():
        at_once = cache.once("at once", lambda: groups_at_once(plan, operands["q"], operands["k"]))
    if at_once:
        modulus = cache.once("modulus", lambda: common_modulus(plan.groups))
        sums = dq_accumulator(operands["q"], operands["k"], at_once[0].tiles, modulus)
    if sums is None:
        at_once = []
    passes = cache.once(f"passes beside {len(at_once)}", lambda: _passes(plan, operands["q"], at_once, *tiles))
    if not [*at_once, *passes][0].group.covers_every_row:
        dq.zero_(), dk.zero_(), dv.zero_()
    stats_of = _Preprocess(out, dout, lse, plan, partials, cache)
    of_documents: list[DocumentLists] = []
    if packing is not None:
        requests = cache.once(f"lists beside {len(at_once)}", lambda: _requests(at_once, passes))
        of_documents = [*packing.lists(requests, plan.causal, q).of_groups]
    if sums is not None:
        own = [operands | lists.by_key("items") for lists in of_documents[: len(at_once)]] or [operands] * len(at_once)
        of_steps = [
            given | {"stats": stats_of(step, ("at once", index), given.get("spans"))}
            for index, (step, given) in enumerate(zip(at_once, own, strict=True))
        ]
        run_at_once(at_once, of_steps, (dq, dk, dv), sums, plan.causal, scale, cache)
    for index, step in enumerate(passes):
        name, add = (len(at_once), index), sums is not None or index > 0
        by_query = by_key = operands
        if of_documents:
            lists, lists_by_key = of_documents[len(at_once) + 2 * index :][:2]
            by_query, by_key = operands | lists.by_query, operands | lists_by_key.by_key()
        results = {"stats": stats_of(step, name, by_query.get("spans")), "dq": dq, "dk": dk, "dv": dv}
        by_query, by_key = by_query | results, by_key | results

        def prepare(
            step: _TwoPasses = step,
            by_query: dict[str, Tensor] = by_query,
            by_key: dict[str, Tensor] = by_key,
            add: bool = add,
        ) -> Iterator[Launch]:
            yield _query_launch(by_query, step.group, plan.causal, scale, step.query_tiles, add)
            yield _key_launch(by_key, step.group, plan.causal, scale, step.key_tiles, add)

        cache.launch(name, [by_query, by_key], prepare)
    if more:
        dq, dk, dv = (x[..., :dim].contiguous() for x in (dq, dk, dv))
    return dq, dk, dv


class _Preprocess:
    """The statistics of rows for each group: of the merged result, whose rows are read once for all of them, or of the
    partial results.
    """

    def __init__(
        self, out: Tensor, dout: Tensor, lse: Tensor, plan: ResiduePlan, partials: Partials | None, cache: LaunchCache
    ) -> None:
        self._out, self._dout, self._lse, self._cache = out, dout, lse, cache
        self._delta = torch.empty_like(lse) if len(plan.groups) > 1 and partials is None else None
        self._found = False
        self._own: dict[int, tuple[Tensor, OneClass]] = {}
        if partials is not None:
            places = partial_places(plan, out.shape, out.device, type(out))
            for index, (group, (own, own_lse)) in enumerate(zip(plan.groups, places.views(partials), strict=True)):
                self._own[id(group)] = own, OneClass(own_lse, places.classes[index], group.super_rows)

    def __call__(self, step: AtOnce | _TwoPasses, name: Hashable, spans: Tensor | None) -> Tensor:
        given = (self._dout, self._lse, step.stats_layout, self._cache, ("row sums", name))
        if self._own:
            out, one_class = self._own[id(step.group)]
            return bwd_preprocess(out, *given, one_class=one_class, spans=spans)
        stats = bwd_preprocess(self._out, *given, self._delta, self._found, spans=spans)
        self._found = self._delta is not None
        return stats


class _TwoPasses(NamedTuple):
    """A group of branches with the tiles of both passes and the place of the statistics of rows."""

    group: BranchGroup
    query_tiles: TileConfig
    key_tiles: TileConfig
    stats_layout: StatsLayout

    @property
    def requests(self) -> tuple[ListRequest, ListRequest]:
        """The lists of both passes, for documents."""
        by_query, by_key = self.query_tiles, self.key_tiles
        tile = max(by_query.block_m, by_key.block_m)
        return (
            ListRequest(self.group, by_query.block_m, by_query.block_n, False, tile),
            ListRequest(self.group, by_key.block_n, by_key.block_m, True, tile),
        )


def _requests(at_once: list[AtOnce], passes: list[_TwoPasses]) -> PassRequests:
    """The lists of all launches, for documents."""
    return PassRequests(*(step.request for step in at_once), *(request for step in passes for request in step.requests))


def _passes(
    plan: ResiduePlan,
    q: Tensor,
    at_once: list[AtOnce],
    query_config: TileConfig | None,
    key_config: TileConfig | None,
) -> list[_TwoPasses]:
    """The other groups, each with the tiles that are given or else the best, fitted to it."""
    found = []
    for group in plan.groups:
        if any(group is step.group for step in at_once):
            continue
        select = partial(
            select_kernel,
            head_dim=q.shape[-1],
            causal=plan.causal,
            largest_tile=group.largest_tile,
            itemsize=q.element_size(),
        )
        by_query = query_config or select("backward_query").tiles
        by_key = key_config or select("backward_key").tiles
        by_query, by_key = by_query.fitted(group.largest_tile), by_key.fitted(group.largest_tile)
        tile = max(by_query.block_m, by_key.block_m)
        if group.documents:
            stats_layout = ListRequest(group, tile, tile, stats_tile=tile).stats_layout(STATS_BLOCK)
        else:
            stats_layout = StatsLayout.of(group.length, group.modulus, group.super_tokens, tile)
        found.append(_TwoPasses(group, by_query, by_key, stats_layout))
    return found


def _query_launch(
    operands: dict[str, Tensor],
    group: BranchGroup,
    causal: bool,
    scale: float,
    config: TileConfig,
    add: bool,
) -> Launch:
    """The launch that writes dq of one group; the operands are named as in the kernel."""
    q, dq, stats = (operands[name] for name in ("q", "dq", "stats"))
    n_items, lists = query_lists(operands, group, config, causal)
    tiles = _tiles(operands, config)
    own = {
        **lists,
        "dq_ptr": dq,
        "stats_ptr": stats,
        "stats_blocks": stats.shape[4],
        "bounds_ptr": None,
        "heads_per_kv": group.heads_per_kv,
        "key_rows": group.length,
        "RANGES": 0,
        "ONE_CLASS": False,
        "scale": scale,
        "ADD": add,
    }

    def arguments(ragged: bool) -> Arguments:
        grid, shared = launch_arguments(tiles, n_items, group, q.shape[2], causal, scale, config)
        ragged = ragged or group.documents > 0
        return grid, shared | own | {"RAGGED": ragged, "OVERLAPS": on_hopper(q.device)}

    kind = (dq.dtype, *dq.shape[2:], causal, add, config, *group.compiled_for)
    return Launch(_query_kernel, arguments, group.cuts_tiles(config.longest), kind)


def _key_launch(
    operands: dict[str, Tensor],
    group: BranchGroup,
    causal: bool,
    scale: float,
    config: TileConfig,
    add: bool,
) -> Launch:
    """The same for dk and dv."""
    dk, dv, stats = (operands[name] for name in ("dk", "dv", "stats"))
    n_kv_heads = operands["k"].shape[2]
    n_items, n_tiles, lists = key_lists(operands, group, config, causal)
    tiles = _tiles(operands, config)
    own = {
        **lists,
        "dk_ptr": dk,
        "dv_ptr": dv,
        "n_tiles": n_tiles,
        "stats_ptr": stats,
        "stats_blocks": stats.shape[4],
        "slots_ptr": None,
        "bounds_ptr": None,
        "n_kv_heads": n_kv_heads,
        "n_slots": 0,
        "key_rows": group.length,
        "RANGES": 0,
        "ONE_CLASS": False,
        "PER_HEAD": False,
        "SLOT_DIM": 0,
        "scale": scale,
        "GROUP": group.heads_per_kv,
        "ADD": add,
    }

    # It writes no memory of the launch by queries, and begins while that ends.
    overlaps = on_hopper(dk.device)

    def arguments(cut: bool) -> Arguments:
        grid, shared = launch_arguments(tiles, n_items, group, n_kv_heads, causal, scale, config)
        beside = {"launch_pdl": True} if overlaps else {}
        return grid, shared | own | beside | {"CUT": cut or group.documents > 0, "OVERLAPS": overlaps}

    kind = (dk.dtype, *dk.shape[2:], causal, add, config, *group.compiled_for)
    return Launch(_key_kernel, arguments, group.length % group.modulus > 0, kind)


def _tiles(operands: dict[str, Tensor], config: TileConfig) -> dict[str, tuple[Tensor, int]]:
    """Each operand with the rows of its tile: queries (q, dout) or keys (k, v)."""
    rows = {"q": config.block_m, "dout": config.block_m, "k": config.block_n, "v": config.block_n}
    return {name: (operands[name], size) for name, size in rows.items()}
