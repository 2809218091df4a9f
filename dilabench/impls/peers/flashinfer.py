"""`flashinfer`: FlashInfer's block-sparse attention, planned in `build`. Read in version 0.7.2.post1.

One mask for all heads goes to BlockSparseAttentionWrapper, masks of key/value heads to
VariableBlockSparseAttentionWrapper, which wants heads first: those copies are inside the timed call.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.workload.spec import Workload

# As its documentation recommends.
WORKSPACE_BYTES = 128 * 2**20


def build(workload: Workload, context: BuildContext) -> BlockSparse:
    """Raises ModuleNotFoundError where FlashInfer is missing."""
    import flashinfer

    (shape,) = workload.shapes
    blocks = workload.pattern.whole_blocks(shape)
    if blocks is None:
        raise ValueError(f"{workload.pattern.label()} is not one mask of whole blocks")
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=context.device)
    mask = torch.from_numpy(blocks.mask.copy()).to(context.device)
    dtype = getattr(torch, workload.dtype)
    heads = workload.num_heads, workload.num_kv_heads, workload.head_dim
    options = {"sm_scale": workload.softmax_scale, "q_data_type": dtype, "kv_data_type": dtype}
    if len(mask) == 1:
        wrapper = flashinfer.BlockSparseAttentionWrapper(workspace)
        indices = mask[0].nonzero()[:, 1].int()
        indptr = torch.nn.functional.pad(mask[0].sum(1).cumsum(0), (1, 0)).int()
        sizes = shape.length, shape.length, blocks.block_size, blocks.block_size
        wrapper.plan(indptr, indices, *sizes, *heads, o_data_type=dtype, **options)
        return BlockSparse(wrapper, heads_first=False)
    variable = flashinfer.VariableBlockSparseAttentionWrapper(workspace)
    sizes_of_blocks = torch.full(mask.shape[:2], blocks.block_size, dtype=torch.int32, device=context.device)
    sizes_of_blocks[:, -1] = shape.length - (mask.shape[1] - 1) * blocks.block_size
    variable.plan(mask, sizes_of_blocks, sizes_of_blocks, *heads, **options)
    return BlockSparse(variable, heads_first=True)


class BlockSparse:
    """out [1, N, H, D] of q [1, N, H, D] and k, v [1, N, K, D]; forward only."""

    def __init__(self, wrapper: Any, heads_first: bool) -> None:
        self._wrapper, self._heads_first = wrapper, heads_first

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self._wrapper.run(*map(self._given, (q, k, v)))
        return self._taken(out)

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out, and lse [1, H, N]; FlashInfer's has base 2."""
        out, lse = self._wrapper.run(*map(self._given, (q, k, v)), return_lse=True)
        return self._taken(out), ((lse if self._heads_first else lse.T) * math.log(2))[None]

    def _given(self, x: Tensor) -> Tensor:
        return x[0].transpose(0, 1).contiguous() if self._heads_first else x[0]

    def _taken(self, out: Tensor) -> Tensor:
        return (out.transpose(0, 1) if self._heads_first else out)[None]
