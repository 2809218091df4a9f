# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""The fused forward for Hopper and head dims up to 64, written in Gluon: programs of one warpgroup, three at a time.

At narrow heads the softmax takes longer than the products, and two consumers (`forward`) leave the tensor cores
idle. Three small programs share a multiprocessor instead; each issues the next q.k product with the present p.v product
and does the softmax of the former while the latter runs. Copies are begun by the warps that compute, a tile ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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

from dilabench.kernels.fused.branch_group import TILE_BITS, BranchGroup
from dilabench.kernels.fused.packing import query_lists
from dilabench.kernels.fused.row_layout import PER_LENGTH, Results, residue_box, shared_arguments
from dilabench.kernels.fused.sm90.softmax import KEPT, LARGEST_SUM, finish, walk, weigh
from dilabench.kernels.fused.sm90.tile_walk import (
    entry_place,
    find_work,
    segment_of,
    tile_descriptor,
    turned,
)
from dilabench.kernels.launch_cache import Arguments, Launch
from dilabench.kernels.tuning import TileConfig, padded_dim, product_columns

# Constants of this kernel.
_NOT_GIVEN = frozenset(("TAIL", "PRECISION", "STAGES", "num_stages"))
# Tile j of a list is in stage j % 2.
_STAGES = gl.constexpr(2)
_TILE_BITS = gl.constexpr(TILE_BITS)


class _Form(NamedTuple):
    """Compile-time constants. HEAD: columns of the tiles, zeros beyond DIM; REST: the last columns of q.k, in a
    separate product. Separate sums of values would be 2 % slower.
    """

    DIM: int
    HEAD: int
    REST: int
    ROWS: int
    BLOCK_N: int
    CAUSAL: bool
    SHIFTED: bool
    WINDOWED: bool
    RAGGED: bool
    MERGE: bool
    COMPACT: bool
    LARGEST: float
    TAIL: int = 0
    RANGES: int = 0

    def __repr__(self) -> str:
        """Part of the names of functions, which may not hold every sign."""
        return "_".join(str(int(value)) for value in self)


@gluon.constexpr_function
def _form(*values):
    return _Form(*values)


@gluon.jit
def _copy(desc, smem, barrier, entry, whose, route, ROWS: gl.constexpr, form: gl.constexpr):
    """Begin to copy the tile that a list entry names; ``whose``: batch item and head."""
    mbarrier.expect(barrier, ROWS * form.value.HEAD * 2)
    _begin_copy(desc, smem, barrier, whose, entry_place(entry, route, ROWS, form.value.SHIFTED), True)


@gluon.jit
def _begin_copy(desc, smem, barrier, whose, at, wanted):
    batch, head = whose
    place, row = at
    tma.async_copy_global_to_shared(desc, [batch, place, head, row, 0], barrier, smem, wanted)


@gluon.jit
def _begin_score(q_smem, k_smem, stage, zero, form: gl.constexpr):
    HEAD: gl.constexpr = form.value.HEAD
    REST: gl.constexpr = form.value.REST
    FIRST: gl.constexpr = HEAD // 2 if REST else HEAD
    q = q_smem.reshape([form.value.ROWS, HEAD])
    k = k_smem.index(stage).reshape([form.value.BLOCK_N, HEAD])
    columns = k.slice(0, FIRST, dim=1)
    logits = warpgroup_mma(q.slice(0, FIRST, dim=1), columns.permute((1, 0)), zero, use_acc=False, is_async=True)
    if REST:
        columns = k.slice(FIRST, REST, dim=1)
        logits = warpgroup_mma(q.slice(FIRST, REST, dim=1), columns.permute((1, 0)), logits, is_async=True)
    return logits


