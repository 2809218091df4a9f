"""`block-sparse-planned` and `block-sparse-selected`: the cost of a plan, and of a selection, made in every call.

The first plans from the pattern's indices or bounds of columns, the second selects indices before; both then attend as
`block-sparse`. So the differences between the three are what planning and selecting take. The selector reads the
pattern's stand-ins (`patterns.selectors`), tensors of the shape and dtype of q and k, so that the oracle knows which
blocks are right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.impls.block_sparse.planned import (
    COLUMN_BLOCK,
    BlockKernels,
    Planned,
    kernels_for,
    require_whole_plan,
)
from dilabench.impls.operator_rules import outside_compilers
from dilabench.kernels.block_sparse.plan import BoundedPlan, Plan
from dilabench.kernels.block_sparse.selected import SelectedPlan, select_blocks
from dilabench.patterns.selectors import SELECTORS, STAND_IN_DIM, stand_ins
from dilabench.patterns.topk_blocks import TopKBlocksPattern
from dilabench.workload.spec import Workload


def build_planned(workload: Workload, context: BuildContext) -> Planning:
    """The indices, or the bounds, are on the device when a call begins."""
    (shape,) = workload.shapes
    hidden = workload.pattern.hidden_rows(shape)
    if hidden is None:
        indices = torch.from_numpy(TopKBlocksPattern.of(workload).selection(shape).copy()).to(context.device)
        return _from_indices(workload, context, lambda: indices)
    limits = require_whole_plan(workload).bounds(context.device)
    return _build(
        workload,
        context,
        lambda: BoundedPlan(limits, COLUMN_BLOCK, shape.length, workload.causal, hidden, workload.window),
    )


def build_selected(workload: Workload, context: BuildContext) -> Planning:
    """The stand-ins are on the device when a call begins. Raises ValueError for a selector that reads no queries."""
    pattern = TopKBlocksPattern.of(workload)
    if not pattern.reads_queries:
        raise ValueError(f"selector={pattern.selector} reads no queries; use block-sparse-planned")
    queries, keys = stand_in_tensors(workload, context.device)
    size, own = pattern.block_size, SELECTORS[pattern.selector].own_block
    select = partial(select_blocks, queries, keys, size, pattern.top_k, causal=workload.causal, own_block=own)
    return _from_indices(workload, context, select)


def stand_in_tensors(workload: Workload, device: torch.device) -> tuple[Tensor, Tensor]:
    """q [N, H, D] and k [N, K, D] in the workload's dtype, whose blocks the pattern's selector scores."""
    (shape,) = workload.shapes
    pattern = TopKBlocksPattern.of(workload)
    pairs = [stand_ins(pattern.blocks_of(shape), head) for head in range(workload.num_kv_heads)]
    of_blocks = np.concatenate([queries for queries, _ in pairs], axis=1), np.stack([keys for _, keys in pairs], axis=1)
    beyond = workload.head_dim - STAND_IN_DIM
    if beyond < 0:
        raise ValueError(f"head_dim {workload.head_dim} is below {STAND_IN_DIM}, the numbers that a selector reads")
    q, k = (torch.from_numpy(part).to(device, getattr(torch, workload.dtype)) for part in of_blocks)
    rows = torch.arange(workload.seq_len, device=device) // pattern.block_size
    q, k = (torch.nn.functional.pad(part[rows], (0, beyond)) for part in (q, k))
    return q, k


def _from_indices(workload: Workload, context: BuildContext, indices: Callable[[], Tensor]) -> Planning:
    size = TopKBlocksPattern.of(workload).block_size
    return _build(
        workload,
        context,
        lambda: SelectedPlan(indices(), size, workload.seq_len, workload.causal, workload.window),
    )


def _build(workload: Workload, context: BuildContext, plan: Callable[[], Plan]) -> Planning:
    return Planning(kernels_for(context.device, getattr(torch, workload.dtype)), plan, workload.softmax_scale)


@dataclass(frozen=True, slots=True)
class Planning:
    """Attention that is planned in each forward pass; its backward pass has the plan of its forward."""

    kernels: BlockKernels
    plan: Callable[[], Plan]
    scale: float

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out [B, N, H, D] of q [B, N, H, D] and k, v [B, N, K, D]; differentiable."""
        return self.with_lse(q, k, v)[0]

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out, and lse [B, H, N] (natural log)."""
        return outside_compilers(self._planned, q, k, v)

    def _planned(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return Planned(self.kernels, self.plan(), self.scale).with_lse(q, k, v)
