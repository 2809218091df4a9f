# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""Columns of zeros behind a head dim, for kernels that copy rows of whole memory sectors faster."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilabench.kernels.fused.row_layout import on_hopper

_ROWS = 64
# Strides are counted in so many elements, so that the compiler knows that 16 bytes can be read at a time.
_UNIT = 8


@lru_cache(maxsize=64)
def columns_to_add(dim: int, dtype: torch.dtype, device: torch.device) -> int:
    """How many columns of zeros tiles that are copied again and again are given before kernels read them: mostly none.

    Hopper copies rows that are no multiple of 32 bytes at half speed. On an H200, 32768 tokens, H16, w 1024 5792 32768
    65536, r 1 2 4 8, forward and backward alone, in ms: D24 1.45 and 3.82, D32 0.99 and 3.21; D40 2.27 and 5.25, D56
    1.82 and 4.78, D48 1.25 and 4.21. Above 64 it was not tried.
    """
    if dtype.itemsize != 2 or dim > 64 or not on_hopper(device):
        return 0
    return -dim % 16


def with_columns(x: Tensor, more: int) -> Tensor:
    """``x [B, N, H, D]`` with columns of zeros behind, contiguous: read and written once."""
    if x.stride(3) != 1 or any(stride % _UNIT for stride in (*x.stride()[:3], x.shape[3])):
        x = x.contiguous()
    batch, length, heads, dim = x.shape
    wider = torch.empty((batch, length, heads, dim + more), dtype=x.dtype, device=x.device)
    rows = batch * length * heads
    _widen_kernel[(triton.cdiv(rows, _ROWS),)](
        x,
        wider,
        *(stride // _UNIT for stride in x.stride()[:3]),
        length,
        heads,
        rows,
        DIM=dim,
        WIDTH=dim + more,
        COLUMNS=triton.next_power_of_2(dim + more),
        ROWS=_ROWS,
        UNIT=_UNIT,
        num_warps=4,
    )
    return wider


@triton.jit(do_not_specialize=["batch_units", "token_units", "head_units", "length", "heads", "rows"])
def _widen_kernel(
    x_ptr,
    wider_ptr,
    batch_units,
    token_units,
    head_units,
    length,
    heads,
    rows,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    token = row // heads
    start = token // length * batch_units + token % length * token_units + row % heads * head_units
    there = (row < rows)[:, None] & (column < DIM)[None, :]
    x = tl.load(x_ptr + (start * UNIT)[:, None] + column[None, :], there, 0.0)
    place = row[:, None] * WIDTH + column[None, :]
    tl.store(wider_ptr + place, x, (row < rows)[:, None] & (column < WIDTH)[None, :])
