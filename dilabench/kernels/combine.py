# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""Sums and merges partial results on ranges of rows in one pass: each part is read once, the result written once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilabench.kernels.launch_cache import launch_once
from dilabench.kernels.lse import by_row, has_kernel, share_of
from dilabench.kernels.row_programs import row_program
from dilabench.kernels.softmax import finite

# Ranges go to the kernels in units of 1/16 row: Triton compiles again for integers that are 1, a multiple of 16 or
# neither, in any combination of parts.
UNIT: tl.constexpr = tl.constexpr(16)

RowSum = tuple[Tensor, int]
RowSoftmax = tuple[Tensor, Tensor, int]


@triton.jit
def _tile(n_rows, n_heads, ROWS: tl.constexpr):
    # Heads vary fastest over programs, so that programs in flight touch neighbouring memory.
    pid = tl.program_id(0)
    head = (pid % n_heads).to(tl.int64)
    rest = pid // n_heads
    n_blocks = tl.cdiv(n_rows, ROWS)
    rows = (rest % n_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return (rest // n_blocks).to(tl.int64), head, rows


@triton.jit
def _places(ptr, strides, batch, rows, head, columns):
    return ptr + batch * strides[0] + rows[:, None] * strides[1] + head * strides[2] + columns[None, :]


@triton.jit
def _load(ptr, strides, batch, rows, head, columns, read, DIM: tl.constexpr):
    places = _places(ptr, strides, batch, rows, head, columns)
    return tl.load(places, mask=read[:, None] & (columns < DIM)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _load_lse(ptr, batch, rows, head, count, n_heads):
    places = ptr + (batch * n_heads + head) * count + rows
    return tl.load(places, mask=(rows >= 0) & (rows < count), other=float("-inf")).to(tl.float32)


@triton.jit(do_not_specialize=["n_rows", "n_heads"])
def _sum_kernel(
    total_ptr,
    total_strides,
    parts,
    part_strides,
    firsts,
    counts,
    n_rows,
    n_heads,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    batch, head, rows = _tile(n_rows, n_heads, ROWS)
    columns = tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for part in tl.static_range(len(parts)):
        own = rows - firsts[part] // UNIT
        covered = (own >= 0) & (own < counts[part] // UNIT)
        total += _load(parts[part], part_strides[part], batch, own, head, columns, covered, DIM)
    # The result may be one of the parts: no thread may write what another has yet to read.
    tl.debug_barrier()
    places = _places(total_ptr, total_strides, batch, rows, head, columns)
    inside = (rows < n_rows)[:, None] & (columns < DIM)[None, :]
    tl.store(places, total.to(total_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_rows", "n_heads"])
def _combine_kernel(
    out_ptr,
    lse_ptr,
    out_strides,
    lse_strides,
    parts,
    lses,
    part_strides,
    firsts,
    counts,
    n_rows,
    n_heads,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    batch, head, rows = _tile(n_rows, n_heads, ROWS)
    columns = tl.arange(0, COLUMNS)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    for part in tl.static_range(len(parts)):
        own = rows - firsts[part] // UNIT
        top = tl.maximum(top, _load_lse(lses[part], batch, own, head, counts[part] // UNIT, n_heads))
    top = finite(top)
    weights = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, COLUMNS), tl.float32)
    for part in tl.static_range(len(parts)):
        own = rows - firsts[part] // UNIT
        weight = tl.exp(_load_lse(lses[part], batch, own, head, counts[part] // UNIT, n_heads) - top)
        # An empty row is not read: its memory may be uninitialised.
        values = _load(parts[part], part_strides[part], batch, own, head, columns, weight > 0.0, DIM)
        out += values * weight[:, None]
        weights += weight
    out = out / tl.where(weights == 0.0, 1.0, weights)[:, None]
    # The result may be one of the parts: no thread may write what another has yet to read.
    tl.debug_barrier()
    inside = rows < n_rows
    places = _places(out_ptr, out_strides, batch, rows, head, columns)
    tl.store(places, out.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (columns < DIM)[None, :])
    lse_places = lse_ptr + batch * lse_strides[0] + head * lse_strides[1] + rows * lse_strides[2]
    tl.store(lse_places, top + tl.log(weights), mask=inside)


def sum_parts_(total: Tensor, parts: Sequence[RowSum]) -> None:
    """Overwrite total [B, N, H, D] with the sum of parts; rows that none covers become 0.

    parts: at least one (x, first), x [B, R, H, D] in any dtype and with any strides, on rows [first, first + R).
    `total` may be one of them. Raises ValueError when a part does not fit.
    """
    _check(total, [(x, first) for x, first in parts])
    if total.numel() == 0:
        return
    if has_kernel(total.device, total.dtype):
        _sum_triton_(total, parts)
    else:
        sum_parts_torch_(total, parts)


def combine_(out: Tensor, lse: Tensor, parts: Sequence[RowSoftmax]) -> None:
    """Overwrite out [B, N, H, D] and lse [B, H, N] with the attention over all key sets, given each set's own.

    parts: at least one (out, lse, first), out [B, R, H, D] and lse [B, H, R] (natural log), on rows [first, first + R).
    If lse is -inf a part counts as empty for any out; rows empty in all parts become 0 and -inf. `out` and `lse` may
    belong to a part. Raises ValueError when a part does not fit.
    """
    _check(out, [(x, first) for x, _, first in parts])
    for x, part_lse, _ in parts:
        if part_lse.shape != (x.shape[0], x.shape[2], x.shape[1]):
            raise ValueError(f"a part {tuple(x.shape)} has lse {tuple(part_lse.shape)}: it must be [B, H, R]")
    if out.numel() == 0:
        return
    if has_kernel(out.device, out.dtype):
        _combine_triton_(out, lse, parts)
    else:
        combine_torch_(out, lse, parts)


def sum_parts_torch_(total: Tensor, parts: Sequence[RowSum]) -> None:
    """The same sum in plain PyTorch: the CPU path and the oracle of the kernel."""
    wide = torch.zeros_like(total, dtype=torch.promote_types(total.dtype, torch.float32))
    for x, first in parts:
        wide[:, first : first + x.shape[1]].add_(x)
    total.copy_(wide)


def combine_torch_(out: Tensor, lse: Tensor, parts: Sequence[RowSoftmax]) -> None:
    """The same merge in plain PyTorch: the CPU path and the oracle of the kernel."""
    compute = torch.promote_types(out.dtype, torch.float32)
    merged = torch.full_like(lse, float("-inf"), dtype=compute)
    for x, part_lse, first in parts:
        covered = merged[..., first : first + x.shape[1]]
        covered.copy_(torch.logaddexp(covered, part_lse.to(compute)))
    wide = torch.zeros_like(out, dtype=compute)
    for x, part_lse, first in parts:
        rows = slice(first, first + x.shape[1])
        share = by_row(share_of(part_lse.to(compute), merged[..., rows]))
        wide[:, rows] += torch.where(share > 0, x.to(compute) * share, 0.0)
    out.copy_(wide)
    lse.copy_(merged)


def _sum_triton_(total: Tensor, parts: Sequence[RowSum]) -> None:
    rows = [_with_dense_heads(x) for x, _ in parts]
    programs, shape = _launch(total.shape)
    launch_once(
        _sum_kernel,
        (programs,),
        total,
        total.stride()[:3],
        tuple(rows),
        tuple(x.stride()[:3] for x in rows),
        tuple(UNIT.value * first for _, first in parts),
        tuple(UNIT.value * x.shape[1] for x in rows),
        *total.shape[1:3],
        **shape,
    )


def _combine_triton_(out: Tensor, lse: Tensor, parts: Sequence[RowSoftmax]) -> None:
    rows = [_with_dense_heads(x) for x, _, _ in parts]
    programs, shape = _launch(out.shape)
    launch_once(
        _combine_kernel,
        (programs,),
        out,
        lse,
        out.stride()[:3],
        lse.stride(),
        tuple(rows),
        tuple(part_lse.contiguous() for _, part_lse, _ in parts),
        tuple(x.stride()[:3] for x in rows),
        tuple(UNIT.value * first for _, _, first in parts),
        tuple(UNIT.value * x.shape[1] for x in rows),
        *out.shape[1:3],
        **shape,
    )


def _with_dense_heads(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@lru_cache(maxsize=256)
def _launch(shape: torch.Size) -> tuple[int, dict[str, int]]:
    """Programs, tile and warps of one launch over a result of shape [B, N, H, D]."""
    B, N, H, D = shape
    columns = triton.next_power_of_2(D)
    rows, num_warps = row_program("combine", columns)
    rows = min(rows, triton.next_power_of_2(N))
    programs = B * H * triton.cdiv(N, rows)
    if programs >= 2**31:
        raise ValueError(f"{programs} row blocks pass the 2^31 - 1 of one launch: give fewer batch items at a time")
    return programs, {"DIM": D, "ROWS": rows, "COLUMNS": columns, "num_warps": num_warps}


def _check(result: Tensor, parts: Sequence[RowSum]) -> None:
    if not parts:
        raise ValueError("no parts: there must be at least one")
    if result.stride(-1) != 1:
        raise ValueError(f"the result has stride {result.stride(-1)} in the head dimension: it must be dense there")
    B, N, H, D = result.shape
    for x, first in parts:
        if x.dim() != 4 or (x.shape[0], *x.shape[2:]) != (B, H, D) or not 0 <= first <= first + x.shape[1] <= N:
            raise ValueError(
                f"a part {tuple(x.shape)} on rows from {first} is outside of the result {tuple(result.shape)}"
            )
