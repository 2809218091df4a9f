# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""The fused forward for Hopper, written in Gluon: one producer warp copies, two consumer warpgroups compute.

Persistent programs stay on their multiprocessor and walk over many query tiles: the copies of the next tile run during
the last products and the store of the present one. A consumer owns half of the query rows. It issues the next q.k
product and the present p.v product together, and computes the softmax of the first while the second runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from dilabench.kernels.fused.branch_group import BranchGroup
from dilabench.kernels.fused.packing import query_lists
from dilabench.kernels.fused.row_layout import LOG2E, PER_LENGTH, Results, residue_view, segment_arguments
from dilabench.kernels.fused.sm90.softmax import KEPT, LARGEST_SUM, finish, walk, weigh
from dilabench.kernels.fused.sm90.tile_walk import (
    box_place,
    class_of,
    find_work,
    segment_of,
    tile_descriptor,
    tile_of,
    tiles_of,
    turned,
    view_place,
)
from dilabench.kernels.launch_cache import Arguments, Launch
from dilabench.kernels.tuning import TileConfig, is_persistent, is_softmax_bound, tile_columns

# Registers per thread: (240 + 240 + 24) * 128 threads fill the register file; the first consumer gets what is left.
_CONSUMER_REGISTERS = gl.constexpr(240)
_PRODUCER_REGISTERS = gl.constexpr(24)


class _Form(NamedTuple):
    """Compile-time constants. HEAD: columns of DIM without the last ones, TAIL, which are separate tiles; ROWS: the
    queries of a consumer, half of a tile; BATCHED: there are several batch elements; RANGES of rows that hide each key;
    TAKE_TURNS: the consumers issue their products one after the other. HALVES: the first consumer computes the first
    half of tiles that the causal edge cuts, for it sees no key of the second.
    """

    DIM: int
    HEAD: int
    TAIL: int
    BLOCK_M: int
    ROWS: int
    BLOCK_N: int
    STAGES: int
    CAUSAL: bool
    BATCHED: bool
    SHIFTED: bool
    WINDOWED: bool
    RAGGED: bool
    RANGES: int
    MERGE: bool
    COMPACT: bool
    LARGEST: float
    PERSISTENT: bool
    TAKE_TURNS: bool
    HALVES: bool

    def __repr__(self) -> str:
        """Part of the names of functions, which may not hold every sign."""
        return "_".join(str(int(value)) for value in self)


@gluon.constexpr_function
def _form(*values):
    return _Form(*values)


@gluon.jit
def _locate(work, geometry, tables):
    """Item list position, head, batch item, class shift and super-segment of one piece of work; all partitions derive
    the same from its number.
    """
    n_supers, full_supers, n_kinds, n_items, n_heads = geometry[:5]
    items_ptr, _, heads_ptr, _, visits_ptr = tables
    item, super_index, head, batch, variant, n_items = find_work(
        work % n_items, work // n_items, visits_ptr, n_items, n_supers, full_supers, n_heads
    )
    kind = gl.load(heads_ptr + head * 2)
    shift = gl.load(heads_ptr + head * 2 + 1)
    item_ptr = items_ptr + ((variant * n_kinds + kind) * n_items + item) * 5
    return item_ptr, head, batch, shift, super_index


