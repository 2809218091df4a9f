"""Attention over blocks of every branch's rows: the union of `union.py` with a block mask in each kernel call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, cast

import numpy as np
from torch import Tensor

from dilabench.contracts import Attend, AttendBackward, BuildContext, LoadedBackend
from dilabench.impls.union.branches import ORIGIN, Progression, branches_of, covers_every_row
from dilabench.impls.union.strided_rows import StridedRows, strided_rows
from dilabench.impls.union.union import Rows, Union
from dilabench.kernels.block_sparse.plan import BlockPlan, Plan
from dilabench.patterns.block_sparse import BlockSparsePattern, block_mask
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRows(StridedRows):
    """The rows of one kernel call, with the block plan that lies over them."""

    plan: Plan

    @classmethod
    def of(cls, rows: StridedRows, plan: Plan) -> PlannedRows:
        """The same rows with a plan."""
        return cls(**{field.name: getattr(rows, field.name) for field in fields(rows)}, plan=plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockUnion(Union):
    """A union whose kernel gets each call's plan, which holds the causal edge and the window too."""

    def _mask(self, rows: Rows) -> dict[str, Any]:
        assert isinstance(rows, PlannedRows)
        return {"plan": rows.plan, "scale": self.scale}


def block_union(
    workload: Workload, context: BuildContext, name: str, forward: BlockForward, backward: BlockBackward
) -> BlockUnion:
    """The union for a workload of blocks or of bounds of columns through one pair of kernels.

    Plans are made here, tables by the first call. Raises ConfigError when a mask file does not fit.
    """
    plan = whole_plan(workload)
    if plan is not None:
        return union_over_everything(workload, context, plan, name, forward, backward)
    rows = planned_rows(workload)
    return BlockUnion(
        backend=LoadedBackend(name, cast(Attend, forward), cast(AttendBackward, backward)),
        rows=lambda _device: context.patterns.get(("block rows", workload), lambda: rows),
        covered=covers_every_row(branches_of(_without_mask(workload))),
        causal=workload.causal,
        window=workload.window,
        scale=workload.softmax_scale,
        detached=workload.detaches_merge,
    )


def union_over_everything(
    workload: Workload,
    context: BuildContext,
    plan: Plan,
    name: str,
    forward: BlockForward,
    backward: BlockBackward,
) -> BlockUnion:
    """The union of one call, with a plan over all its rows."""
    as_one = {"seq_len": plan.rows, "layout": "padded", "cu_seqlens": None}
    rows = planned_over_everything(workload.model_copy(update=as_one), plan)
    return BlockUnion(
        backend=LoadedBackend(name, cast(Attend, forward), cast(AttendBackward, backward)),
        rows=lambda _device: context.patterns.get(("block rows", workload), lambda: rows),
        covered=True,
        causal=workload.causal,
        window=workload.window,
        scale=workload.softmax_scale,
    )


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
    count = -(-shape.length // COLUMN_BLOCK)
    everything = np.broadcast_to(np.True_, (1, count, count))
    return BlockPlan(everything, COLUMN_BLOCK, shape.length, workload.causal, workload.window, hidden=hidden)


def require_whole_plan(workload: Workload) -> BlockPlan:
    """`whole_plan`; raises ValueError for a pattern that has none."""
    plan = whole_plan(workload)
    if plan is None:
        raise ValueError(f"{workload.pattern.label()} is neither one mask of blocks nor bounds of columns")
    return plan


def planned_over_everything(workload: Workload, plan: Plan) -> tuple[PlannedRows, ...]:
    """The rows of the one call over the whole sequence."""
    return tuple(PlannedRows.of(rows, plan) for rows in strided_rows(workload.as_dense()))


def planned_rows(workload: Workload) -> tuple[PlannedRows, ...]:
    """The rows of every kernel call with their plans; calls over equal rows share one."""
    plans: dict[object, BlockPlan] = {}
    found = []
    for whole in strided_rows(_without_mask(workload)):
        calls = _one_set_of_heads(whole) if BlockSparsePattern.of(workload).per_head_masks else (whole,)
        for rows in calls:
            heads = _heads(rows)
            key = rows.length, rows.rate, heads
            if key not in plans:
                plans[key] = block_plan(workload, rows.length, rows.rate, heads)
            found.append(PlannedRows.of(rows, plans[key]))
    return tuple(found)


def _without_mask(workload: Workload) -> Workload:
    """The branches that the mask lies over: dense where there are none."""
    return workload.model_copy(update={"pattern": BlockSparsePattern.of(workload).under})


def _one_set_of_heads(rows: StridedRows) -> Sequence[StridedRows]:
    """A call for every head set of a stack: with a mask per head, residues cannot share a call."""
    step = rows.stack.step
    if step.head == 0:
        return (rows,)
    single = Progression(1, ORIGIN)
    whole = rows.whole and rows.stack.count == 1
    starts = [rows.start.after(step, index) for index in range(rows.stack.count)]
    return [replace(rows, start=start, stack=single, whole=whole) for start in starts]


def _heads(rows: StridedRows) -> tuple[int, ...]:
    """The query heads of a call, in its order."""
    return tuple(rows.start.head + index * rows.heads.step.head for index in range(rows.heads.count))


def block_plan(workload: Workload, rows: int, rate: int = 1, heads: tuple[int, ...] | None = None) -> BlockPlan:
    """The plan of a call over `rows` rows that lie `rate` positions apart, for these query heads (None: all).

    Raises ConfigError when a mask file does not fit.
    """
    pattern = BlockSparsePattern.of(workload)
    mask = block_mask(pattern, rows, workload.causal, workload.num_heads)
    if heads is not None and mask.shape[0] > 1:
        mask = mask[list(heads)]
    left, right = (side if side < 0 else side // rate for side in workload.window)
    return BlockPlan(mask, pattern.block_size, rows, workload.causal, (left, right))
