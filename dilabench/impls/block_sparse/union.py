"""Attention over blocks of every branch's rows: the union of `union.py` with a block mask in each kernel call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from dilabench.contracts import Attend, AttendBackward, BuildContext, LoadedBackend
from dilabench.impls.block_sparse.planned import BlockKernels
from dilabench.impls.union.branches import ORIGIN, Progression, branches_of, covers_every_row
from dilabench.impls.union.strided_rows import StridedRows, strided_rows
from dilabench.impls.union.union import Rows, Union
from dilabench.kernels.block_sparse.plan import BlockPlan, Plan
from dilabench.patterns.block_sparse import BlockSparsePattern, block_mask
from dilabench.workload.spec import Workload


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


def block_union(workload: Workload, context: BuildContext, kernels: BlockKernels) -> BlockUnion:
    """The union for a mask of blocks over branches. Raises ConfigError when a mask file does not fit."""
    calls = cast(Attend, kernels.attend), cast(AttendBackward, kernels.attend_backward)
    return BlockUnion(
        backend=LoadedBackend(kernels.name, *calls),
        rows=lambda _device: context.patterns.get(("block rows", workload), lambda: planned_rows(workload)),
        covered=covers_every_row(branches_of(_without_mask(workload))),
        causal=workload.causal,
        window=workload.window,
        scale=workload.softmax_scale,
        detached=workload.detaches_merge,
    )


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
