"""Attention of each token to compressed keys, NSA's first branch (Yuan et al. 2025, equation 7), by the kernels for
blocks with rows that keys are hidden from: a compressed key is seen from the last of its tokens on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from dilabench.impls.block_sparse.block_sparse import kernels_for
from dilabench.impls.block_sparse.union import COLUMN_BLOCK
from dilabench.impls.selected.selecting import Compression
from dilabench.kernels.block_sparse.plan import BlockPlan
from dilabench.patterns.answers import HiddenRows


@dataclass(frozen=True, slots=True)
class CompressedAttention:
    """A `one_operator.Computation` of q [B, N, H, D] over k, v [B, C, K, D], C at least 1."""

    compression: Compression
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out and lse; 0 and -inf for tokens before the end of the first compressed key."""
        _, forward, _ = kernels_for(q.device)
        return forward(q, k, v, _plan(self.compression, q.shape[1], q.device), scale=self.scale)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv."""
        _, _, backward = kernels_for(q.device)
        plan = _plan(self.compression, q.shape[1], q.device)
        return backward(dout.contiguous(), q, k, v, out, lse, plan, scale=self.scale)


# A plan keeps its tables, on one device.
@lru_cache(maxsize=16)
def _plan(compression: Compression, length: int, _device: torch.device) -> BlockPlan:
    lasts = compression.lasts(length, torch.device("cpu")).numpy()
    hidden = HiddenRows.of(length, (np.zeros_like(lasts), lasts))
    blocks = 1, -(-length // COLUMN_BLOCK), -(-len(lasts) // COLUMN_BLOCK)
    everything = np.broadcast_to(np.True_, blocks)
    return BlockPlan(everything, COLUMN_BLOCK, length, False, key_rows=len(lasts), hidden=hidden)