@gluon.jit
def _begin_sum(weights, v_smem, stage, acc, form: gl.constexpr):
    v = v_smem.index(stage).reshape([form.value.BLOCK_N, form.value.HEAD])
    return warpgroup_mma(weights, v, acc, is_async=True)


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
    BLOCK_N: gl.constexpr = form.value.BLOCK_N
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    begun, first, n, operands, whose, route, softmax = given
    k_desc, v_desc, q_smem, k_smem, v_smem, k_full, v_full = operands
    scale_log2, place, bounds, zero = softmax
    acc, sums, weights, entry, ahead = state
    _, _, _, R = route
    stage = (begun + j) & 1
    previous = 1 - stage
    mbarrier.wait(k_full.index(stage), ((begun + j) >> 1) & 1)
    next_logits = _begin_score(q_smem, k_smem, stage, zero, form)
    mbarrier.wait(v_full.index(previous), ((begun + j - 1) >> 1) & 1)
    next_acc = _begin_sum(weights, v_smem, previous, acc, form)
    # The next copy is determined while products run; after them come a barrier for all warps, and the copies.
    following, one_more = j + 1 < n, j + 2 < n
    mbarrier.expect(v_full.index(previous), BLOCK_N * form.value.HEAD * 2, following)
    mbarrier.expect(k_full.index(stage), BLOCK_N * form.value.HEAD * 2, one_more)
    later = gl.load(first + gl.minimum(j + 2, n - 1))
    logits = warpgroup_mma_wait(1, deps=[next_logits])
    p, sums, decay = weigh(logits, sums, entry, scale_log2, place, bounds, MASKED, RENEWS, R, form, S_LAYOUT)
    values_at = entry_place(ahead, route, BLOCK_N, form.value.SHIFTED)
    keys_at = entry_place(later, route, BLOCK_N, form.value.SHIFTED)
    acc = warpgroup_mma_wait(0, deps=[next_acc])
    # All four warps must be past a product before one thread lets its operands be written over.
    gl.thread_barrier()
    _begin_copy(v_desc, v_smem.index(previous), v_full.index(previous), whose, values_at, following)
    _begin_copy(k_desc, k_smem.index(stage), k_full.index(stage), whose, keys_at, one_more)
    if RENEWS:
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, O_LAYOUT))[:, None]
    weights = gl.convert_layout(p.to(v_desc.dtype), P_LAYOUT)
    return acc, sums, weights, ahead, later


