# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""The fused forward for Hopper and float32 in three bfloat16 parts, written in Gluon: programs of one warpgroup.

Six products for one make the tensor cores the narrow place, not the softmax, so that one tile of keys and one of values
in shared memory are enough: the next keys are copied while weights are computed and multiplied, the next values while
the following scores are. Each program issues the next q.k products with the present p.v products and does the softmax
of the former while the latter run, as in `narrow_forward`.
"""

from __future__ import annotations

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

from dilabench.kernels.fused.branch_group import TILE_BITS
from dilabench.kernels.fused.row_layout import PER_LENGTH
from dilabench.kernels.fused.sm90.one_warpgroup import Kernel
from dilabench.kernels.fused.sm90.softmax import finish, walk, weigh
from dilabench.kernels.fused.sm90.tile_walk import (
    entry_place,
    segment_of,
    turned,
)
from dilabench.kernels.tuning import PARTS, padded_dim, parts_products

# What this kernel has no choice of.
_NOT_GIVEN = frozenset(("PRECISION", "STAGES", "num_stages"))
_PARTS = gl.constexpr(PARTS)
# Of `_begin_products`.
_PRODUCTS = gl.constexpr(6)
_TILE_BITS = gl.constexpr(TILE_BITS)


class _Form(NamedTuple):
    """What is compiled in. COLUMNS of the tiles, those beyond DIM are zeros. Products are over HEAD of them, and over
    the next TAIL.
    """

    DIM: int
    COLUMNS: int
    HEAD: int
    TAIL: int
    ROWS: int
    BLOCK_N: int
    CAUSAL: bool
    SHIFTED: bool
    WINDOWED: bool
    RAGGED: bool
    MERGE: bool
    COMPACT: bool
    # The maximum is renewed in every step: the softmax is not what takes the time.
    LARGEST: float = 0.0
    RANGES: int = 0

    def __repr__(self) -> str:
        """Part of the names of functions, which may not hold every sign."""
        return "_".join(str(int(value)) for value in self)


@gluon.constexpr_function
def _form(*values):
    return _Form(*values)


@gluon.jit
def _copy(desc, smem, barrier, entry, whose, route, ROWS: gl.constexpr, form: gl.constexpr):
    """Begin to copy the parts of the tile that a list entry names; ``whose``: batch item and head."""
    place, row = entry_place(entry, route, ROWS, form.value.SHIFTED)
    batch, head = whose
    mbarrier.expect(barrier, _PARTS * ROWS * form.value.COLUMNS * 2)
    for part in gl.static_range(_PARTS):
        tma.async_copy_global_to_shared(desc, [batch * _PARTS + part, place, head, row, 0], barrier, smem.index(part))


@gluon.jit
def _parts(smem, ROWS: gl.constexpr, FIRST: gl.constexpr, SOME: gl.constexpr, form: gl.constexpr):
    """Some columns of the parts of a tile."""
    return (
        _some_columns(smem.index(0), ROWS, FIRST, SOME, form),
        _some_columns(smem.index(1), ROWS, FIRST, SOME, form),
        _some_columns(smem.index(2), ROWS, FIRST, SOME, form),
    )


@gluon.jit
def _some_columns(smem, ROWS: gl.constexpr, FIRST: gl.constexpr, SOME: gl.constexpr, form: gl.constexpr):
    COLUMNS: gl.constexpr = form.value.COLUMNS
    tile = smem.reshape([ROWS, COLUMNS])
    return tile.slice(FIRST, SOME, dim=1) if SOME < COLUMNS else tile


@gluon.jit
def _begin_products(a, b, sums, ADDS: gl.constexpr):
    """The product of two tiles in parts, the smallest ones first; three of nine are below the last bit."""
    sums = warpgroup_mma(a[0], b[2], sums, use_acc=ADDS, is_async=True)
    sums = warpgroup_mma(a[2], b[0], sums, is_async=True)
    sums = warpgroup_mma(a[1], b[1], sums, is_async=True)
    sums = warpgroup_mma(a[0], b[1], sums, is_async=True)
    sums = warpgroup_mma(a[1], b[0], sums, is_async=True)
    return warpgroup_mma(a[0], b[0], sums, is_async=True)


@gluon.jit
def _begin_score(q_smem, k_smem, zero, form: gl.constexpr):
    """q.k over the first columns, and added to it over the last."""
    HEAD: gl.constexpr = form.value.HEAD
    TAIL: gl.constexpr = form.value.TAIL
    q = _parts(q_smem, form.value.ROWS, 0, HEAD, form)
    k = _parts(k_smem, form.value.BLOCK_N, 0, HEAD, form)
    logits = _begin_products(q, (k[0].permute((1, 0)), k[1].permute((1, 0)), k[2].permute((1, 0))), zero, False)
    if TAIL:
        q = _parts(q_smem, form.value.ROWS, HEAD, TAIL, form)
        k = _parts(k_smem, form.value.BLOCK_N, HEAD, TAIL, form)
        k = (k[0].permute((1, 0)), k[1].permute((1, 0)), k[2].permute((1, 0)))
        logits = _begin_products(q, k, logits, True)
    return logits


@gluon.jit
def _begin_sum(weights, v_smem, zero, FIRST: gl.constexpr, SOME: gl.constexpr, form: gl.constexpr):
    """p.v of one tile over some columns. By itself: tensor cores cut off what they add up instead of rounding it, which
    over the tiles of a long list would cost the last bits of a float32.
    """
    return _begin_products(weights, _parts(v_smem, form.value.BLOCK_N, FIRST, SOME, form), zero, False)


@gluon.jit
def _end_sum(acc, tail, decay, added, weights, v_smem, zero_tail, form: gl.constexpr):
    """Both sums with what was begun for the first columns, and with the last ones, whose registers it may take."""
    HEAD: gl.constexpr = form.value.HEAD
    TAIL: gl.constexpr = form.value.TAIL
    acc = acc * decay[:, None] + warpgroup_mma_wait(0, deps=[added])
    if TAIL:
        added = warpgroup_mma_wait(0, deps=[_begin_sum(weights, v_smem, zero_tail, HEAD, TAIL, form)])
        decay = gl.convert_layout(decay, gl.SliceLayout(1, tail.type.layout))
        tail = tail * decay[:, None] + added
    return acc, tail


@gluon.jit
def _split(p, LAYOUT: gl.constexpr):
    """The parts of weights as operands of a product."""
    first = p.to(gl.bfloat16)
    left = p - first.to(gl.float32)
    second = left.to(gl.bfloat16)
    third = (left - second.to(gl.float32)).to(gl.bfloat16)
    return gl.convert_layout(first, LAYOUT), gl.convert_layout(second, LAYOUT), gl.convert_layout(third, LAYOUT)


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
    """Tile j of a list: begin its scores and the sum over the tile before, weigh the former while the latter runs."""
    BLOCK_N: gl.constexpr = form.value.BLOCK_N
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    first, n, operands, whose, route, softmax = given
    k_desc, v_desc, q_smem, k_smem, v_smem, k_full, v_full = operands
    scale_log2, place, bounds, zero, zero_sum, zero_tail = softmax
    acc, tail, decay, sums, weights, entry, ahead = state
    _, _, _, R = route
    mbarrier.wait(k_full.index(0), j & 1)
    next_logits = _begin_score(q_smem, k_smem, zero, form)
    mbarrier.wait(v_full.index(0), (j - 1) & 1)
    added = _begin_sum(weights, v_smem, zero_sum, 0, form.value.HEAD, form)
    later = gl.load(first + gl.minimum(j + 2, n - 1))
    logits = warpgroup_mma_wait(_PRODUCTS, deps=[next_logits])
    # All four warps must be past a product before one thread lets its operands be written over.
    gl.thread_barrier()
    if j + 1 < n:
        _copy(k_desc, k_smem, k_full.index(0), ahead, whose, route, BLOCK_N, form)
    p, sums, next_decay = weigh(logits, sums, entry, scale_log2, place, bounds, MASKED, RENEWS, R, form, S_LAYOUT)
    acc, tail = _end_sum(acc, tail, decay, added, weights, v_smem, zero_tail, form)
    gl.thread_barrier()
    _copy(v_desc, v_smem, v_full.index(0), entry, whose, route, BLOCK_N, form)
    decay = gl.convert_layout(next_decay, gl.SliceLayout(1, O_LAYOUT))
    return acc, tail, decay, sums, _split(p, P_LAYOUT), ahead, later


@gluon.jit(do_not_specialize=PER_LENGTH)
def _parts_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    mass_ptr,
    items_ptr,
    entries_ptr,
    heads_ptr,
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
    before,
    behind,
    n_blocks,
    item_major,
    R,
    HEAD_DIM: gl.constexpr,
    COLUMNS: gl.constexpr,
    HEAD: gl.constexpr,
    TAIL: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    CAUSAL: gl.constexpr,
    SHIFTED: gl.constexpr,
    WINDOWED: gl.constexpr,
    RAGGED: gl.constexpr,
    MERGE: gl.constexpr,
    COMPACT: gl.constexpr,
):
    # One program: one query tile of one class.
    gdc_launch_dependents()
    form: gl.constexpr = _form(
        HEAD_DIM, COLUMNS, HEAD, TAIL, BLOCK_M, BLOCK_N, CAUSAL, SHIFTED, WINDOWED, RAGGED, MERGE, COMPACT
    )
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    STAT_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    MASK: gl.constexpr = CAUSAL or RAGGED or WINDOWED
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [_PARTS, 1, 1, 1, BLOCK_M, COLUMNS], q_desc.layout)
    k_smem = gl.allocate_shared_memory(q_desc.dtype, [_PARTS, 1, 1, 1, BLOCK_N, COLUMNS], k_desc.layout)
    v_smem = gl.allocate_shared_memory(q_desc.dtype, [_PARTS, 1, 1, 1, BLOCK_N, COLUMNS], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full.index(0), count=1)
    mbarrier.init(k_full.index(0), count=1)
    mbarrier.init(v_full.index(0), count=1)
    fence_async_shared()
    pid = gl.program_id(0)
    item = gl.where(item_major != 0, pid // n_blocks, pid % n_items)
    block = gl.where(item_major != 0, pid % n_blocks, pid // n_items)
    super_index = block % n_supers
    head = (block // n_supers) % n_heads
    batch = block // n_supers // n_heads
    kind = gl.load(heads_ptr + head * 2)
    shift = gl.load(heads_ptr + head * 2 + 1)
    variant = (super_index >= full_supers).to(gl.int32)
    item_ptr = items_ptr + ((variant * n_kinds + kind) * n_items + item) * 5
    u = gl.load(item_ptr)
    tile = gl.load(item_ptr + 1)
    first = entries_ptr + gl.load(item_ptr + 2)
    n_full = gl.load(item_ptr + 3)
    n = n_full + gl.load(item_ptr + 4)
    if u >= 0:
        sizes = (super_rows, super_tokens, whole_rows, longer_classes, length)
        base_row, first_place, ends = segment_of(super_index, sizes, R, SHIFTED)
        route = (base_row, shift, (first_place, whole_rows, left_over), R)
        whose = (batch, head // heads_per_kv)
        _copy(q_desc, q_smem, q_full.index(0), (u << _TILE_BITS) | tile, (batch, head), route, BLOCK_M, form)
        entry = gl.load(first)
        _copy(k_desc, k_smem, k_full.index(0), entry, whose, route, BLOCK_N, form)
        _copy(v_desc, v_smem, v_full.index(0), entry, whose, route, BLOCK_N, form)
        following = gl.load(first + gl.minimum(1, n - 1))
        ahead = gl.load(first + gl.minimum(2, n - 1))
        residue = turned(u, shift, R)
        place = (tile * BLOCK_M, residue, shift, ends)
        bounds = (items_ptr, 0, (before, behind))
        zero = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, S_LAYOUT)
        top = gl.full([BLOCK_M], float("-inf"), gl.float32, STAT_LAYOUT)
        total = gl.full([BLOCK_M], 0.0, gl.float32, STAT_LAYOUT)
        mbarrier.wait(q_full.index(0), 0)
        mbarrier.wait(k_full.index(0), 0)
        logits = warpgroup_mma_wait(0, deps=[_begin_score(q_smem, k_smem, zero, form)])
        gl.thread_barrier()
        if n > 1:
            _copy(k_desc, k_smem, k_full.index(0), following, whose, route, BLOCK_N, form)
        sums = (top, total, total)
        p, sums, _ = weigh(logits, sums, entry, scale_log2, place, bounds, MASK, True, R, form, S_LAYOUT)
        acc = gl.full([BLOCK_M, HEAD], 0.0, gl.float32, O_LAYOUT)
        zero_sum = acc
        tail = 0.0
        if TAIL:
            TAIL_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16])
            tail = gl.full([BLOCK_M, TAIL], 0.0, gl.float32, TAIL_LAYOUT)
        zero_tail = tail
        decay = gl.full([BLOCK_M], 0.0, gl.float32, gl.SliceLayout(1, O_LAYOUT))
        operands = (k_desc, v_desc, q_smem, k_smem, v_smem, k_full, v_full)
        state = (acc, tail, decay, sums, _split(p, P_LAYOUT), following, ahead)
        given = (first, n, operands, whose, route, (scale_log2, place, bounds, zero, zero_sum, zero_tail))
        state = walk(_step, n_full, n, 0, state, given, form, S_LAYOUT, O_LAYOUT)
        acc, tail, decay, sums, weights, following, ahead = state
        mbarrier.wait(v_full.index(0), (n - 1) & 1)
        added = _begin_sum(weights, v_smem, zero_sum, 0, HEAD, form)
        acc, tail = _end_sum(acc, tail, decay, added, weights, v_smem, zero_tail, form)
        rows = (batch, head, n_heads, super_index, sizes, base_row, first_place)
        finish(acc, tail, sums[0], sums[1], (out_ptr, lse_ptr, mass_ptr), rows, place, R, form, S_LAYOUT)


def kernel_for(q: Tensor) -> Kernel:
    """The kernel for queries in parts, [3B, N, H, D]."""
    head, tail = parts_products(q.shape[-1])
    own = {"COLUMNS": padded_dim(q.shape[-1]), "HEAD": head, "TAIL": tail}
    return Kernel(_parts_kernel, own, _NOT_GIVEN)
