# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""Columns of zeros behind a head dim, for kernels that copy rows of whole memory sectors faster."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilabench.kernels.launch_cache import Launch, LaunchCache, compile_ahead
from dilabench.kernels.row_programs import row_program

# Strides are counted in units of this many elements, so the compiler knows that it can read 16 bytes at a time.
_UNIT = 8


def with_columns(x: Tensor, more: int, cache: LaunchCache, name: str) -> Tensor:
    """``x [B, N, H, D]`` with appended columns of zeros, contiguous: read and written once.

    cache: of the pass, in which this launch has a name.
    """
    if x.stride(3) != 1 or any(stride % _UNIT for stride in (*x.stride()[:3], x.shape[3])):
        x = x.contiguous()
    wider = x.new_empty((*x.shape[:3], x.shape[3] + more))
    cache.launch(name, [{"x": x, "wider": wider}], lambda: [_widening(x, wider)])
    return wider


def make_ready(dim: int, more: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile the kernel that adds this many columns, for a later length."""
    x = torch.empty((1, 1, 1, dim), dtype=dtype, device=device)
    with torch.cuda.device_of(x):
        compile_ahead([_widening(x, x.new_empty((1, 1, 1, dim + more)))])


def _widening(x: Tensor, wider: Tensor) -> Launch:
    batch, length, heads, dim = x.shape
    width, rows = wider.shape[3], batch * length * heads
    columns = triton.next_power_of_2(width)
    own_rows, num_warps = row_program("wider_rows", columns)
    batch_units, token_units, head_units = (stride // _UNIT for stride in x.stride()[:3])
    arguments = {
        "x_ptr": x,
        "wider_ptr": wider,
        "batch_units": batch_units,
        "token_units": token_units,
        "head_units": head_units,
        "length": length,
        "heads": heads,
        "rows": rows,
        "DIM": dim,
        "WIDTH": width,
        "COLUMNS": columns,
        "ROWS": own_rows,
        "UNIT": _UNIT,
        "num_warps": num_warps,
    }
    return Launch(_widen_kernel, lambda _: ((triton.cdiv(rows, own_rows),), arguments), False, (x.dtype, dim, width))


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
