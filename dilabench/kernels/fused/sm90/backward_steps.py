# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""The products of a consumer of the Hopper backward at a step, and how it passes on the results.

``form``: compile-time constants (`backward._Form`).
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dilabench.kernels.fused.sm90.tile_walk import view_place

# Tiles of dS that are kept. A consumer writes that of a step over the one of four steps before, for it has seen that of
# two steps before from the other, which by then had done with the older one.
BUFFERS = gl.constexpr(4)


@builtin
def add_shared_to_global(tensor_desc, coord, src, _semantic=None):
    """Begin to add a tile of shared memory to one of a tensor, element by element."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@gluon.constexpr_function
def share_columns(half, head, rest):
    """The columns of K that a consumer multiplies with all of dS, unless HELD."""
    return rest if half == 1 and rest else head // 2


@gluon.constexpr_function
def dq_layout(half, rows, head, rest, held):
    """The layout of a consumer's share of dQ."""
    columns = rows // 2 if held else share_columns(half, head, rest)
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def corner(batch, place, head, row, column, steps, form: gl.constexpr):
    """The place of a tile in `residue_box`, or in `residue_view` if no columns of zeros are needed: at D128 fewer
    numbers are 4 % faster. ``steps``: columns from a place and from a head to the next.
    """
    class_step, head_step = steps
    boxed = (batch, place, head, row, column)
    flat = view_place(batch, row, place * class_step + head * head_step + column, form.value.BATCHED)
    return boxed if form.value.DIM < form.value.HEAD else flat


@gluon.jit
def begin_scores(keys, queries, zero, form: gl.constexpr):
    """Begin keys . queries^T of half of the keys, of k and q as of v and dout."""
    FIRST: gl.constexpr = form.value.FIRST
    first, rest = keys
    queries = queries.reshape([form.value.BLOCK_M, form.value.HEAD])
    columns = queries.slice(0, FIRST, dim=1)
    found = warpgroup_mma(first, columns.permute((1, 0)), zero, use_acc=False, is_async=True)
    if form.value.REST:
        columns = queries.slice(FIRST, form.value.REST, dim=1)
        found = warpgroup_mma(rest, columns.permute((1, 0)), found, is_async=True)
    return found


@gluon.jit
def half_of(half: gl.constexpr, tile, form: gl.constexpr, LAYOUT: gl.constexpr):
    """Half of a tile of keys or values as `begin_scores` takes it, with HELD in registers."""
    ROWS: gl.constexpr = form.value.BLOCK_N // 2
    REST: gl.constexpr = form.value.REST
    rows = tile.reshape([form.value.BLOCK_N, form.value.HEAD]).slice(half * ROWS, ROWS, dim=0)
    first = rows.slice(0, form.value.FIRST, dim=1)
    rest = rows.slice(form.value.FIRST, REST, dim=1) if REST else first
    if form.value.HELD:
        first = first.load(LAYOUT)
        rest = rest.load(LAYOUT)
    return first, rest