@gluon.jit
def _produce_item(work, step, turn, descriptors, strides, tables, geometry, tiles, barriers, R, form: gl.constexpr):
    """Copy one query tile and its key and value tiles; returns the counts of key tiles and query tiles so far."""
    DIM: gl.constexpr = form.value.DIM
    TAIL: gl.constexpr = form.value.TAIL
    BLOCK_M: gl.constexpr = form.value.BLOCK_M
    BLOCK_N: gl.constexpr = form.value.BLOCK_N
    STAGES: gl.constexpr = form.value.STAGES
    HEAD: gl.constexpr = form.value.HEAD
    ROWS: gl.constexpr = form.value.ROWS
    SHIFTED: gl.constexpr = form.value.SHIFTED
    BATCHED: gl.constexpr = form.value.BATCHED
    q_desc, k_desc, v_desc, q_tail_desc, k_tail_desc, v_tail_desc = descriptors
    q_token, q_head, k_token, k_head, v_token, v_head, heads_per_kv = strides
    entries_ptr = tables[1]
    left_over, sizes = geometry[5:7]
    q_smem, k_smem, v_smem, q_tail, k_tail, v_tail = tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _ = barriers
    item_ptr, head, batch, shift, super_index = _locate(work, geometry, tables)
    n = gl.load(item_ptr + 3) + gl.load(item_ptr + 4)
    base_row, first_place, _ends = segment_of(super_index, sizes, R, SHIFTED)
    if n > 0:
        box = (first_place, sizes[2], left_over)
        residue = turned(gl.load(item_ptr), shift, R)
        row = base_row + gl.load(item_ptr + 1) * BLOCK_M
        first = entries_ptr + gl.load(item_ptr + 2)
        k_column = (head // heads_per_kv) * k_head
        v_column = (head // heads_per_kv) * v_head
        entry = gl.load(first)
        mbarrier.wait(q_empty.index(0), (turn & 1) ^ 1)
        mbarrier.expect(q_full.index(0), BLOCK_M * DIM * 2)
        for half in gl.static_range(2):
            place, half_row = box_place(residue, row + half * ROWS, box, R, ROWS, SHIFTED)
            column = place * q_token + head * q_head
            at = view_place(batch, half_row, column, BATCHED)
            tma.async_copy_global_to_shared(q_desc, at, q_full.index(0), q_smem.index(half))
            if TAIL:
                at = view_place(batch, half_row, column + HEAD, BATCHED)
                tma.async_copy_global_to_shared(q_tail_desc, at, q_full.index(0), q_tail.index(half))
        for j in range(n):
            stage = (step + j) % STAGES
            phase = ((step + j) // STAGES) & 1
            partner = class_of(entry, shift, R)
            place, key_row = box_place(partner, base_row + tile_of(entry) * BLOCK_N, box, R, BLOCK_N, SHIFTED)
            following = gl.load(first + gl.minimum(j + 1, n - 1))
            column = place * k_token + k_column
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), BLOCK_N * DIM * 2)
            at = view_place(batch, key_row, column, BATCHED)
            tma.async_copy_global_to_shared(k_desc, at, k_full.index(stage), k_smem.index(stage))
            if TAIL:
                at = view_place(batch, key_row, column + HEAD, BATCHED)
                tma.async_copy_global_to_shared(k_tail_desc, at, k_full.index(stage), k_tail.index(stage))
            column = place * v_token + v_column
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), BLOCK_N * DIM * 2)
            at = view_place(batch, key_row, column, BATCHED)
            tma.async_copy_global_to_shared(v_desc, at, v_full.index(stage), v_smem.index(stage))
            if TAIL:
                at = view_place(batch, key_row, column + HEAD, BATCHED)
                tma.async_copy_global_to_shared(v_tail_desc, at, v_full.index(stage), v_tail.index(stage))
            entry = following
    return step + n, turn + (n > 0).to(gl.int32)