@gluon.jit(do_not_specialize=PER_LENGTH)
def _narrow_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    mass_ptr,
    items_ptr,
    entries_ptr,
    heads_ptr,
    visits_ptr,
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
    super_rows,
    super_tokens,
    window_left,
    window_right,
    n_blocks,
    item_major,
    R,
    HEAD_DIM: gl.constexpr,
    HEAD: gl.constexpr,
    REST: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    CAUSAL: gl.constexpr,
    SHIFTED: gl.constexpr,
    WINDOWED: gl.constexpr,
    RAGGED: gl.constexpr,
    MERGE: gl.constexpr,
    COMPACT: gl.constexpr,
    LARGEST: gl.constexpr,
):
    # One program: one query tile of one class.
    gdc_launch_dependents()
    form: gl.constexpr = _form(
        HEAD_DIM, HEAD, REST, BLOCK_M, BLOCK_N, CAUSAL, SHIFTED, WINDOWED, RAGGED, MERGE, COMPACT, LARGEST
    )
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    STAT_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    MASK: gl.constexpr = CAUSAL or RAGGED or WINDOWED
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [1, 1, 1, BLOCK_M, HEAD], q_desc.layout)
    k_smem = gl.allocate_shared_memory(q_desc.dtype, [_STAGES, 1, 1, 1, BLOCK_N, HEAD], k_desc.layout)
    v_smem = gl.allocate_shared_memory(q_desc.dtype, [_STAGES, 1, 1, 1, BLOCK_N, HEAD], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full.index(0), count=1)
    for i in gl.static_range(_STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    fence_async_shared()
    pid = gl.program_id(0)
    item = gl.where(item_major != 0, pid // n_blocks, pid % n_items)
    block = gl.where(item_major != 0, pid % n_blocks, pid // n_items)
    item, super_index, head, batch, variant, n_items = find_work(
        item, block, visits_ptr, n_items, n_supers, full_supers, n_heads
    )
    kind = gl.load(heads_ptr + head * 2)
    shift = gl.load(heads_ptr + head * 2 + 1)
    item_ptr = items_ptr + ((variant * n_kinds + kind) * n_items + item) * 5
    u = gl.load(item_ptr)
    tile = gl.load(item_ptr + 1)
    first = entries_ptr + gl.load(item_ptr + 2)
    n_full = gl.load(item_ptr + 3)
    n = n_full + gl.load(item_ptr + 4)
    if u >= 0:
        sizes = (super_rows, super_tokens, whole_rows, longer_classes, length, visits_ptr)
        base_row, first_place, ends = segment_of(super_index, sizes, R, SHIFTED)
        route = (base_row, shift, (first_place, whole_rows, left_over), R)
        whose = (batch, head // heads_per_kv)
        _copy(q_desc, q_smem, q_full.index(0), (u << _TILE_BITS) | tile, (batch, head), route, BLOCK_M, form)
        residue = turned(u, shift, R)
        place = (tile * BLOCK_M, residue, shift, ends)
        bounds = (items_ptr, 0, (window_left, window_right))
        zero = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, S_LAYOUT)
        softmax = (scale_log2, place, bounds, zero)
        operands = (k_desc, v_desc, q_smem, k_smem, v_smem, k_full, v_full)
        # Tiles before this walk through the list, and how many steps of it leave the running maximum as it was.
        begun = 0
        kept = KEPT
        top = gl.full([BLOCK_M], float("-inf"), gl.float32, STAT_LAYOUT)
        total = gl.full([BLOCK_M], 0.0, gl.float32, STAT_LAYOUT)
        acc = gl.full([BLOCK_M, HEAD], 0.0, gl.float32, O_LAYOUT)
        mbarrier.wait(q_full.index(0), 0)
        while kept >= 0:
            stage = begun % _STAGES
            entry = gl.load(first)
            _copy(k_desc, k_smem.index(stage), k_full.index(stage), entry, whose, route, BLOCK_N, form)
            _copy(v_desc, v_smem.index(stage), v_full.index(stage), entry, whose, route, BLOCK_N, form)
            following = gl.load(first + gl.minimum(1, n - 1))
            if n > 1:
                _copy(k_desc, k_smem.index(1 - stage), k_full.index(1 - stage), following, whose, route, BLOCK_N, form)
                _copy(v_desc, v_smem.index(1 - stage), v_full.index(1 - stage), following, whose, route, BLOCK_N, form)
            top = gl.full([BLOCK_M], float("-inf"), gl.float32, STAT_LAYOUT)
            total = gl.full([BLOCK_M], 0.0, gl.float32, STAT_LAYOUT)
            sums = (top, total, total)
            mbarrier.wait(k_full.index(stage), (begun // _STAGES) & 1)
            logits = warpgroup_mma_wait(0, deps=[_begin_score(q_smem, k_smem, stage, zero, form)])
            gl.thread_barrier()
            # The tile two steps ahead: its keys are copied now, its values when the present ones are done with.
            ahead = gl.load(first + gl.minimum(2, n - 1))
            if n > 2:
                _copy(k_desc, k_smem.index(stage), k_full.index(stage), ahead, whose, route, BLOCK_N, form)
            p, sums, _ = weigh(logits, sums, entry, scale_log2, place, bounds, MASK, True, R, form, S_LAYOUT)
            weights = gl.convert_layout(p.to(q_desc.dtype), P_LAYOUT)
            acc = gl.full([BLOCK_M, HEAD], 0.0, gl.float32, O_LAYOUT)
            state = (acc, sums, weights, following, ahead)
            given = (begun, first, n, operands, whose, route, softmax)
            state = walk(_step, n_full, n, kept, state, given, form, S_LAYOUT, O_LAYOUT)
            acc, sums, weights, following, ahead = state
            top, total, largest = sums
            stage = (begun + n - 1) % _STAGES
            mbarrier.wait(v_full.index(stage), ((begun + n - 1) // _STAGES) & 1)
            acc = warpgroup_mma_wait(0, deps=[_begin_sum(weights, v_smem, stage, acc, form)])
            gl.thread_barrier()
            begun += n
            # A weight may have overflowed: once more, with a maximum renewed in every step.
            kept = gl.where((kept > 0) & (gl.max(largest, 0) > LARGEST), 0, -1)
        rows = (batch, head, n_heads, super_index, sizes, base_row, first_place)
        finish(acc, 0, top, total, (out_ptr, lse_ptr, mass_ptr), rows, place, R, form, S_LAYOUT)


def group_launch(
    operands: Mapping[str, Tensor],
    results: Results,
    group: BranchGroup,
    causal: bool,
    scale: float,
    config: TileConfig,
) -> Launch:
    """As `forward.group_launch`."""
    q, k, v = (operands[name] for name in "qkv")
    dim = q.shape[-1]
    n_items, lists = query_lists(operands, group, config, causal)
    rows = {"q": config.block_m, "k": config.block_n, "v": config.block_n}

    def arguments(ragged: bool) -> Arguments:
        grid, shared = shared_arguments(q, k, n_items, group, q.shape[2], causal, scale, config)
        given = {name: value for name, value in shared.items() if name not in _NOT_GIVEN}
        tiles = {
            f"{name}_desc": tile_descriptor(x, residue_box(x, group.modulus), (rows[name], padded_dim(dim)))
            for name, x in (("q", q), ("k", k), ("v", v))
        }
        more = {
            "out_ptr": results.out,
            "lse_ptr": results.lse,
            "mass_ptr": results.mass,
            **lists,
            "heads_per_kv": group.heads_per_kv,
            "RAGGED": (ragged or group.documents > 0) and not causal,
            "MERGE": results.merge,
            "COMPACT": results.compact,
            "REST": product_columns(dim)[1],
            "LARGEST": LARGEST_SUM[q.dtype],
            "launch_pdl": results.follows,
        }
        return grid, given | tiles | more

    kind = (*results.out.shape[2:], causal, config, *results.compiled_for, *group.compiled_for)
    return Launch(_narrow_kernel, arguments, group.cuts_tiles(config.longest), kind)
