# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""The backward pass for Hopper, written in Gluon: five products for a pair of tiles where two passes need seven.

A program owns a key tile. One warp copies the query tiles that see it; two consumer warpgroups own half of its keys
each, hold their dK and dV in registers and share what they know of a query tile, dS, through shared memory: each
multiplies all of it with half of the columns of K, or, up to 64 columns, half of its queries with all of K. Registers
are then left for the keys and values, too, and each product reads only one operand from shared memory. The
bulk copy engine adds a share of dQ to memory, in float32 and in no fixed order, so the last bits of dQ differ from call
to call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dilabench.kernels.fused.row_layout import PER_LENGTH, residue_box, residue_view
from dilabench.kernels.fused.sm90.backward_steps import (
    BUFFERS,
    add_queries,
    begin_keys,
    begin_queries,
    begin_scores,
    corner,
    dq_layout,
    half_of,
    store_sums,
    sums_of,
)
from dilabench.kernels.fused.sm90.tile_walk import (
    bias_of,
    box_place,
    class_of,
    end_of,
    find_work,
    seen_queries,
    segment_of,
    shifted,
    stats_row,
    tile_descriptor,
    tile_of,
    tiles_of,
    turned,
)
from dilabench.kernels.tuning import TileConfig, padded_dim, product_columns

_CONSUMER_REGISTERS = gl.constexpr(240)
_PRODUCER_REGISTERS = gl.constexpr(24)


class _Form(NamedTuple):
    """Compile-time constants. HEAD: columns of the tiles, zeros beyond DIM; FIRST and REST: those that products over
    columns take. HELD: what all steps multiply of keys and values is in registers; MORE: the last columns of dK and dV,
    sums of their own (with HELD that is 5 % slower), behind SUMS. SKIPS: the second consumer multiplies nothing where
    the causal edge hides all of its keys from a query tile.
    """

    DIM: int
    FIRST: int
    REST: int
    HEAD: int
    HELD: bool
    SUMS: int
    MORE: int
    BLOCK_M: int
    BLOCK_N: int
    STAGES: int
    CAUSAL: bool
    RAGGED: bool
    ADD: bool
    SHARED: bool
    PER_HEAD: bool
    COUNTED: bool
    BATCHED: bool
    SHIFTED: bool
    WINDOWED: bool
    SKIPS: bool

    def __repr__(self) -> str:
        """Part of the names of functions, which may not hold every sign."""
        return "_".join(str(int(value)) for value in self)


@gluon.constexpr_function
def _form(*values):
    return _Form(*values)