@gluon.jit
def _again(verdicts, WARPS: gl.constexpr):
    """Return True if either consumer has to begin again; waits for both."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    told, slots = verdicts
    mbarrier.wait(told, 0)
    return gl.max(slots.index(0).load(LAYOUT), 0) + gl.max(slots.index(1).load(LAYOUT), 0) > 0


@gluon.jit
def _produce(n_work, descriptors, strides, tables, geometry, tiles, barriers, verdicts, R, form: gl.constexpr):
    PERSISTENT: gl.constexpr = form.value.PERSISTENT
    step = 0
    turn = 0
    work = gl.program_id(0)
    if PERSISTENT:
        for item in range(work, n_work, gl.num_programs(0)):
            step, turn = _produce_item(
                item, step, turn, descriptors, strides, tables, geometry, tiles, barriers, R, form
            )
    else:
        step, turn = _produce_item(work, 0, 0, descriptors, strides, tables, geometry, tiles, barriers, R, form)
        if form.value.LARGEST > 0:  # noqa: SIM102 - what is compiled in, and what is asked
            if _again(verdicts, 1):
                _produce_item(work, step, turn, descriptors, strides, tables, geometry, tiles, barriers, R, form)


@gluon.jit
def _score(half: gl.constexpr, stage, zero, tiles, form: gl.constexpr):
    """Begin q.k of half a query tile with the key tile of a stage, or its first keys if ``zero`` has fewer columns."""
    ROWS: gl.constexpr = form.value.ROWS
    BLOCK_N: gl.constexpr = form.value.BLOCK_N
    HEAD: gl.constexpr = form.value.HEAD
    TAIL: gl.constexpr = form.value.TAIL
    KEYS: gl.constexpr = zero.shape[1]
    q_smem, k_smem, _, q_tail, k_tail, _ = tiles
    q = q_smem.index(half).reshape([ROWS, HEAD])
    k = k_smem.index(stage).reshape([BLOCK_N, HEAD]).slice(0, KEYS, dim=0)
    logits = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    if TAIL:
        q = q_tail.index(half).reshape([ROWS, TAIL])
        k = k_tail.index(stage).reshape([BLOCK_N, TAIL]).slice(0, KEYS, dim=0)
        logits = warpgroup_mma(q, k.permute((1, 0)), logits, is_async=True)
    return logits


@gluon.jit
def _sum(stage, weights, acc, tail, tiles, form: gl.constexpr, T_LAYOUT: gl.constexpr):
    """Begin to add p.v of the value tile of a stage, or of its first values if there are weights of these alone."""
    BLOCK_N: gl.constexpr = form.value.BLOCK_N
    TAIL: gl.constexpr = form.value.TAIL
    KEYS: gl.constexpr = weights.shape[1]
    _, _, v_smem, _, _, v_tail = tiles
    v = v_smem.index(stage).reshape([BLOCK_N, form.value.HEAD]).slice(0, KEYS, dim=0)
    acc = warpgroup_mma(weights, v, acc, is_async=True)
    if TAIL:
        weights = gl.convert_layout(weights, gl.DotOperandLayout(operand_index=0, parent=T_LAYOUT, k_width=2))
        v = v_tail.index(stage).reshape([BLOCK_N, TAIL]).slice(0, KEYS, dim=0)
        tail = warpgroup_mma(weights, v, tail, is_async=True)
    return acc, tail


@gluon.jit
def _step(
    j,
    state,
    given,
    MASKED: gl.constexpr,
    RENEWS: gl.constexpr,
    form: gl.constexpr,
    S_LAYOUT: gl.constexpr,
    O_LAYOUT: gl.constexpr,
):
    """Tile j of a list: begin its scores and the sum over the tile before, weigh the former while the latter runs.

    RENEWS the running maximum, or leaves it as it was.
    """
    TAIL: gl.constexpr = form.value.TAIL
    STAGES: gl.constexpr = form.value.STAGES
    T_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL if TAIL else 16, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    # Products in flight behind the next scores.
    BEHIND: gl.constexpr = 2 if TAIL else 1
    half, first, step, turn, scale_log2, place, bounds, tiles, barriers, R, zero = given
    v_smem = tiles[2]
    _, _, k_full, k_empty, v_full, v_empty, turns = barriers
    acc, tail, sums, weights = state
    stage = (step + j) % STAGES
    previous = (step + j - 1) % STAGES
    entry = gl.load(first + j)
    mbarrier.wait(k_full.index(stage), ((step + j) // STAGES) & 1)
    if form.value.TAKE_TURNS:
        # One consumer's softmax then overlaps the other's products.
        mbarrier.wait(turns.index(half), (step - turn + j + half) & 1)
    next_logits = _score(half, stage, zero, tiles, form)
    mbarrier.wait(v_full.index(previous), ((step + j - 1) // STAGES) & 1)
    next_acc, next_tail = _sum(previous, weights, acc, tail, tiles, form, T_LAYOUT)
    if form.value.TAKE_TURNS:
        mbarrier.arrive(turns.index(1 - half), count=1)
    logits = warpgroup_mma_wait(BEHIND, deps=[next_logits])
    gl.thread_barrier()
    mbarrier.arrive(k_empty.index(stage), count=1)
    p, sums, decay = weigh(logits, sums, entry, scale_log2, place, bounds, MASKED, RENEWS, R, form, S_LAYOUT)
    if TAIL:
        acc, tail = warpgroup_mma_wait(0, deps=[next_acc, next_tail])
    else:
        acc = warpgroup_mma_wait(0, deps=[next_acc])
    gl.thread_barrier()
    mbarrier.arrive(v_empty.index(previous), count=1)
    if RENEWS:
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, O_LAYOUT))[:, None]
        if TAIL:
            tail = tail * gl.convert_layout(decay, gl.SliceLayout(1, T_LAYOUT))[:, None]
    return acc, tail, sums, gl.convert_layout(p.to(v_smem.dtype), P_LAYOUT)


@gluon.jit
def _last_sum(n, state, given, form: gl.constexpr):
    """(unscaled accumulator, that of the last columns, `weigh`'s sums) behind the last of ``n`` steps."""
    TAIL: gl.constexpr = form.value.TAIL
    T_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL if TAIL else 16, 16])
    acc, tail, sums, weights = state
    step, tiles, barriers = given[2], given[7], given[8]
    _, q_empty, _, _, v_full, v_empty, _ = barriers
    mbarrier.arrive(q_empty.index(0), count=1)
    previous = (step + n - 1) % form.value.STAGES
    mbarrier.wait(v_full.index(previous), ((step + n - 1) // form.value.STAGES) & 1)
    next_acc, next_tail = _sum(previous, weights, acc, tail, tiles, form, T_LAYOUT)
    if TAIL:
        acc, tail = warpgroup_mma_wait(0, deps=[next_acc, next_tail])
    else:
        acc = warpgroup_mma_wait(0, deps=[next_acc])
    gl.thread_barrier()
    mbarrier.arrive(v_empty.index(previous), count=1)
    return acc, tail, sums


@gluon.jit
def _consume_halves(begin, n, state, given, form: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr):
    """`_last_sum` behind steps from ``begin`` on over the first halves of key tiles."""
    KEYS: gl.constexpr = form.value.BLOCK_N // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    half, first, step, turn, scale_log2, place, bounds, tiles, barriers, R, _ = given
    zero = gl.full([form.value.ROWS, KEYS], 0.0, gl.float32, LAYOUT)
    given = (half, first, step, turn, scale_log2, place, bounds, tiles, barriers, R, zero)
    acc, tail, sums, weights = state
    # The weights that the first step takes are those of a whole tile.
    state = _step(begin, (acc, tail, _sums_in(sums, LAYOUT), weights), given, True, True, form, LAYOUT, O_LAYOUT)
    for j in range(begin + 1, n):
        state = _step(j, state, given, True, True, form, LAYOUT, O_LAYOUT)
    acc, tail, sums = _last_sum(n, state, given, form)
    return acc, tail, _sums_in(sums, S_LAYOUT)


@gluon.jit
def _sums_in(sums, LAYOUT: gl.constexpr):
    """`weigh`'s sums in the layout of the rows of logits."""
    STAT_LAYOUT: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    top, total, largest = sums
    top, total = gl.convert_layout(top, STAT_LAYOUT), gl.convert_layout(total, STAT_LAYOUT)
    return top, total, gl.convert_layout(largest, STAT_LAYOUT)


@gluon.jit
def _consume_tile(
    half: gl.constexpr,
    first,
    n_full,
    n,
    step,
    turn,
    kept,
    scale_log2,
    place,
    bounds,
    tiles,
    barriers,
    R,
    form: gl.constexpr,
    S_LAYOUT: gl.constexpr,
    O_LAYOUT: gl.constexpr,
    T_LAYOUT: gl.constexpr,
):
    """(unscaled accumulator, that of the last columns, `weigh`'s sums) of half a query tile over its list of key tiles;
    ``kept`` as for `walk`.
    """
    HEAD: gl.constexpr = form.value.HEAD
    TAIL: gl.constexpr = form.value.TAIL
    ROWS: gl.constexpr = form.value.ROWS
    BLOCK_N: gl.constexpr = form.value.BLOCK_N
    STAGES: gl.constexpr = form.value.STAGES
    v_smem = tiles[2]
    q_full, _, k_full, k_empty, _, _, _ = barriers
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    STAT_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    MASK: gl.constexpr = form.value.CAUSAL or form.value.RAGGED or form.value.WINDOWED or form.value.RANGES > 0
    top = gl.full([ROWS], float("-inf"), gl.float32, STAT_LAYOUT)
    total = gl.full([ROWS], 0.0, gl.float32, STAT_LAYOUT)
    sums = (top, total, total)
    acc = gl.full([ROWS, HEAD], 0.0, gl.float32, O_LAYOUT)
    tail = 0
    if TAIL:
        tail = gl.full([ROWS, TAIL], 0.0, gl.float32, T_LAYOUT)
    zero = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, S_LAYOUT)
    entry = gl.load(first)
    stage = step % STAGES
    mbarrier.wait(q_full.index(0), turn & 1)
    mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
    logits = warpgroup_mma_wait(0, deps=[_score(half, stage, zero, tiles, form)])
    # All four warps must be past the product before one thread hands the buffer back.
    gl.thread_barrier()
    mbarrier.arrive(k_empty.index(stage), count=1)
    p, sums, _ = weigh(logits, sums, entry, scale_log2, place, bounds, MASK, True, R, form, S_LAYOUT)
    state = (acc, tail, sums, gl.convert_layout(p.to(v_smem.dtype), P_LAYOUT))
    given = (half, first, step, turn, scale_log2, place, bounds, tiles, barriers, R, zero)
    if half == 0 and form.value.HALVES:
        for j in range(1, n_full):
            state = _step(j, state, given, False, True, form, S_LAYOUT, O_LAYOUT)
        if gl.maximum(1, n_full) < n:
            acc, tail, sums = _consume_halves(gl.maximum(1, n_full), n, state, given, form, S_LAYOUT, O_LAYOUT)
        else:
            acc, tail, sums = _last_sum(n, state, given, form)
    else:
        state = walk(_step, n_full, n, kept, state, given, form, S_LAYOUT, O_LAYOUT)
        acc, tail, sums = _last_sum(n, state, given, form)
    return acc, tail, sums


@gluon.jit
def _consume_item(half: gl.constexpr, work, step, turn, kept, stores, given, form: gl.constexpr):
    """Attend and store half a query tile; returns the counts of key tiles and query tiles so far, and 1 if a weight may
    have overflowed, for ``kept`` steps (`walk`) left the maximum: nothing is stored then.
    """
    HEAD: gl.constexpr = form.value.HEAD
    TAIL: gl.constexpr = form.value.TAIL
    BLOCK_M: gl.constexpr = form.value.BLOCK_M
    ROWS: gl.constexpr = form.value.ROWS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.value.BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    T_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL if TAIL else 16, 16])
    results, tables, geometry, tiles, barriers, scale_log2, R = given
    entries_ptr, bounds_ptr = tables[1], tables[3]
    n_heads = geometry[4]
    sizes, key_rows, window = geometry[6:]
    bounds = (bounds_ptr, key_rows, window)
    item_ptr, head, batch, shift, super_index = _locate(work, geometry, tables)
    n_full = gl.load(item_ptr + 3)
    n = n_full + gl.load(item_ptr + 4)
    overflowed = 0
    if n > 0:
        residue = turned(gl.load(item_ptr), shift, R)
        first = entries_ptr + gl.load(item_ptr + 2)
        first_row = gl.load(item_ptr + 1) * BLOCK_M + half * ROWS
        base_row, first_place, ends = segment_of(super_index, sizes, R, form.value.SHIFTED)
        place = (first_row, residue, shift, ends)
        acc, tail, sums = _consume_tile(
            half,
            first,
            n_full,
            n,
            step,
            turn,
            kept,
            scale_log2,
            place,
            bounds,
            tiles,
            barriers,
            R,
            form,
            S_LAYOUT,
            O_LAYOUT,
            T_LAYOUT,
        )
        top, total, largest = sums
        if form.value.LARGEST > 0:
            overflowed = (gl.max(largest, 0) > form.value.LARGEST).to(gl.int32)
            stores = stores & (overflowed == 0)
        if stores:
            whose = (batch, head, n_heads, super_index, sizes, base_row, first_place)
            finish(acc, tail, top, total, results, whose, place, R, form, S_LAYOUT)
    return step + n, turn + (n > 0).to(gl.int32), overflowed


