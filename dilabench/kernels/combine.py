# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""Sums and merges partial results on ranges of rows in one pass: each part is read once, the result written once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilabench.kernels.launch_cache import COPY_BYTES, Launch, LaunchCache, stride_unit
from dilabench.kernels.lse import MOST_PARTS, by_row, has_kernel, share_of
from dilabench.kernels.row_programs import row_program
from dilabench.kernels.softmax import finite

RowSum = tuple[Tensor, int]
RowSoftmax = tuple[Tensor, Tensor, int]

# Integers are not specialised: neither ranges of rows nor strides need another kernel.
_RANGES = tuple(f"{what}{part}" for part in range(MOST_PARTS) for what in ("first", "count", "b", "r", "h"))
_LSE_STRIDES = ("lse_b", "lse_h", "lse_r")
_NUMBERS = ("n_rows", "n_heads", "total_b", "total_r", "total_h", *_LSE_STRIDES, *_RANGES)
_PARTS, _LSES = (tuple(f"{name}{part}" for part in range(MOST_PARTS)) for name in ("part", "lse"))
# Rows of lse begin at any position, whose address is a multiple of 16 bytes for some lengths only.
_ANYWHERE = ("lse_ptr", *(f"{name}_ptr" for name in _LSES))


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
def _load(ptr, strides, batch, rows, head, columns, read, UNIT: tl.constexpr, DIM: tl.constexpr):
    row = (batch * strides[0] + rows[:, None] * strides[1] + head * strides[2]) * UNIT
    places = ptr + row + columns[None, :]
    return tl.load(places, mask=read[:, None] & (columns < DIM)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _load_lse(ptr, batch, rows, head, count, n_heads):
    places = ptr + (batch * n_heads + head) * count + rows
    return tl.load(places, mask=(rows >= 0) & (rows < count), other=float("-inf")).to(tl.float32)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ANYWHERE)
