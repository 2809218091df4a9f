"""`block-sparse`: attention over lists of visible blocks, forward and backward; on CUDA by Triton kernels.

With branches, the mask applies to the rows that each dilated branch keeps, read in place, and results merge as in
`strided`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dilabench.contracts import BuildContext
from dilabench.impls.block_sparse.planned import Planned, kernels_for, plan_of_last_rows, whole_plan
from dilabench.impls.last_rows import InSquare
from dilabench.workload.spec import Workload

if TYPE_CHECKING:
    from dilabench.impls.block_sparse.packed import InWholeBlocks
    from dilabench.impls.block_sparse.union import BlockUnion
    from dilabench.impls.packed import Packed


def build(workload: Workload, context: BuildContext) -> Planned | BlockUnion | InSquare | InWholeBlocks | Packed:
    """Plans are made here, tables by the first call. Raises ConfigError when a mask file does not fit."""
    if workload.layout == "padded":
        return padded(workload, context)
    from dilabench.impls.block_sparse.packed import in_one_launch
    from dilabench.impls.packed import build_packed

    return in_one_launch(workload, context) or build_packed(padded, workload, context)


def padded(workload: Workload, context: BuildContext) -> Planned | BlockUnion | InSquare:
    """The computation for sequences of one length: one call, or one for each of the branches under a mask."""
    kernels = kernels_for(context.device, getattr(torch, workload.dtype))
    if workload.query_len is not None:
        plan = plan_of_last_rows(workload)
        if plan is None:
            return InSquare(padded(workload.replace(query_len=None), context), workload.seq_len)
        computation = Planned(kernels, plan, workload.softmax_scale)
        return computation if plan.rows == workload.query_len else InSquare(computation, plan.rows)
    plan = whole_plan(workload)
    if plan is not None:
        return Planned(kernels, plan, workload.softmax_scale)
    from dilabench.impls.block_sparse.union import block_union

    return block_union(workload, context, kernels)
