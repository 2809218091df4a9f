# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""The sums of dQ that many programs add to: float32 sums of dQ / scale.

For all heads together they would take twice the bytes of q. A few heads keep a GPU busy, and the others follow in the
same memory.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilabench.kernels.launch_cache import Launch, LaunchCache
from dilabench.kernels.row_programs import row_program
from dilabench.kernels.tuning import TileConfig, heads_at_a_time

# A program converts successive columns, so that other numbers of heads need no other kernel.
_MOST_COLUMNS = 512


def dq_accumulator(q: Tensor, k: Tensor, tiles: TileConfig, modulus: int = 1) -> Tensor | None:
    """float32 zeros [B, N, H', D] for the fewest heads of q with enough programs, each of ``tiles.block_n`` rows of k:
    a divisor of the K/V heads. Padding rows make ``modulus`` divide N. None if memory is too small.
    """
    batch, rows, heads, dim = q.shape
    rows += -rows % modulus
    kv_heads = k.shape[2]
    some = heads_at_a_time(kv_heads, max(1, batch * k.shape[1] // tiles.block_n), dim)
    try:
        return torch.zeros((batch, rows, some * heads // kv_heads, dim), dtype=torch.float32, device=q.device)
    except torch.OutOfMemoryError:
        return None


def convert_dq(sums: Tensor, scale: float, dq: Tensor, cache: LaunchCache, name: Hashable) -> None:
    """Write ``scale * sums`` into some heads dq [B, N, H', D] of a contiguous tensor; sums may have more rows behind.

    cache: of the pass, in which this launch has a name.
    """
    cache.launch(name, [{"sums": sums, "dq": dq}], lambda: [_conversion(sums, scale, dq)])


def _conversion(sums: Tensor, scale: float, dq: Tensor) -> Launch:
    batch, rows, heads, dim = dq.shape
    width, step = heads * dim, dq.stride(1)
    columns = min(_MOST_COLUMNS, triton.next_power_of_2(width))
    own_rows, num_warps = row_program("convert", columns)
    blocks = triton.cdiv(width, columns)
    arguments = {
        "sums_ptr": sums,
        "dq_ptr": dq,
        "scale": scale,
        "rows": rows,
        "rows_of_sums": sums.shape[1],
        "width": width,
        "step": step,
        "COLUMNS": columns,
        "ROWS": own_rows,
        "num_warps": num_warps,
    }
    grid = (batch * triton.cdiv(rows, own_rows) * blocks,)
    return Launch(_convert_kernel, lambda _: (grid, arguments), False, (dq.dtype, columns, width % 16, step % 16))


@triton.jit(do_not_specialize=("rows", "rows_of_sums"))
def _convert_kernel(
    sums_ptr, dq_ptr, scale, rows, rows_of_sums, width, step, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):
    pid = tl.program_id(0)
    blocks = tl.cdiv(width, COLUMNS)
    column = (pid % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    rest = pid // blocks
    row_blocks = tl.cdiv(rows, ROWS)
    row = (rest % row_blocks) * ROWS + tl.arange(0, ROWS)
    batch = (rest // row_blocks).to(tl.int64)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    read = (batch * rows_of_sums + row)[:, None] * width + column[None, :]
    written = (batch * rows + row)[:, None] * step + column[None, :]
    sums = tl.load(sums_ptr + read, inside, 0.0)
    tl.store(dq_ptr + written, (sums * scale).to(dq_ptr.dtype.element_ty), inside)