@gluon.jit
def _consume(
    half: gl.constexpr,
    n_work,
    results,
    tables,
    geometry,
    tiles,
    barriers,
    verdicts,
    scale_log2,
    R,
    form: gl.constexpr,
):
    PERSISTENT: gl.constexpr = form.value.PERSISTENT
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    given = (results, tables, geometry, tiles, barriers, scale_log2, R)
    step = 0
    turn = 0
    work = gl.program_id(0)
    if PERSISTENT:
        for item in range(work, n_work, gl.num_programs(0)):
            step, turn, _ = _consume_item(half, item, step, turn, 0, True, given, form)
    elif form.value.LARGEST > 0:
        told, slots = verdicts
        again = True
        mine = 0
        for attempt in range(2):
            if again:
                kept = gl.where(attempt == 0, KEPT, 0)
                step, turn, mine = _consume_item(half, work, step, turn, kept, (attempt == 0) | (mine > 0), given, form)
            if attempt == 0:
                slots.index(half).store(gl.full([32], mine, gl.int32, LAYOUT))
                gl.thread_barrier()
                mbarrier.arrive(told, count=1)
                again = _again(verdicts, 4)
    else:
        _consume_item(half, work, 0, 0, 0, True, given, form)


@gluon.jit(do_not_specialize=PER_LENGTH)
def _forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    q_tail_desc,
    k_tail_desc,
    v_tail_desc,
    out_ptr,
    lse_ptr,
    mass_ptr,
    items_ptr,
    entries_ptr,
    heads_ptr,
    bounds_ptr,
    visits_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    scale_log2,
    n_supers,
    full_supers,
    n_kinds,
    n_items,
    n_heads,
    super_rows,
    super_tokens,
    whole_rows,
    longer_classes,
    window_left,
    window_right,
    left_over,
    length,
    n_work,
    heads_per_kv,
    key_rows,
    R,
    DIM: gl.constexpr,
    TAIL: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    CAUSAL: gl.constexpr,
    BATCHED: gl.constexpr,
    SHIFTED: gl.constexpr,
    WINDOWED: gl.constexpr,
    RAGGED: gl.constexpr,
    RANGES: gl.constexpr,
    MERGE: gl.constexpr,
    COMPACT: gl.constexpr,
    LARGEST: gl.constexpr,
    STAGES: gl.constexpr,
    PERSISTENT: gl.constexpr,
    TAKE_TURNS: gl.constexpr,
    HALVES: gl.constexpr,
):
    gdc_launch_dependents()
    q_smem = gl.allocate_shared_memory(q_desc.dtype, tiles_of(2, BATCHED, BLOCK_M // 2, DIM - TAIL), q_desc.layout)
    k_smem = gl.allocate_shared_memory(q_desc.dtype, tiles_of(STAGES, BATCHED, BLOCK_N, DIM - TAIL), k_desc.layout)
    v_smem = gl.allocate_shared_memory(q_desc.dtype, tiles_of(STAGES, BATCHED, BLOCK_N, DIM - TAIL), v_desc.layout)
    tiles = (q_smem, k_smem, v_smem, q_smem, k_smem, v_smem)
    if TAIL:
        q_tail = gl.allocate_shared_memory(q_desc.dtype, tiles_of(2, BATCHED, BLOCK_M // 2, TAIL), q_tail_desc.layout)
        k_tail = gl.allocate_shared_memory(q_desc.dtype, tiles_of(STAGES, BATCHED, BLOCK_N, TAIL), k_tail_desc.layout)
        v_tail = gl.allocate_shared_memory(q_desc.dtype, tiles_of(STAGES, BATCHED, BLOCK_N, TAIL), v_tail_desc.layout)
        tiles = (q_smem, k_smem, v_smem, q_tail, k_tail, v_tail)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full.index(0), count=1)
    mbarrier.init(q_empty.index(0), count=2)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    verdicts = (0, 0)
    if LARGEST > 0:
        # Barriers between the consumers and the producer, each used once.
        told = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(told.index(0), count=2)
        slots = gl.allocate_shared_memory(gl.int32, [2, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        verdicts = (told.index(0), slots)
    fence_async_shared()
    tables = (items_ptr, entries_ptr, heads_ptr, bounds_ptr, visits_ptr)
    geometry = (
        n_supers,
        full_supers,
        n_kinds,
        n_items,
        n_heads,
        left_over,
        (super_rows, super_tokens, whole_rows, longer_classes, length, visits_ptr),
        key_rows,
        (window_left, window_right),
    )
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty, turns)
    descriptors = (q_desc, k_desc, v_desc, q_tail_desc, k_tail_desc, v_tail_desc)
    strides = (q_token, q_head, k_token, k_head, v_token, v_head, heads_per_kv)
    results = (out_ptr, lse_ptr, mass_ptr)
    form: gl.constexpr = _form(
        DIM,
        DIM - TAIL,
        TAIL,
        BLOCK_M,
        BLOCK_M // 2,
        BLOCK_N,
        STAGES,
        CAUSAL,
        BATCHED,
        SHIFTED,
        WINDOWED,
        RAGGED,
        RANGES,
        MERGE,
        COMPACT,
        LARGEST,
        PERSISTENT,
        TAKE_TURNS,
        HALVES,
    )
    gl.warp_specialize(
        [
            (_consume, (0, n_work, results, tables, geometry, tiles, barriers, verdicts, scale_log2, R, form)),
            (_consume, (1, n_work, results, tables, geometry, tiles, barriers, verdicts, scale_log2, R, form)),
            (_produce, (n_work, descriptors, strides, tables, geometry, tiles, barriers, verdicts, R, form)),
        ],
        [4, 1],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )


def tile_arguments(q: Tensor, k: Tensor, v: Tensor, modulus: int, config: TileConfig) -> dict[str, Any]:
    """The descriptors of a launch with where tiles are found in them, and what is compiled in by the head dim."""
    dim = q.shape[-1]
    head, tail = tile_columns(dim, q.element_size())
    narrow = is_softmax_bound(dim)
    largest = LARGEST_SUM[q.dtype] if narrow else 0.0
    arguments: dict[str, Any] = {"DIM": dim, "TAIL": tail, "TAKE_TURNS": narrow, "LARGEST": largest, "HALVES": False}
    arguments |= {"left_over": q.shape[1] % modulus, "BATCHED": q.shape[0] > 1}
    for name, x, rows in (("q", q, config.block_m // 2), ("k", k, config.block_n), ("v", v, config.block_n)):
        view = residue_view(x, modulus)
        arguments[f"{name}_desc"] = tile_descriptor(x, view, (rows, head))
        arguments[f"{name}_tail_desc"] = tile_descriptor(x, view, (rows, tail)) if tail else None
    return arguments


def group_launch(
    operands: Mapping[str, Tensor],
    results: Results,
    group: BranchGroup,
    causal: bool,
    scale: float,
    config: TileConfig,
) -> Launch:
    """The launch that writes the results of one group of branches."""
    q, k, v = (operands[name] for name in "qkv")
    batch, _, num_heads, dim = q.shape
    n_items, lists = query_lists(operands, group, config, causal)
    n_work = n_items * batch * num_heads * group.n_supers
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count

    def arguments(ragged: bool) -> Arguments:
        ragged = ragged or group.documents > 0
        persistent = is_persistent(dim, causal, ragged or results.merge or group.is_windowed)
        own = {
            **tile_arguments(q, k, v, group.modulus, config),
            "out_ptr": results.out,
            "lse_ptr": results.lse,
            "mass_ptr": results.mass,
            "bounds_ptr": None,
            **{f"{name}_token": x.stride(1) for name, x in (("q", q), ("k", k), ("v", v))},
            **{f"{name}_head": x.stride(2) for name, x in (("q", q), ("k", k), ("v", v))},
            "scale_log2": scale * LOG2E,
            "n_supers": group.n_supers,
            "full_supers": group.full_supers,
            "n_kinds": len(group.kinds),
            "n_items": n_items,
            "n_heads": num_heads,
            **segment_arguments(group),
            **lists,
            "n_work": n_work,
            "heads_per_kv": num_heads // k.shape[2],
            "key_rows": 0,
            "R": group.modulus,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "CAUSAL": causal,
            "RAGGED": ragged and not causal,
            "RANGES": 0,
            "MERGE": results.merge,
            "COMPACT": results.compact,
            "STAGES": config.num_stages,
            "PERSISTENT": persistent,
            # Not tried where a softmax keeps its maximum.
            "HALVES": causal
            and not group.is_windowed
            and config.block_m == config.block_n
            and not is_softmax_bound(dim),
            "num_warps": config.num_warps,
            "launch_pdl": results.follows,
        }
        return (min(processors, n_work) if persistent else n_work,), own

    kind = (dim, num_heads, batch > 1, causal, config, *results.compiled_for, *group.compiled_for)
    return Launch(_forward_kernel, arguments, group.cuts_tiles(config.longest), kind)
