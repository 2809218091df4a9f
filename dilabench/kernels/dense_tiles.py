"""Dense attention through the block kernels, every block set. Any outer strides, so strided views cost nothing."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from torch import Tensor

from dilabench.kernels.block_sparse.backward import block_sparse_backward
from dilabench.kernels.block_sparse.forward import block_sparse_forward
from dilabench.kernels.block_sparse.plan import BlockPlan

BLOCK = 128
UNBOUNDED = (-1, -1)


@lru_cache(maxsize=64)
def _plan(rows: int, causal: bool, window: tuple[int, int]) -> BlockPlan:
    blocks = -(-rows // BLOCK)
    return BlockPlan(np.ones((1, blocks, blocks), bool), BLOCK, rows, causal, window)


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: tuple[int, int] = UNBOUNDED, scale: float
) -> tuple[Tensor, Tensor]:
    """As `dilabench.contracts.Attend`, for as many keys as queries. Raises ValueError for other shapes."""
    return block_sparse_forward(q, k, v, _plan(q.shape[1], causal, window), scale=scale)


def attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    window: tuple[int, int] = UNBOUNDED,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `dilabench.contracts.AttendBackward`, for as many keys as queries. Raises ValueError for other shapes."""
    plan = _plan(q.shape[1], causal, window)
    return block_sparse_backward(dout, q, k, v, out, lse, plan, scale=scale)
