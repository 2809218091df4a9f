# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""dQ where many programs add to it: float32 sums of dQ / scale, and how they become dQ.

All heads at once would take twice the bytes of q. A few keep a GPU busy, and the others follow in the same place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilabench.kernels.launches import COPY_BYTES, Launch
from dilabench.kernels.tuning import TileConfig, padded_dim

# Heads whose programs are as many follow others: at their end multiprocessors wait for the last of them. Programs of
# narrower heads are the shorter, so more of them.
_PROGRAMS_OF_128_COLUMNS = 2048
# Numbers that are written at once, and how many times so many a program writes.
_WRITTEN = COPY_BYTES // 2
_PIECES = 256


def empty_sums(q: Tensor, k: Tensor, tiles: TileConfig, modulus: int = 1) -> Tensor | None:
    """float32 zeros [B, N, H', D] for as few of the heads of q as have programs enough, each of ``tiles.block_n`` rows
    of k: those of a divisor of the K/V heads. Rows behind make ``modulus`` divide N. None where there is no room.
    """
    batch, rows, heads, dim = q.shape
    rows += -rows % modulus
    kv_heads = k.shape[2]
    each = max(1, batch * k.shape[1] // tiles.block_n)
    least = _PROGRAMS_OF_128_COLUMNS * 128 // padded_dim(dim)
    some = next((n for n in range(1, kv_heads) if kv_heads % n == 0 and n * each >= least), kv_heads)
    try:
        return torch.zeros((batch, rows, some * heads // kv_heads, dim), dtype=torch.float32, device=q.device)
    except torch.OutOfMemoryError:
        return None


def write_sums(sums: Tensor, scale: float, dq: Tensor) -> Launch:
    """The launch that writes ``scale * sums`` into dq [B, N, H', D] of 16 bits, some heads of a contiguous tensor; sums
    may have more rows behind. D: a multiple of 8.
    """
    batch, length, heads, dim = dq.shape
    width = heads * dim // _WRITTEN
    arguments = {
        "sums_ptr": sums,
        "dq_ptr": dq,
        "scale": scale,
        "length": length,
        "width": width,
        "sums_rows": sums.shape[1],
        "token_units": dq.stride(1) // _WRITTEN,
        "WRITTEN": _WRITTEN,
        "PIECES": _PIECES,
        "num_warps": 4,
    }
    programs = triton.cdiv(length * width, _PIECES)
    return Launch(_write_kernel, lambda _: ((programs * batch,), arguments), False, (dq.dtype,))


@triton.jit(do_not_specialize=("scale", "length", "width", "sums_rows", "token_units"))
def _write_kernel(
    sums_ptr,
    dq_ptr,
    scale,
    length,
    width,
    sums_rows,
    token_units,
    WRITTEN: tl.constexpr,
    PIECES: tl.constexpr,
):
    # A piece: numbers that are written at once. ``width``: pieces of a token.
    pid = tl.program_id(0)
    programs = tl.cdiv(length.to(tl.int64) * width, PIECES).to(tl.int32)
    batch = (pid // programs).to(tl.int64)
    first = (pid % programs).to(tl.int64) * PIECES
    first_token = first // width
    piece = (first - first_token * width).to(tl.int32) + tl.arange(0, PIECES)
    token = first_token + piece // width
    inside = (token < length)[:, None]
    column = tl.arange(0, WRITTEN)[None, :]
    read = ((batch * sums_rows + first_token) * width + piece)[:, None] * WRITTEN + column
    written = ((batch * length + token) * token_units + piece % width)[:, None] * WRITTEN + column
    dq = tl.load(sums_ptr + read, inside, 0.0) * scale
    tl.store(dq_ptr + written, dq.to(dq_ptr.dtype.element_ty), inside)