@gluon.jit
def begin_queries(half: gl.constexpr, step, keys, tiles, ds_full, form: gl.constexpr):
    """Begin a consumer's share of dS.K of a step: half of its columns, or with HELD ``keys`` half of its queries,
    turned over.
    """
    BLOCK_M: gl.constexpr = form.value.BLOCK_M
    HEAD: gl.constexpr = form.value.HEAD
    LAYOUT: gl.constexpr = dq_layout(half, BLOCK_M, HEAD, form.value.REST, form.value.HELD)
    k_smem, ds_smem = tiles[1], tiles[5]
    mbarrier.wait(ds_full.index(step % BUFFERS), (step // BUFFERS) & 1)
    ds = ds_smem.index(step % BUFFERS)
    if form.value.HELD:
        zero = gl.full([HEAD, BLOCK_M // 2], 0.0, gl.float32, LAYOUT)
        mine = ds.slice(half * (BLOCK_M // 2), BLOCK_M // 2, dim=1)
        share = warpgroup_mma(keys, mine, zero, use_acc=False, is_async=True)
    else:
        COLUMNS: gl.constexpr = share_columns(half, HEAD, form.value.REST)
        zero = gl.full([BLOCK_M, COLUMNS], 0.0, gl.float32, LAYOUT)
        columns = k_smem.index(keys).reshape([form.value.BLOCK_N, HEAD]).slice(half * (HEAD // 2), COLUMNS, dim=1)
        share = warpgroup_mma(ds.permute((1, 0)), columns, zero, use_acc=False, is_async=True)
    return share


@gluon.jit
def begin_keys(rows, queries, sums, form: gl.constexpr, LAYOUT: gl.constexpr, MORE_LAYOUT: gl.constexpr):
    """Begin to add rows.queries to the sums of half of the keys: of dS and q to dK, of weights and dout to dV."""
    SUMS: gl.constexpr = form.value.SUMS
    MORE: gl.constexpr = form.value.MORE
    first, more = sums
    queries = queries.reshape([form.value.BLOCK_M, form.value.HEAD])
    operand = gl.convert_layout(rows, gl.DotOperandLayout(operand_index=0, parent=LAYOUT, k_width=2))
    first = warpgroup_mma(operand, queries.slice(0, SUMS, dim=1), first, is_async=True)
    if MORE:
        operand = gl.convert_layout(rows, gl.DotOperandLayout(operand_index=0, parent=MORE_LAYOUT, k_width=2))
        more = warpgroup_mma(operand, queries.slice(SUMS, MORE, dim=1), more, is_async=True)
    return first, more


@gluon.jit
def sums_of(dv, dk, form: gl.constexpr):
    """Both sums of `begin_keys` when no product is in flight any more."""
    dv, more_dv = dv
    dk, more_dk = dk
    if form.value.MORE:
        dv, dk, more_dv, more_dk = warpgroup_mma_wait(0, deps=[dv, dk, more_dv, more_dk])
    else:
        dv, dk = warpgroup_mma_wait(0, deps=[dv, dk])
    return (dv, more_dv), (dk, more_dk)


@gluon.jit
def add_queries(half: gl.constexpr, dq, sums, at, dq_smem, form: gl.constexpr):
    """Begin to add a share of dQ to memory; no earlier copy from this buffer may be in flight. ``sums``: their
    descriptor, and `corner`'s steps; ``at``: batch item, class, head and row.
    """
    BLOCK_M: gl.constexpr = form.value.BLOCK_M
    HEAD: gl.constexpr = form.value.HEAD
    batch, place, head, row = at
    share = dq_smem.index(half)
    if form.value.HELD:
        share.reshape([BLOCK_M // 2, HEAD]).permute((1, 0)).store(dq)
    else:
        # Later columns are beyond DIM and not added.
        share.reshape([BLOCK_M, HEAD // 2]).slice(0, share_columns(half, HEAD, form.value.REST), dim=1).store(dq)
    fence_async_shared()
    gl.thread_barrier()
    sums_desc, steps = sums
    row = row + (half * (BLOCK_M // 2) if form.value.HELD else 0)
    column = 0 if form.value.HELD else half * (HEAD // 2)
    add_shared_to_global(sums_desc, corner(batch, place, head, row, column, steps, form), share)


@gluon.jit
def _store_columns(x, ptr, row_stride, end, ADD: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, DIM):
    LAYOUT: gl.constexpr = x.type.layout
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    at = ptr + rows.to(gl.int64)[:, None] * row_stride + columns[None, :]
    inside = (rows < end)[:, None]
    if DIM < COLUMNS:
        inside = inside & (columns < DIM)[None, :]
    if ADD:
        x += gl.load(at, inside, 0.0).to(gl.float32)
    gl.store(at, x.to(ptr.dtype.element_ty), inside)


@gluon.jit
def store_sums(sums, factor, ptr, row_stride, end, ADD: gl.constexpr, ROWS: gl.constexpr, form: gl.constexpr):
    """Write rows before ``end`` of ``factor`` times the sums of dK or dV, with ADD to what is there."""
    DIM: gl.constexpr = form.value.DIM
    SUMS: gl.constexpr = form.value.SUMS
    MORE: gl.constexpr = form.value.MORE
    first, more = sums
    _store_columns(first * factor, ptr, row_stride, end, ADD, ROWS, SUMS, DIM)
    if MORE:
        _store_columns(more * factor, ptr + SUMS, row_stride, end, ADD, ROWS, MORE, DIM - SUMS)
