"""`block-sparse-flex`: torch's FlexAttention over a BlockMask of the same blocks.

`block-sparse-flex-planned` makes the mask of bounds of columns in every call, by torch's own `create_block_mask`, which
looks at all N x N pairs: what a user pays whose documents are other ones in each batch.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from dilabench.contracts import BuildContext
from dilabench.impls.block_sparse.union import COLUMN_BLOCK, require_whole_plan
from dilabench.kernels.block_sparse.lists import padded_lists
from dilabench.kernels.block_sparse.plan import BlockPlan
from dilabench.workload.spec import Workload

# torch 2.9 replaced return_lse=True (a tuple with lse) by return_aux (a tuple with a record).
_ASK_FOR_LSE: dict[str, Any] = (
    {"return_aux": flex.AuxRequest(lse=True)} if hasattr(flex, "AuxRequest") else {"return_lse": True}
)

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def build(workload: Workload, context: BuildContext) -> Flex:
    """The mask is made and moved to the device here; the first call compiles."""
    mask = flex_mask(require_whole_plan(workload), workload.num_heads, context.device)
    return Flex(lambda: mask, workload.softmax_scale, _compiled(_attend, context.device))


def build_planned(workload: Workload, context: BuildContext) -> Flex:
    """The bounds are on the device when a call begins. Raises ValueError for a pattern that has none."""
    plan = require_whole_plan(workload)
    if plan.hidden is None:
        raise ValueError(f"{workload.pattern.label()} has no bounds of columns; use block-sparse-flex")
    visible, create = mask_function(plan, context.device), _compiled(_create_mask, context.device)
    return Flex(
        lambda: create(visible, plan.rows, context.device), workload.softmax_scale, _compiled(_attend, context.device)
    )


def _compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """As torch.compile has it on CUDA; `fullgraph` refuses a silent fall to the quadratic eager form.

    torch.compile gives up on one function after eight classes of shapes: each build compiles a function of its own.
    """
    own_code = types.FunctionType(function.__code__.replace(), function.__globals__)
    return torch.compile(own_code, fullgraph=True, dynamic=False) if device.type == "cuda" else own_code


@dataclass(frozen=True, slots=True)
class Flex:
    """A compiled FlexAttention with what gives its mask."""

    mask: Callable[[], flex.BlockMask]
    scale: float
    compiled: Callable[..., tuple[Tensor, Any]]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out [B, N, H, D] of q [B, N, H, D] and k, v [B, N, K, D]; differentiable."""
        return self.with_lse(q, k, v)[0]

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out, and lse [B, H, N] (natural log, float32)."""
        out, extra = self.compiled(*(x.transpose(1, 2) for x in (q, k, v)), self.mask(), self.scale)
        lse: Tensor = extra if isinstance(extra, Tensor) else extra.lse
        return out.transpose(1, 2), lse.detach()


def flex_mask(plan: BlockPlan, num_heads: int, device: torch.device) -> flex.BlockMask:
    """The plan's blocks as a BlockMask; its mask function is evaluated in partly visible blocks only."""
    # Lists of full length, so that masks of every density share one compiled kernel.
    lists = padded_lists(plan.lists(plan.block_size, plan.block_size, by_key=False), plan.mask.shape[-1])
    # A mask is of one head, which all share, or of every query head.
    sharing = 1 if plan.mask_heads == 1 else num_heads // plan.mask_heads
    parts = (lists.partly_count, lists.partly, lists.full_count, lists.full)
    partly_count, partly, full_count, full = (
        torch.from_numpy(part).to(device).repeat_interleave(sharing, 1) for part in parts
    )
    return flex.BlockMask.from_kv_blocks(
        partly_count,
        partly,
        full_count,
        full,
        BLOCK_SIZE=plan.block_size,
        mask_mod=mask_function(plan, device),
        seq_lengths=(plan.rows, plan.rows),
    )


def mask_function(plan: BlockPlan, device: torch.device) -> MaskFunction:
    """What is visible inside the plan's blocks: by causal edge, window and bounds of columns."""
    left = plan.left if plan.left >= 0 else plan.rows
    right = plan.right if plan.right >= 0 else plan.rows
    bounds = plan.bounds(device)

    def visible(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (j >= i - left) & (j <= i + right)
        for index in range(len(bounds)):
            seen = seen & ((i < bounds[index, 0, j]) | (i >= bounds[index, 1, j]))
        return seen

    return visible


def _create_mask(visible: MaskFunction, rows: int, device: torch.device) -> flex.BlockMask:
    return flex.create_block_mask(visible, None, None, rows, rows, device=device, BLOCK_SIZE=COLUMN_BLOCK)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: flex.BlockMask, scale: float) -> tuple[Tensor, Any]:
    return flex.flex_attention(
        q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1], **_ASK_FOR_LSE
    )
