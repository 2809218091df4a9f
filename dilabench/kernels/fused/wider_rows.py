# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""Columns of zeros behind a head dim, for kernels that copy rows of whole memory sectors faster."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilabench.kernels.fused.row_layout import on_hopper
from dilabench.kernels.launch_cache import Launch, LaunchCache, compile_ahead

_ROWS = 64
# Strides are counted in so many elements, so that the compiler knows that 16 bytes can be read at a time.
_UNIT = 8
# From so many queries of a key and so many pairs on, to read and write keys once costs less than their rows do that
# cross memory lines.
_MANY_QUERIES, _MANY_PAIRS = 2000, 700_000_000


def columns_to_add(dim: int, dtype: torch.dtype, device: torch.device, queries: float = 0, keys: float = 0) -> int:
    """How many columns of zeros tiles that are copied again and again are given before kernels read them: mostly none.

    Hopper copies rows that are no multiple of 32 bytes at half speed. On an H200, 32768 tokens, H16, w 1024 5792 32768
    65536, r 1 2 4 8, forward and backward alone, in ms: D24 1.45 and 3.82, D32 0.99 and 3.21; D40 2.27 and 5.25, D56
    1.82 and 4.78, D48 1.25 and 4.21. Above 64 it was not tried.

    And rows that cross a memory line of 128 bytes, as every second one of D48 does, are two copies of lines. The small
    programs of the forward pass are bound by those, and ask for whole lines where ``queries`` enough see each of the
    ``keys`` in the mean: on an H100 GigaPath's branches took 0.85 to 0.94 of the time at D48 and 0.80 to 0.83 at D40
    (docs/figures/h100-whole-lines.json).
    """
    if dtype.itemsize != 2 or dim > 64 or not on_hopper(device):
        return 0
    whole_lines = dim > 32 and queries >= _MANY_QUERIES and queries * keys >= _MANY_PAIRS
    return -dim % (64 if whole_lines else 16)


def with_columns(x: Tensor, more: int, cache: LaunchCache, name: str) -> Tensor:
    """``x [B, N, H, D]`` with columns of zeros behind, contiguous: read and written once.

    cache: that of the pass, in which this launch has a name.
    """
    if x.stride(3) != 1 or any(stride % _UNIT for stride in (*x.stride()[:3], x.shape[3])):
        x = x.contiguous()
    wider = x.new_empty((*x.shape[:3], x.shape[3] + more))
    cache.launch(name, [{"x": x, "wider": wider}], lambda: [_widening(x, wider)])
    return wider


def make_ready(dim: int, more: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile what adds so many columns, for a length to come."""
    x = torch.empty((1, 1, 1, dim), dtype=dtype, device=device)
    compile_ahead([_widening(x, x.new_empty((1, 1, 1, dim + more)))])


def _widening(x: Tensor, wider: Tensor) -> Launch:
    batch, length, heads, dim = x.shape
    width, rows = wider.shape[3], batch * length * heads
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
        "COLUMNS": triton.next_power_of_2(width),
        "ROWS": _ROWS,
        "UNIT": _UNIT,
        "num_warps": 4,
    }
    return Launch(_widen_kernel, lambda _: ((triton.cdiv(rows, _ROWS),), arguments), False, (x.dtype, dim, width))


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
