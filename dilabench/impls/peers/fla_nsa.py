"""`fla-nsa`: the selected branch of NSA in flash-linear-attention, `fla.ops.nsa.parallel_nsa`. Read in version 0.6.0.

Without gates it returns this branch alone. It pools keys and values all the same: that is inside the timed call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.impls.selected.stand_ins import selection_of
from dilabench.workload.spec import Workload


def build(workload: Workload, context: BuildContext) -> SelectedBranch:
    """Indices are made here. Raises ModuleNotFoundError where fla-core is missing, ConfigError when a file of indices
    does not fit.
    """
    from fla.ops.nsa import parallel_nsa

    selection = selection_of(workload, context.device)
    # A negative index stands for no block. Each selection has an index once, except one from a file.
    indices = selection.indices.expand(workload.batch_size, -1, -1, -1).long().contiguous()
    return SelectedBranch(parallel_nsa, indices, selection.block, workload.softmax_scale)


@dataclass(frozen=True, slots=True)
class SelectedBranch:
    """out [B, N, H, D] of q [B, N, H, D] and k, v [B, N, K, D]; differentiable, without lse."""

    parallel_nsa: Callable[..., Any]
    indices: Tensor
    block: int
    scale: float

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        counts = self.indices.shape[-1]
        out: Tensor = self.parallel_nsa(
            q, k, v, block_indices=self.indices, block_counts=counts, block_size=self.block, scale=self.scale
        )
        return out
