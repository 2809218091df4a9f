"""Attention by one call of the kernels for blocks, over a plan: a mask, bounds of columns, or selected blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dilabench.impls.block_sparse.on_cpu import blocked_backward, blocked_forward, listed_backward, listed_forward
from dilabench.impls.one_operator import AttentionComputation
from dilabench.kernels.block_sparse.plan import BlockPlan, Plan
from dilabench.kernels.cpu import flash
from dilabench.patterns.answers import HiddenRows, SequenceShape
from dilabench.workload.spec import Workload

# Rows that are looked at together where a pattern has no blocks of its own.
COLUMN_BLOCK = 128


class BlockForward(Protocol):
    """Forward of block-sparse attention: `Attend` with a plan in place of causal and window."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float) -> tuple[Tensor, Tensor]: ...


class BlockBackward(Protocol):
    """Its backward from a *given* out and lse: `AttendBackward` with a plan in place of causal and window."""

    def __call__(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: Plan, *, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class BlockKernels:
    """The kernels of a device and a dtype, by a name for messages."""

    name: str
    attend: BlockForward
    attend_backward: BlockBackward


def kernels_for(device: torch.device, dtype: torch.dtype) -> BlockKernels:
    """Triton's kernels on CUDA, for any head dim up to 256; on CPUs dilabench's if it can run, else torch's."""
    if device.type == "cuda":
        # Triton is not installed everywhere, and only CUDA needs it.
        from dilabench.kernels.block_sparse.backward import block_sparse_backward
        from dilabench.kernels.block_sparse.forward import block_sparse_forward

        return BlockKernels("block-sparse tiles", block_sparse_forward, block_sparse_backward)
    if flash.serves(dtype):
        return BlockKernels("blocks", listed_forward, listed_backward)
    return BlockKernels("blocks", blocked_forward, blocked_backward)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Planned(AttentionComputation):
    """Attention over a plan by one call of its kernels, forward and backward."""

    kernels: BlockKernels
    plan: Plan
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.kernels.attend(q, k, v, self.plan, scale=self.scale)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.kernels.attend_backward(dout.contiguous(), q, k, v, out, lse, self.plan, scale=self.scale)


def whole_plan(workload: Workload) -> BlockPlan | None:
    """The plan of a pattern that is a mask of blocks, or bounds of columns, over the whole sequence; None for others.

    Raises ConfigError when a file does not fit.
    """
    (shape,) = workload.shapes
    blocks = workload.pattern.whole_blocks(shape)
    if blocks is not None:
        return BlockPlan(blocks.mask, blocks.block_size, shape.length, workload.causal, workload.window)
    hidden = workload.pattern.hidden_rows(shape)
    if hidden is None:
        return None
    return plan_of_columns(shape, hidden)


def plan_of_last_rows(workload: Workload) -> BlockPlan | None:
    """The plan of `whole_plan` for queries that are the last rows of their keys: of a mask of blocks, for all rows from
    the block on in which the first query lies. Causal mask and window become bounds of columns.
    """
    (shape,) = workload.shapes
    first, blocks = workload.first_row, workload.pattern.whole_blocks(shape)
    hidden = None if blocks is not None else workload.pattern.hidden_rows(shape)
    if blocks is not None:
        size, mask = blocks.block_size, blocks.mask[:, first // blocks.block_size :]
        first -= first % size
    elif hidden is not None:
        size = COLUMN_BLOCK
        mask = np.broadcast_to(np.True_, (1, -(-(shape.length - first) // size), -(-shape.length // size)))
    else:
        return None
    if hidden is None:
        hidden = HiddenRows.of(shape.length, (np.zeros(shape.length, np.int64),) * 2)
    rows, keys = np.arange(first, shape.length), np.arange(shape.length)
    return BlockPlan(mask, size, len(rows), False, key_rows=len(keys), hidden=hidden.over(shape, rows, keys))


def plan_of_columns(shape: SequenceShape, hidden: HiddenRows, keys: int | None = None) -> BlockPlan:
    """The plan of rows that keys are hidden from. keys: their number, if they are no tokens; no causal mask then."""
    length = shape.length if keys is None else keys
    blocks = 1, -(-shape.length // COLUMN_BLOCK), -(-length // COLUMN_BLOCK)
    everything = np.broadcast_to(np.True_, blocks)
    if keys is not None:
        return BlockPlan(everything, COLUMN_BLOCK, shape.length, False, key_rows=keys, hidden=hidden)
    return BlockPlan(everything, COLUMN_BLOCK, shape.length, shape.causal, shape.window, hidden=hidden)


def require_whole_plan(workload: Workload) -> BlockPlan:
    """`whole_plan`; raises ValueError for a pattern that has none."""
    plan = whole_plan(workload)
    if plan is None:
        raise ValueError(f"{workload.pattern.label()} is neither one mask of blocks nor bounds of columns")
    return plan
