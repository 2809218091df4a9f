"""`flashinfer-vsa`: FlashInfer's own Hopper kernel for masks of 64-row blocks, planned in `build`.

It is the backend "cake" of VariableBlockSparseAttentionWrapper, which the default, "auto", never picks. Read in version
0.7.2.post1. It wants heads first: those copies are inside the timed call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.workload.spec import Workload


def build(workload: Workload, context: BuildContext) -> WholeBlocks64:
    """Raises ModuleNotFoundError where FlashInfer is missing, ValueError on a GPU that is not a Hopper."""
    import flashinfer

    (shape,) = workload.shapes
    blocks = workload.pattern.whole_blocks(shape)
    if blocks is None:
        raise ValueError(f"{workload.pattern.label()} is not one mask of whole blocks")
    mask = torch.from_numpy(blocks.mask.copy()).to(context.device).expand(workload.num_heads, -1, -1)
    sizes = torch.full(mask.shape[:2], blocks.block_size, dtype=torch.int32, device=context.device)
    # This backend has separate buffers and reads only the device of a workspace.
    workspace = torch.empty(0, dtype=torch.uint8, device=context.device)
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(workspace, backend="cake")
    wrapper.plan(
        mask,
        sizes,
        sizes,
        workload.num_heads,
        workload.num_kv_heads,
        workload.head_dim,
        sm_scale=workload.softmax_scale,
        q_data_type=getattr(torch, workload.dtype),
    )
    return WholeBlocks64(wrapper)


class WholeBlocks64:
    """out [1, N, H, D] of q, k, v [1, N, H, D]; forward only, without lse."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self._wrapper.run(*(x[0].transpose(0, 1).contiguous() for x in (q, k, v)))
        return out.transpose(0, 1)[None]