@gluon.jit
def _locate(grid, heads, tables, R, form: gl.constexpr):
    """The place of a program: batch, K/V head, super-segment, variant of lists, its item, and the key tile (negative:
    none) with its class.
    """
    n_supers, full_supers, n_items, n_blocks, item_major = grid
    _, _, heads_per_kv, first_kv_head, some_kv_heads = heads
    items_ptr, _, _, heads_ptr, _, _, visits_ptr = tables
    pid = gl.program_id(0)
    item = gl.where(item_major != 0, pid // n_blocks, pid % n_items)
    block = gl.where(item_major != 0, pid % n_blocks, pid // n_items)
    item, super_index, kv_head, batch, variant, n_items = find_work(
        item, block, visits_ptr, n_items, n_supers, full_supers, some_kv_heads
    )
    kv_head += first_kv_head
    if form.value.SHARED:
        item_ptr = items_ptr + ((kv_head if form.value.PER_HEAD else 0) * n_items + item) * 4
        tile = gl.load(item_ptr)
        residue = 0
    else:
        item_ptr = items_ptr + (variant * n_items + item) * 2
        u = gl.load(item_ptr)
        tile = gl.where(u < 0, u, gl.load(item_ptr + 1))
        residue = turned(u, gl.load(heads_ptr + kv_head * heads_per_kv * 2 + 1), R)
    return batch, kv_head, super_index, variant, item_ptr, tile, residue


@gluon.jit
def _list_of(head, residue, tile, variant, item_ptr, tables, R, form: gl.constexpr):
    """The list of a head: its first entry; the program's first place in it, that of masked entries, and the end; the
    class shift of the head.
    """
    _, lookup_ptr, entries_ptr, heads_ptr, n_kinds, n_tiles, _ = tables
    kind = gl.load(heads_ptr + head * 2)
    shift = gl.load(heads_ptr + head * 2 + 1)
    own = turned(residue, R - shift, R)
    list_at = lookup_ptr + (((variant * n_kinds + kind) * R + own) * n_tiles + tile) * 3
    low = 0
    n_full = gl.load(list_at + 1)
    n = n_full + gl.load(list_at + 2)
    if form.value.SHARED:
        low = gl.load(item_ptr + 1)
        n = gl.minimum(gl.load(item_ptr + 2), n)
    return entries_ptr + gl.load(list_at), low, n_full, n, shift


@gluon.jit
def _produce(descriptors, steps, grid, heads, rows, tables, tiles, barriers, R, form: gl.constexpr):
    """Copy the key tile, then the query tiles of its lists with their statistics."""
    HEAD: gl.constexpr = form.value.HEAD
    BLOCK_M: gl.constexpr = form.value.BLOCK_M
    BLOCK_N: gl.constexpr = form.value.BLOCK_N
    STAGES: gl.constexpr = form.value.STAGES
    SHIFTED: gl.constexpr = form.value.SHIFTED
    q_desc, k_desc, v_desc, dout_desc, stats_desc = descriptors
    q_steps, k_steps, v_steps, dout_steps = steps
    q_smem, k_smem, v_smem, dout_smem, stats_smem, _, _ = tiles
    key_full, query_full, query_empty, _, _ = barriers
    sizes, stats_rows, left_over, _ = rows
    n_heads, _, heads_per_kv, _, _ = heads
    class_rows = grid[0] * stats_rows
    batch, kv_head, super_index, variant, item_ptr, tile, residue = _locate(grid, heads, tables, R, form)
    first_stats = stats_row(super_index, sizes[5], stats_rows)
    base_row, first_place, _ends = segment_of(super_index, sizes, R, SHIFTED)
    if tile >= 0:
        box = (first_place, sizes[2], left_over)
        place, key_row = box_place(residue, base_row + tile * BLOCK_N, box, R, BLOCK_N, SHIFTED)
        mbarrier.expect(key_full, 2 * BLOCK_N * HEAD * 2)
        at = corner(batch, place, kv_head, key_row, 0, k_steps, form)
        tma.async_copy_global_to_shared(k_desc, at, key_full, k_smem.index(0))
        at = corner(batch, place, kv_head, key_row, 0, v_steps, form)
        tma.async_copy_global_to_shared(v_desc, at, key_full, v_smem.index(0))
        # For the consumers, step 0 has no preceding result.
        mbarrier.arrive(query_full.index(0), count=1)
        step = 1
        for member in range(heads_per_kv):
            head = kv_head * heads_per_kv + member
            first, low, _, n, shift = _list_of(head, residue, tile, variant, item_ptr, tables, R, form)
            head_stats = (batch * n_heads + head) * R
            for j in range(low, n):
                entry = gl.load(first + j)
                stage = step % STAGES
                phase = (step // STAGES) & 1
                partner = class_of(entry, shift, R)
                query_row = tile_of(entry) * BLOCK_M
                place, row = box_place(partner, base_row + query_row, box, R, BLOCK_M, SHIFTED)
                mbarrier.wait(query_empty.index(stage), phase ^ 1)
                full = query_full.index(stage)
                mbarrier.expect(full, 2 * BLOCK_M * (HEAD * 2 + 4))
                at = corner(batch, place, head, row, 0, q_steps, form)
                tma.async_copy_global_to_shared(q_desc, at, full, q_smem.index(stage))
                at = corner(batch, place, head, row, 0, dout_steps, form)
                tma.async_copy_global_to_shared(dout_desc, at, full, dout_smem.index(stage))
                own_stats = (head_stats + partner) * class_rows + first_stats + query_row
                tma.async_copy_global_to_shared(stats_desc, [2 * own_stats], full, stats_smem.index(stage))
                step += 1


@gluon.jit
def _step(half: gl.constexpr, dk, dv, given, MASKED: gl.constexpr, form: gl.constexpr):
    """dk and dv with a query tile added; its share of dS is written, that of the preceding step added to dQ."""
    SUMS: gl.constexpr = form.value.SUMS
    MORE: gl.constexpr = form.value.MORE
    HELD: gl.constexpr = form.value.HELD
    BLOCK_M: gl.constexpr = form.value.BLOCK_M
    STAGES: gl.constexpr = form.value.STAGES
    ROWS: gl.constexpr = form.value.BLOCK_N // 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    KEY_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SUMS, 16])
    MORE_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE if MORE else 16, 16])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    COLUMN_LAYOUT: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    step, entry, edge, held, previous, sums, scale_log2, tiles, barriers, zero = given
    query_row, query, partner, first_row, residue, end, window, R = edge
    q_smem, k_smem, v_smem, dout_smem, stats_smem, ds_smem, dq_smem = tiles
    _, query_full, query_empty, ds_full, turns = barriers
    stage = step % STAGES
    phase = (step // STAGES) & 1
    k_rows, v_rows, keys = held
    if not HELD:
        # Always 0, which the compiler does not know: it would keep every address of K and V.
        keys = entry >> 31
        k_rows = half_of(half, k_smem.index(keys), form, S_LAYOUT)
        v_rows = half_of(half, v_smem.index(keys), form, S_LAYOUT)
    mbarrier.wait(query_full.index(stage), phase)
    queries, douts = q_smem.index(stage), dout_smem.index(stage)
    # One consumer's softmax overlaps the other's products.
    mbarrier.wait(turns.index(half), 1 - half)
    logits = begin_scores(k_rows, queries, zero, form)
    dp = begin_scores(v_rows, douts, zero, form)
    mbarrier.arrive(turns.index(1 - half), count=1)
    stats = stats_smem.index(stage)
    log2_lse = stats.slice(0, BLOCK_M).load(COLUMN_LAYOUT)
    if form.value.COUNTED:
        log2_lse -= bias_of(entry)
    logits = warpgroup_mma_wait(2 if form.value.REST else 1, deps=[logits])
    p = gl.exp2(logits * scale_log2 - log2_lse[None, :])
    if form.value.RAGGED:
        key = first_row + gl.arange(0, ROWS, layout=ROW_LAYOUT)
        p = gl.where((key < end)[:, None], p, 0.0)
    if MASKED:
        key = first_row + gl.arange(0, ROWS, layout=ROW_LAYOUT)
        seen = seen_queries(query_row, query, partner, key, residue, window, R, form.value.CAUSAL, form.value.WINDOWED)
        p = gl.where(seen, p, 0.0)
    weights = p.to(q_smem.dtype)
    delta = stats.slice(BLOCK_M, BLOCK_M).load(COLUMN_LAYOUT)
    dp = warpgroup_mma_wait(0, deps=[dp])
    ds = (p * (dp - delta[None, :])).to(q_smem.dtype)
    ds_smem.index(step % BUFFERS).slice(half * ROWS, ROWS, dim=0).store(ds)
    fence_async_shared()
    # The preceding step's addition has left shared memory, too.
    tma.store_wait(0)
    gl.thread_barrier()
    mbarrier.arrive(ds_full.index(step % BUFFERS), count=1)
    mbarrier.wait(turns.index(half), half)
    dq = begin_queries(half, step - 1, keys, tiles, ds_full, form)
    next_dv = begin_keys(weights, douts, dv, form, KEY_LAYOUT, MORE_LAYOUT)
    next_dk = begin_keys(ds, queries, dk, form, KEY_LAYOUT, MORE_LAYOUT)
    mbarrier.arrive(turns.index(1 - half), count=1)
    dq = warpgroup_mma_wait(4 if MORE else 2, deps=[dq])
    add_queries(half, dq, sums, previous, dq_smem, form)
    dv, dk = sums_of(next_dv, next_dk, form)
    gl.thread_barrier()
    mbarrier.arrive(query_empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def _unseen(half: gl.constexpr, given, form: gl.constexpr):
    """`_step` where no query of the tile sees any of these keys: only the preceding step is added to dQ."""
    BLOCK_M: gl.constexpr = form.value.BLOCK_M
    ROWS: gl.constexpr = form.value.BLOCK_N // 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    step, entry, _, held, previous, sums, _, tiles, barriers, _ = given
    q_smem, _, _, _, _, ds_smem, dq_smem = tiles
    _, query_full, query_empty, ds_full, turns = barriers
    stage = step % form.value.STAGES
    _, _, keys = held
    if not form.value.HELD:
        keys = entry >> 31
    none = gl.full([ROWS, BLOCK_M], 0.0, q_smem.dtype, S_LAYOUT)
    ds_smem.index(step % BUFFERS).slice(half * ROWS, ROWS, dim=0).store(none)
    fence_async_shared()
    tma.store_wait(0)
    gl.thread_barrier()
    mbarrier.arrive(ds_full.index(step % BUFFERS), count=1)
    mbarrier.wait(query_full.index(stage), (step // form.value.STAGES) & 1)
    mbarrier.wait(turns.index(half), 1 - half)
    mbarrier.arrive(turns.index(1 - half), count=1)
    mbarrier.wait(turns.index(half), half)
    dq = begin_queries(half, step - 1, keys, tiles, ds_full, form)
    mbarrier.arrive(turns.index(1 - half), count=1)
    dq = warpgroup_mma_wait(0, deps=[dq])
    add_queries(half, dq, sums, previous, dq_smem, form)
    mbarrier.arrive(query_empty.index(stage), count=1)


@gluon.jit
def _consume(
    half: gl.constexpr, results, grid, heads, rows, tables, tiles, barriers, scale, scale_log2, R, form: gl.constexpr
):
    """Half of the keys of a tile: dk and dv in registers, and half of every share of dq."""
    DIM: gl.constexpr = form.value.DIM
    SUMS: gl.constexpr = form.value.SUMS
    MORE: gl.constexpr = form.value.MORE
    HEAD: gl.constexpr = form.value.HEAD
    HELD: gl.constexpr = form.value.HELD
    BLOCK_M: gl.constexpr = form.value.BLOCK_M
    BLOCK_N: gl.constexpr = form.value.BLOCK_N
    CAUSAL: gl.constexpr = form.value.CAUSAL
    WINDOWED: gl.constexpr = form.value.WINDOWED
    MASK: gl.constexpr = CAUSAL or WINDOWED
    ROWS: gl.constexpr = BLOCK_N // 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    KEY_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SUMS, 16])
    MORE_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE if MORE else 16, 16])
    SKIPS: gl.constexpr = half == 1 and form.value.SKIPS
    COLUMN_LAYOUT: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    sums, dk_ptr, dv_ptr, slots_ptr, length, n_slots = results
    q_smem, k_smem, v_smem, _, _, ds_smem, dq_smem = tiles
    key_full, _, query_empty, ds_full, _ = barriers
    sizes, _, _, window = rows
    _, n_kv_heads, heads_per_kv, first_kv_head, _ = heads
    batch, kv_head, super_index, variant, item_ptr, tile, residue = _locate(grid, heads, tables, R, form)
    if tile >= 0:
        none = gl.full([ROWS, SUMS], 0.0, gl.float32, KEY_LAYOUT)
        none_of_more = 0
        if MORE:
            none_of_more = gl.full([ROWS, MORE], 0.0, gl.float32, MORE_LAYOUT)
        dk = (none, none_of_more)
        dv = (none, none_of_more)
        zero = gl.full([ROWS, BLOCK_M], 0.0, gl.float32, S_LAYOUT)
        first_row = tile * BLOCK_N + half * ROWS
        base_row, first_place, ends = segment_of(super_index, sizes, R, form.value.SHIFTED)
        end = end_of(residue, ends)
        query = gl.arange(0, BLOCK_M, layout=COLUMN_LAYOUT)
        # Every step adds the preceding step's result to dQ; the first has none.
        ds_smem.index(0).slice(half * ROWS, ROWS, dim=0).store(gl.full([ROWS, BLOCK_M], 0.0, q_smem.dtype, S_LAYOUT))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(ds_full.index(0), count=1)
        mbarrier.arrive(query_empty.index(0), count=1)
        step = 1
        previous = (batch, 0, 0, base_row)
        mbarrier.wait(key_full, 0)
        held = (0, 0, 0)
        if HELD:
            SCORE_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S_LAYOUT, k_width=2)
            SHARE_LAYOUT: gl.constexpr = dq_layout(half, BLOCK_M, HEAD, form.value.REST, HELD)
            COLUMNS_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SHARE_LAYOUT, k_width=2)
            k_rows = half_of(half, k_smem.index(0), form, SCORE_LAYOUT)
            v_rows = half_of(half, v_smem.index(0), form, SCORE_LAYOUT)
            keys = k_smem.index(0).reshape([BLOCK_N, HEAD]).permute((1, 0)).load(COLUMNS_LAYOUT)
            held = (k_rows, v_rows, keys)
        for member in range(heads_per_kv):
            head = kv_head * heads_per_kv + member
            first, low, n_full, n, shift = _list_of(head, residue, tile, variant, item_ptr, tables, R, form)
            if not MASK:
                n_full = n
            for masked in gl.static_range(2 if MASK else 1):
                begin = low if masked == 0 else gl.maximum(low, n_full)
                stop = gl.minimum(n_full, n) if masked == 0 else n
                for j in range(begin, stop):
                    entry = gl.load(first + j)
                    partner = class_of(entry, shift, R)
                    query_row = tile_of(entry) * BLOCK_M
                    edge = (query_row, query, partner, first_row, residue, end, window, R)
                    given = (step, entry, edge, held, previous, sums, scale_log2, tiles, barriers, zero)
                    if SKIPS and masked == 1:
                        if query_row + BLOCK_M <= first_row:
                            _unseen(half, given, form)
                        else:
                            dk, dv = _step(half, dk, dv, given, True, form)
                    else:
                        dk, dv = _step(half, dk, dv, given, masked == 1, form)
                    query_row += base_row
                    if form.value.SHIFTED:
                        partner, query_row = shifted(partner, query_row, first_place, R)
                    previous = (batch, partner, head - first_kv_head * heads_per_kv, query_row)
                    step += 1
        if not HELD:
            keys = 0
        dq = begin_queries(half, step - 1, keys, tiles, ds_full, form)
        dq = warpgroup_mma_wait(0, deps=[dq])
        tma.store_wait(0)
        gl.thread_barrier()
        add_queries(half, dq, sums, previous, dq_smem, form)
        if form.value.ADD:
            # Until here programs overlapped the last ones of the preceding launch, which wrote the sums that they add
            # to.
            gdc_wait()
        slot = -1
        if form.value.SHARED:
            slot = gl.load(item_ptr + 3)
            if slot >= 0:
                place = (batch * n_kv_heads + kv_head).to(gl.int64) * n_slots + slot
                own = slots_ptr + place * (2 * BLOCK_N * HEAD) + half * (ROWS * HEAD)
                store_sums(dk, 1.0, own, HEAD, ROWS, False, ROWS, form)
                store_sums(dv, 1.0, own + BLOCK_N * HEAD, HEAD, ROWS, False, ROWS, form)
        if slot < 0:
            token = batch.to(gl.int64) * length + (base_row + first_row).to(gl.int64) * R + residue + first_place
            at = (token * n_kv_heads + kv_head) * DIM
            row_stride = n_kv_heads * R * DIM
            store_sums(dk, scale, dk_ptr + at, row_stride, end - first_row, form.value.ADD, ROWS, form)
            store_sums(dv, 1.0, dv_ptr + at, row_stride, end - first_row, form.value.ADD, ROWS, form)
        tma.store_wait(0)


@gluon.jit(do_not_specialize=PER_LENGTH)
def _backward_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    stats_desc,
    sums_desc,
    dk_ptr,
    dv_ptr,
    slots_ptr,
    items_ptr,
    lookup_ptr,
    entries_ptr,
    heads_ptr,
    visits_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    dout_token,
    dout_head,
    scale,
    scale_log2,
    n_supers,
    full_supers,
    n_kinds,
    n_items,
    n_tiles,
    n_heads,
    n_kv_heads,
    super_rows,
    super_tokens,
    whole_rows,
    longer_classes,
    window_left,
    window_right,
    left_over,
    length,
    stats_rows,
    n_blocks,
    item_major,
    n_slots,
    heads_per_kv,
    first_kv_head,
    some_kv_heads,
    R,
    DIM: gl.constexpr,
    FIRST: gl.constexpr,
    REST: gl.constexpr,
    HEAD: gl.constexpr,
    HELD: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    RAGGED: gl.constexpr,
    ADD: gl.constexpr,
    SHARED: gl.constexpr,
    PER_HEAD: gl.constexpr,
    COUNTED: gl.constexpr,
    BATCHED: gl.constexpr,
    SHIFTED: gl.constexpr,
    WINDOWED: gl.constexpr,
    SKIPS: gl.constexpr,
):
    gdc_launch_dependents()
    # As many as `corner` has numbers more than two.
    SIDES: gl.constexpr = 3 if DIM < HEAD else BATCHED
    q_smem = gl.allocate_shared_memory(q_desc.dtype, tiles_of(STAGES, SIDES, BLOCK_M, HEAD), q_desc.layout)
    k_smem = gl.allocate_shared_memory(q_desc.dtype, tiles_of(1, SIDES, BLOCK_N, HEAD), k_desc.layout)
    v_smem = gl.allocate_shared_memory(q_desc.dtype, tiles_of(1, SIDES, BLOCK_N, HEAD), v_desc.layout)
    dout_smem = gl.allocate_shared_memory(q_desc.dtype, tiles_of(STAGES, SIDES, BLOCK_M, HEAD), dout_desc.layout)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], q_desc.dtype)
    ds_smem = gl.allocate_shared_memory(q_desc.dtype, [BUFFERS, BLOCK_N, BLOCK_M], DS_LAYOUT)
    stats_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BLOCK_M], stats_desc.layout)
    SHARE: gl.constexpr = tiles_of(2, SIDES, BLOCK_M // 2, HEAD) if HELD else tiles_of(2, SIDES, BLOCK_M, HEAD // 2)
    dq_smem = gl.allocate_shared_memory(gl.float32, SHARE, sums_desc.layout)
    tiles = (q_smem, k_smem, v_smem, dout_smem, stats_smem, ds_smem, dq_smem)
    key_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    query_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    query_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    mbarrier.init(key_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(query_full.index(i), count=1)
        mbarrier.init(query_empty.index(i), count=2)
    for i in gl.static_range(BUFFERS):
        mbarrier.init(ds_full.index(i), count=2)
    fence_async_shared()
    barriers = (key_full, query_full, query_empty, ds_full, turns)
    descriptors = (q_desc, k_desc, v_desc, dout_desc, stats_desc)
    grid = (n_supers, full_supers, n_items, n_blocks, item_major)
    heads = (n_heads, n_kv_heads, heads_per_kv, first_kv_head, some_kv_heads)
    sizes = (super_rows, super_tokens, whole_rows, longer_classes, length, visits_ptr)
    rows = (sizes, stats_rows, left_over, (window_left, window_right))
    tables = (items_ptr, lookup_ptr, entries_ptr, heads_ptr, n_kinds, n_tiles, visits_ptr)
    steps = ((q_token, q_head), (k_token, k_head), (v_token, v_head), (dout_token, dout_head))
    sums = (sums_desc, (some_kv_heads * heads_per_kv * DIM, DIM))
    results = (sums, dk_ptr, dv_ptr, slots_ptr, length, n_slots)
    SUMS: gl.constexpr = HEAD if HELD else FIRST
    MORE: gl.constexpr = 0 if HELD else REST
    form: gl.constexpr = _form(
        DIM,
        FIRST,
        REST,
        HEAD,
        HELD,
        SUMS,
        MORE,
        BLOCK_M,
        BLOCK_N,
        STAGES,
        CAUSAL,
        RAGGED,
        ADD,
        SHARED,
        PER_HEAD,
        COUNTED,
        BATCHED,
        SHIFTED,
        WINDOWED,
        SKIPS,
    )
    gl.warp_specialize(
        [
            (_consume, (0, results, grid, heads, rows, tables, tiles, barriers, scale, scale_log2, R, form)),
            (_consume, (1, results, grid, heads, rows, tables, tiles, barriers, scale, scale_log2, R, form)),
            (_produce, (descriptors, steps, grid, heads, rows, tables, tiles, barriers, R, form)),
        ],
        [4, 1],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )


def tile_arguments(tensors: dict[str, Tensor], modulus: int, first_kv_head: int, config: TileConfig) -> dict[str, Any]:
    """The arguments of a launch for tensors, by their names.

    q, k, v and dout as `residue_view` or `residue_box` shows them, with the places of tiles in them; stats, dk, dv.
    H' heads, from those of ``first_kv_head`` on, add their shares of dq / scale to sums [B, N', H', D].
    """
    q, keys, sums, stats = (tensors[name] for name in ("q", "k", "sums", "stats"))
    dim, head, (first, rest) = q.shape[-1], padded_dim(q.shape[-1]), product_columns(q.shape[-1])
    # Two accumulators of 128 columns leave no registers for more.
    held = head <= 64
    rows = {"q": config.block_m, "k": config.block_n, "v": config.block_n, "dout": config.block_m}
    arguments: dict[str, Any] = {"DIM": dim, "FIRST": first, "REST": rest, "HEAD": head, "HELD": held}
    for name, size in rows.items():
        x = tensors[name]
        arguments[f"{name}_desc"] = tile_descriptor(x, _view(x, modulus), (size, head))
        arguments |= {f"{name}_token": x.stride(1), f"{name}_head": x.stride(2)}
    share = (config.block_m // 2, head) if held else (config.block_m, head // 2)
    return arguments | {
        "left_over": q.shape[1] % modulus,
        "SKIPS": False,
        "BATCHED": _lies_flat(q) and q.shape[0] > 1,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "sums_desc": tile_descriptor(sums, _view(sums, modulus), share),
        "stats_desc": tile_descriptor(stats, ([stats.numel()], [1]), (2 * config.block_m,)),
        "dk_ptr": tensors["dk"],
        "dv_ptr": tensors["dv"],
        "n_heads": q.shape[2],
        "n_kv_heads": keys.shape[2],
        "heads_per_kv": q.shape[2] // keys.shape[2],
        "first_kv_head": first_kv_head,
        "some_kv_heads": sums.shape[2] * keys.shape[2] // q.shape[2],
        "stats_rows": stats.shape[4] * stats.shape[6],
        "R": modulus,
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }


def _view(x: Tensor, modulus: int) -> tuple[list[int], list[int]]:
    return residue_view(x, modulus) if _lies_flat(x) else residue_box(x, modulus)


def _lies_flat(x: Tensor) -> bool:
    """Whether tiles are found by `residue_view`, as `corner` finds them: boxes only for columns of zeros."""
    return x.shape[-1] == padded_dim(x.shape[-1])
