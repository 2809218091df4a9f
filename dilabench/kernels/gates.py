# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""Sums of attentions under gates, and the gradients that each attention gets: every tensor is read or written once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilabench.kernels.launch_cache import launch_once
from dilabench.kernels.row_programs import row_program


@triton.jit
def _places(n_rows, n_gates, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < n_rows)[:, None] & (column < DIM)[None, :]
    # Batch items have the same gates.
    return row[:, None] * DIM + column[None, :], inside, row % n_gates


@triton.jit(do_not_specialize=["n_rows", "n_gates"])
def _gated_sum_kernel(
    out_ptr, parts, gates_ptr, n_rows, n_gates, DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    places, inside, gate_row = _places(n_rows, n_gates, ROWS, COLUMNS, DIM)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for part in tl.static_range(len(parts)):
        gate = tl.load(gates_ptr + part * n_gates + gate_row).to(tl.float32)
        total += tl.load(parts[part] + places, inside, 0.0).to(tl.float32) * gate[:, None]
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["n_rows", "n_gates"])
def _gated_kernel(
    x_ptr, parts, gates_ptr, n_rows, n_gates, DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    places, inside, gate_row = _places(n_rows, n_gates, ROWS, COLUMNS, DIM)
    x = tl.load(x_ptr + places, inside, 0.0).to(tl.float32)
    for part in tl.static_range(len(parts)):
        gate = tl.load(gates_ptr + part * n_gates + gate_row).to(tl.float32)
        tl.store(parts[part] + places, (x * gate[:, None]).to(x_ptr.dtype.element_ty), inside)


def gated_sum(parts: Sequence[Tensor], gates: Tensor) -> Tensor:
    """sum_p gates[p] · parts[p]: parts [B, N, H, D] in one dtype, gates [parts, N, H]; added up in float32."""
    out = torch.empty(parts[0].shape, dtype=parts[0].dtype, device=parts[0].device)
    _launch(_gated_sum_kernel, out, [part.contiguous() for part in parts], gates)
    return out


def gated(x: Tensor, gates: Tensor) -> list[Tensor]:
    """gates[p] · x of every p: x [B, N, H, D], gates [parts, N, H]."""
    parts = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in gates]
    _launch(_gated_kernel, x.contiguous(), parts, gates)
    return parts


def _launch(kernel: triton.JITFunction, x: Tensor, parts: list[Tensor], gates: Tensor) -> None:
    rows, dim = x.numel() // x.shape[-1], x.shape[-1]
    columns = triton.next_power_of_2(dim)
    own_rows, num_warps = row_program("gates", columns)
    launch_once(
        kernel,
        (triton.cdiv(rows, own_rows),),
        x,
        tuple(parts),
        gates.contiguous(),
        rows,
        gates[0].numel(),
        DIM=dim,
        ROWS=own_rows,
        COLUMNS=columns,
        num_warps=num_warps,
    )