def _combine_kernel(
    total_ptr,
    lse_ptr,
    part0_ptr,
    part1_ptr,
    part2_ptr,
    part3_ptr,
    lse0_ptr,
    lse1_ptr,
    lse2_ptr,
    lse3_ptr,
    total_b,
    total_r,
    total_h,
    lse_b,
    lse_h,
    lse_r,
    first0,
    count0,
    b0,
    r0,
    h0,
    first1,
    count1,
    b1,
    r1,
    h1,
    first2,
    count2,
    b2,
    r2,
    h2,
    first3,
    count3,
    b3,
    r3,
    h3,
    n_rows,
    n_heads,
    ONTO: tl.constexpr,
    PARTS: tl.constexpr,
    UNIT: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # Without lse the parts are added up.
    parts, lses = (part0_ptr, part1_ptr, part2_ptr, part3_ptr), (lse0_ptr, lse1_ptr, lse2_ptr, lse3_ptr)
    firsts, counts = (first0, first1, first2, first3), (count0, count1, count2, count3)
    strides = ((b0, r0, h0), (b1, r1, h1), (b2, r2, h2), (b3, r3, h3))
    batch, head, rows = _tile(n_rows, n_heads, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = rows < n_rows
    out = tl.zeros((ROWS, COLUMNS), tl.float32)
    if lse_ptr is None:
        for part in tl.static_range(PARTS):
            own = rows - firsts[part]
            covered = (own >= 0) & (own < counts[part])
            out += _load(parts[part], strides[part], batch, own, head, columns, covered, UNIT, DIM)
    else:
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        result_lse = tl.full((ROWS,), float("-inf"), tl.float32)
        lse_places = lse_ptr + batch * lse_b + head * lse_h + rows * lse_r
        if ONTO:
            result_lse = tl.load(lse_places, mask=inside, other=float("-inf")).to(tl.float32)
        for part in tl.static_range(PARTS):
            own = rows - firsts[part]
            lse = result_lse
            if part > 0 or not ONTO:
                lse = _load_lse(lses[part], batch, own, head, counts[part], n_heads)
            top = tl.maximum(top, lse)
        top = finite(top)
        weights = tl.zeros((ROWS,), tl.float32)
        for part in tl.static_range(PARTS):
            own = rows - firsts[part]
            lse = result_lse
            if part > 0 or not ONTO:
                lse = _load_lse(lses[part], batch, own, head, counts[part], n_heads)
            weight = tl.exp(lse - top)
            # An empty row is not read: its memory may be uninitialised.
            values = _load(parts[part], strides[part], batch, own, head, columns, weight > 0.0, UNIT, DIM)
            out += values * weight[:, None]
            weights += weight
        out = out / tl.where(weights == 0.0, 1.0, weights)[:, None]
    # The result may be one of the parts: no thread may write what another has yet to read.
    tl.debug_barrier()
    row = (batch * total_b + rows[:, None] * total_r + head * total_h) * UNIT
    places = total_ptr + row + columns[None, :]
    tl.store(places, out.to(total_ptr.dtype.element_ty), mask=inside[:, None] & (columns < DIM)[None, :])
    if lse_ptr is not None:
        tl.store(lse_places, top + tl.log(weights), mask=inside)


def sum_parts_(total: Tensor, parts: Sequence[RowSum]) -> None:
    """Overwrite total [B, N, H, D] with the sum of parts; rows that none covers become 0.

    parts: 1 to MOST_PARTS of (x, first), x [B, R, H, D] in any dtype and with any strides, on rows [first, first + R).
    `total` may be one of them. Raises ValueError when a part does not fit.
    """
    if total.numel() and has_kernel(total.device, total.dtype):
        _sum_triton_(total, parts)
        return
    _check(total, parts)
    sum_parts_torch_(total, parts)


def combine_(out: Tensor, lse: Tensor, parts: Sequence[RowSoftmax]) -> None:
    """Overwrite out [B, N, H, D] and lse [B, H, N] with the attention over all key sets, given each set's own.

    parts: 1 to MOST_PARTS of (out, lse, first), out [B, R, H, D] and lse [B, H, R] on rows from first on.
    If lse is -inf a part counts as empty for any out; rows empty in all parts become 0 and -inf. `out` and `lse` may
    be the first part. Raises ValueError when a part does not fit.
    """
    if out.numel() and has_kernel(out.device, out.dtype):
        _combine_triton_(out, lse, parts)
        return
    _check(out, [(x, first) for x, _, first in parts])
    for x, part_lse, _ in parts:
        _check_lse(x, part_lse)
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


@lru_cache(maxsize=256)
def _cache(*_key: Hashable) -> LaunchCache:
    """The launch on parts of these layouts and first rows, which holds no table."""
    return LaunchCache()


def _sum_triton_(total: Tensor, parts: Sequence[RowSum]) -> None:
    tensors = {"total": total}
    for name, (x, _) in zip(_PARTS, parts, strict=False):
        tensors[name] = x if x.stride(-1) == 1 else x.contiguous()
    _launched(tensors, [first for _, first in parts])


def _combine_triton_(out: Tensor, lse: Tensor, parts: Sequence[RowSoftmax]) -> None:
    onto = bool(parts) and parts[0][1] is lse
    tensors = {"total": out, "lse": lse}
    for part, lse_of_part, (x, part_lse, _) in zip(_PARTS, _LSES, parts, strict=False):
        tensors[part] = x if x.stride(-1) == 1 else x.contiguous()
        if not (onto and part_lse is lse):
            tensors[lse_of_part] = part_lse.contiguous()
    _launched(tensors, [first for _, _, first in parts])


def _launched(tensors: Mapping[str, Tensor], firsts: Sequence[int]) -> None:
    _check_number(firsts)
    facts = [(x.shape, x.stride(), x.dtype, x.data_ptr() % COPY_BYTES) for x in tensors.values()]
    cache = _cache(tensors["total"].device, *firsts, *facts)
    cache.launch("parts", [tensors], lambda: [_launch(tensors, firsts)])


def _launch(tensors: Mapping[str, Tensor], firsts: Sequence[int]) -> Launch:
    total, parts = tensors["total"], [tensors[f"part{part}"] for part in range(len(firsts))]
    _check(total, [*zip(parts, firsts, strict=True)])
    B, N, H, D = total.shape
    columns = triton.next_power_of_2(D)
    rows, num_warps = row_program("combine", columns)
    rows = min(rows, triton.next_power_of_2(N))
    programs = B * H * triton.cdiv(N, rows)
    if programs >= 2**31:
        raise ValueError(f"{programs} row blocks pass the 2^31 - 1 of one launch: give fewer batch items at a time")
    unit = stride_unit(total, *parts)
    arguments: dict[str, Any] = dict.fromkeys(_combine_kernel.arg_names)
    arguments |= dict.fromkeys((*_LSE_STRIDES, *_RANGES), 0) | {f"{name}_ptr": x for name, x in tensors.items()}
    arguments |= zip(("total_b", "total_r", "total_h"), (step // unit for step in total.stride()), strict=False)
    arguments["ONTO"] = "lse" in tensors and "lse0" not in tensors
    if "lse" in tensors:
        arguments |= zip(_LSE_STRIDES, tensors["lse"].stride(), strict=True)
        for part, x in enumerate(parts):
            _check_lse(x, tensors.get(f"lse{part}", tensors["lse"]))
    for part, (x, first) in enumerate(zip(parts, firsts, strict=True)):
        b, r, h = (step // unit for step in x.stride()[:3])
        values = {"first": first, "count": x.shape[1], "b": b, "r": r, "h": h}
        arguments |= {f"{name}{part}": value for name, value in values.items()}
    shape = {"PARTS": len(parts), "UNIT": unit, "DIM": D, "ROWS": rows, "COLUMNS": columns, "num_warps": num_warps}
    arguments |= {"n_rows": N, "n_heads": H, **shape}
    return Launch(_combine_kernel, lambda _: ((programs,), arguments))


def _check_number(parts: Sequence[Any]) -> None:
    if not 0 < len(parts) <= MOST_PARTS:
        raise ValueError(f"{len(parts)} parts: there must be at least one, and at most {MOST_PARTS}")


def _check_lse(part: Tensor, lse: Tensor) -> None:
    if lse.shape != (part.shape[0], part.shape[2], part.shape[1]):
        raise ValueError(f"a part {tuple(part.shape)} has lse {tuple(lse.shape)}: it must be [B, H, R]")


def _check(result: Tensor, parts: Sequence[RowSum]) -> None:
    _check_number(parts)
    if result.stride(-1) != 1:
        raise ValueError(f"the result has stride {result.stride(-1)} in the head dimension: it must be dense there")
    B, N, H, D = result.shape
    for x, first in parts:
        if x.dim() != 4 or (x.shape[0], *x.shape[2:]) != (B, H, D) or not 0 <= first <= first + x.shape[1] <= N:
            raise ValueError(
                f"a part {tuple(x.shape)} on rows from {first} is outside of the result {tuple(result.shape)}"
            )
