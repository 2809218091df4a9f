# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""Results of single branches, which a backward pass with detached merge weights needs, and how they are merged.

A branch of rate r covers every r-th row of a head; only these are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from dilabench.kernels.fused.branch_group import BranchGroup
from dilabench.kernels.launches import COPY_BYTES, Launches, run

# Numbers that a program merges. GigaPath's five branches at 70001 tokens on one H100: 0.150 ms, 0.185 for 4096.
_TILE = 2048
# What each branch has begins at a multiple of so many numbers, and so of 16 bytes, whatever the shape: kernels are
# compiled anew for others.
_UNIT = COPY_BYTES // 2
# Of a branch in the table of a merge, before the class of each head.
_COLUMNS = 6


class Apart(NamedTuple):
    """Results of branches one after another, float32 ``lses`` and ``outs``; `ApartPlaces` says where each stands."""

    outs: Tensor
    lses: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ApartPlaces:
    """Where the rows of groups of a single branch stand in `Apart`: n rows (`BranchGroup.stored_rows`) of each head in
    out [B, n, H, D] and lse [B, H, n].

    shape: of all rows, [B, N, H, D]. outs, lses: where groups begin, and the end. classes: that of each head, by group,
    int32 on the device. table: int32, of each group the units that its out and lse begin at, rate, tokens and rows of a
    segment, stored rows, and those classes.
    """

    shape: tuple[int, ...]
    rows: tuple[int, ...]
    outs: tuple[int, ...]
    lses: tuple[int, ...]
    classes: tuple[Tensor, ...]
    table: Tensor

    @classmethod
    def of(cls, groups: Sequence[BranchGroup], q: Tensor) -> ApartPlaces:
        """For the results of queries q [B, N, H, D]."""
        batch, _, heads, dim = q.shape
        rows = tuple(group.stored_rows for group in groups)
        outs = tuple(accumulate((_padded(batch * n * heads * dim) for n in rows), initial=0))
        lses = tuple(accumulate((_padded(batch * n * heads) for n in rows), initial=0))
        table = np.array(
            [
                (
                    out // _UNIT,
                    lse // _UNIT,
                    group.modulus,
                    group.super_tokens,
                    group.super_rows,
                    n,
                    *group.class_of_head,
                )
                for group, n, out, lse in zip(groups, rows, outs, lses, strict=False)
            ],
            np.int32,
        )
        classes = tuple(_on_device(group.class_of_head, q.device) for group in groups)
        return cls(tuple(q.shape), rows, outs, lses, classes, torch.from_numpy(table).to(q.device))

    def room(self, q: Tensor) -> Apart:
        """Room for them, of the dtype of q."""
        return Apart(q.new_empty(self.outs[-1]), q.new_empty(self.lses[-1], dtype=torch.float32))

    def each(self, apart: Apart) -> list[tuple[Tensor, Tensor]]:
        """out [B, n, H, D] and lse [B, H, n] of every group."""
        batch, _, heads, dim = self.shape
        return [
            (
                apart.outs[out : out + batch * n * heads * dim].view(batch, n, heads, dim),
                apart.lses[lse : lse + batch * heads * n].view(batch, heads, n),
            )
            for n, out, lse in zip(self.rows, self.outs, self.lses, strict=False)
        ]

    def merged(self, apart: Apart, known: Launches) -> tuple[Tensor, Tensor]:
        """out [B, N, H, D] and lse [B, H, N] of all groups; a row that none covers has out 0 and lse -inf. known: the
        launches of the pass.
        """
        batch, length, heads, dim = self.shape
        out = apart.outs.new_empty(self.shape)
        lse = apart.lses.new_empty((batch, heads, length))
        tensors = {"outs": apart.outs, "lses": apart.lses, "out": out, "lse": lse}
        if known.repeat("merged", tensors):
            return out, lse
        columns = triton.next_power_of_2(dim)
        rows = max(1, _TILE // columns)
        arguments = {
            **{f"{name}_ptr": x for name, x in tensors.items()},
            "table_ptr": self.table,
            "length": length,
            "n_heads": heads,
            "GROUPS": len(self.rows),
            "WIDTH": _COLUMNS,
            "UNIT": _UNIT,
            "HEAD_DIM": dim,
            "COLUMNS": columns,
            "ROWS": rows,
        }
        grid = (triton.cdiv(length, rows) * batch * heads,)
        known.keep("merged", run(_merge_kernel, grid, arguments), tensors)
        return out, lse


def _padded(elements: int) -> int:
    return elements + -elements % _UNIT


@lru_cache(maxsize=256)
def _on_device(classes: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(classes, dtype=torch.int32, device=device)


@triton.jit
def _own_rows(table_ptr, group, head, n_heads, token, valid, WIDTH: tl.constexpr):
    """Which tokens a group covers, and the rows that they are stored in."""
    at = table_ptr + group * (WIDTH + n_heads)
    rate, segment_tokens, segment_rows = tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
    inside = token % segment_tokens
    covered = valid & (inside % rate == tl.load(at + WIDTH + head))
    return covered, token // segment_tokens * segment_rows + inside // rate


@triton.jit
def _own_lse(lses_ptr, table_ptr, group, batch, head, n_heads, token, valid, WIDTH: tl.constexpr, UNIT: tl.constexpr):
    covered, row = _own_rows(table_ptr, group, head, n_heads, token, valid, WIDTH)
    at = table_ptr + group * (WIDTH + n_heads)
    begin = tl.load(at + 1).to(tl.int64) * UNIT + (batch * n_heads + head).to(tl.int64) * tl.load(at + 5)
    return tl.load(lses_ptr + begin + row, covered, float("-inf"))


@triton.jit(do_not_specialize=("length", "n_heads"))
def _merge_kernel(
    outs_ptr,
    lses_ptr,
    out_ptr,
    lse_ptr,
    table_ptr,
    length,
    n_heads,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    pid = tl.program_id(0)
    head = pid % n_heads
    rest = pid // n_heads
    blocks = tl.cdiv(length, ROWS)
    token = (rest % blocks) * ROWS + tl.arange(0, ROWS)
    batch = rest // blocks
    valid = token < length
    column = tl.arange(0, COLUMNS)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        own = _own_lse(lses_ptr, table_ptr, group, batch, head, n_heads, token, valid, WIDTH, UNIT)
        top = tl.maximum(top, own)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([ROWS], tl.float32)
    merged = tl.zeros([ROWS, COLUMNS], tl.float32)
    for group in tl.static_range(GROUPS):
        share = tl.exp(_own_lse(lses_ptr, table_ptr, group, batch, head, n_heads, token, valid, WIDTH, UNIT) - safe)
        total += share
        _, row = _own_rows(table_ptr, group, head, n_heads, token, valid, WIDTH)
        at = table_ptr + group * (WIDTH + n_heads)
        row = batch.to(tl.int64) * tl.load(at + 5) + row
        begin = tl.load(at).to(tl.int64) * UNIT
        there = (share != 0.0)[:, None] & (column < HEAD_DIM)[None, :]
        x = tl.load(outs_ptr + begin + ((row * n_heads + head) * HEAD_DIM)[:, None] + column[None, :], there, 0.0)
        merged += x.to(tl.float32) * share[:, None]
    merged = merged / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = ((batch.to(tl.int64) * length + token) * n_heads + head)[:, None] * HEAD_DIM + column[None, :]
    tl.store(out_ptr + out_at, merged.to(out_ptr.dtype.element_ty), valid[:, None] & (column < HEAD_DIM)[None, :])
    lse_at = (batch * n_heads + head).to(tl.int64) * length + token
    tl.store(lse_ptr + lse_at, top + tl.log(total), valid)
