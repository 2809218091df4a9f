# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""Results of groups of branches by themselves, as a backward pass with detached merge weights needs them, and merged.

A row that a group does not cover has lse -inf there, and nobody reads or writes its out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilabench.kernels.launches import COPY_BYTES, Launches, run

# Numbers that a program merges. GigaPath's five branches at 70001 tokens on one H100: 0.150 ms, 0.185 for 4096.
_TILE = 2048
# Results lie so many elements apart, times a number: the compiler knows that 16 bytes can be read at a time.
_UNIT = 8


class Apart(NamedTuple):
    """out [B, N, H, D] and lse [B, H, N] float32 of several groups: rows of ``outs`` and ``lses``, which begin at
    multiples of 16 bytes whatever the shape, so that kernels compile nothing anew for them.
    """

    outs: Tensor
    lses: Tensor
    shape: tuple[int, ...]

    @classmethod
    def empty(cls, groups: int, q: Tensor) -> Apart:
        """Room for the results of so many groups over q [B, N, H, D], with lse -inf."""
        outs = q.new_empty((groups, _padded(q.numel(), max(_UNIT, COPY_BYTES // q.element_size()))))
        rows = _padded(q.numel() // q.shape[3], COPY_BYTES // 4)
        lses = torch.full((groups, rows), float("-inf"), dtype=torch.float32, device=q.device)
        return cls(outs, lses, tuple(q.shape))

    def of(self, index: int) -> tuple[Tensor, Tensor]:
        """out and lse of one group."""
        batch, length, heads, _ = self.shape
        return _view(self.outs[index], self.shape), _view(self.lses[index], (batch, heads, length))

    def merged(self, known: Launches) -> tuple[Tensor, Tensor]:
        """out [B, N, H, D] and lse [B, H, N] of all groups; a row that none covers has out 0 and lse -inf. known: the
        launches of the pass.
        """
        batch, length, heads, dim = self.shape
        out = self.outs.new_empty(self.shape)
        lse = self.lses.new_empty((batch, heads, length))
        tensors = {"outs": self.outs, "lses": self.lses, "out": out, "lse": lse}
        if known.repeat("merged", tensors):
            return out, lse
        columns = triton.next_power_of_2(dim)
        rows = max(1, _TILE // columns)
        arguments = {
            **{f"{name}_ptr": x for name, x in tensors.items()},
            "outs_units": self.outs.shape[1] // _UNIT,
            "lses_apart": self.lses.shape[1],
            "length": length,
            "n_heads": heads,
            "GROUPS": len(self.outs),
            "UNIT": _UNIT,
            "HEAD_DIM": dim,
            "COLUMNS": columns,
            "ROWS": rows,
        }
        grid = (triton.cdiv(length, rows) * batch * heads,)
        known.keep("merged", run(_merge_kernel, grid, arguments), tensors)
        return out, lse


def _padded(elements: int, multiple: int) -> int:
    return elements + -elements % multiple


def _view(row: Tensor, shape: Sequence[int]) -> Tensor:
    return row[: prod(shape)].view(shape)


@triton.jit(do_not_specialize=("outs_units", "lses_apart", "length", "n_heads"))
def _merge_kernel(
    outs_ptr,
    lses_ptr,
    out_ptr,
    lse_ptr,
    outs_units,
    lses_apart,
    length,
    n_heads,
    GROUPS: tl.constexpr,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    pid = tl.program_id(0)
    head = (pid % n_heads).to(tl.int64)
    rest = pid // n_heads
    blocks = tl.cdiv(length, ROWS)
    token = (rest % blocks) * ROWS + tl.arange(0, ROWS)
    batch = (rest // blocks).to(tl.int64)
    valid = token < length
    token = token.to(tl.int64)
    column = tl.arange(0, COLUMNS)
    lse_at = (batch * n_heads + head) * length + token
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        top = tl.maximum(top, tl.load(lses_ptr + group * lses_apart.to(tl.int64) + lse_at, valid, float("-inf")))
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([ROWS], tl.float32)
    merged = tl.zeros([ROWS, COLUMNS], tl.float32)
    at = ((batch * length + token) * n_heads + head)[:, None] * HEAD_DIM + column[None, :]
    for group in tl.static_range(GROUPS):
        share = tl.exp(tl.load(lses_ptr + group * lses_apart.to(tl.int64) + lse_at, valid, float("-inf")) - safe)
        total += share
        there = (share != 0.0)[:, None] & (column < HEAD_DIM)[None, :]
        own = tl.load(outs_ptr + group * (outs_units.to(tl.int64) * UNIT) + at, there, 0.0)
        merged += own.to(tl.float32) * share[:, None]
    merged = merged / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + at, merged.to(out_ptr.dtype.element_ty), valid[:, None] & (column < HEAD_DIM)[None, :])
    tl.store(lse_ptr + lse_at, top + tl.log(total), valid)
