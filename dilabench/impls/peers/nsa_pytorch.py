"""`native-sparse-attention-pytorch`: the selected branch of lucidrains' package of this name, `native_sparse_attend`.
Read in version 0.2.3.

It adds the token's own block itself, so the indices that it gets are of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.impls.peers.private_import import imported
from dilabench.impls.selected.stand_ins import selection_of
from dilabench.workload.spec import Workload

INSTALL = "pip install --no-deps native-sparse-attention-pytorch; pip install einops einx jaxtyping"


def build(workload: Workload, context: BuildContext) -> SelectedBranch:
    """Indices are made here. Raises ModuleNotFoundError if the package is missing."""
    # Its top-level module needs packages that this one does not.
    module = imported("native_sparse_attention_pytorch.triton_native_sparse_attention", install=INSTALL)
    selection = selection_of(workload, context.device)
    indices = selection.indices.long().expand(workload.batch_size, -1, -1, -1).transpose(1, 2).contiguous()
    own = torch.arange(selection.length, device=context.device)[:, None] // selection.block
    others = (indices >= 0) & (indices != own)
    return SelectedBranch(module.native_sparse_attend, indices.clamp_min(0), others, selection.block)


@dataclass(frozen=True, slots=True)
class SelectedBranch:
    """out [B, N, H, D] of q [B, N, H, D] and k, v [B, N, K, D]; differentiable, without lse.

    ``indices``, ``others`` [B, K, N, S]: key blocks, and which of them are not the token's own.
    """

    native_sparse_attend: Callable[..., Tensor]
    indices: Tensor
    others: Tensor
    block: int

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return self.native_sparse_attend(*heads_first, self.block, self.indices, self.others).transpose(1, 2)
