"""The block plans of a workload: its masks with causal edge and window, in the rows of a kernel call."""

from __future__ import annotations

from dilabench.kernels.block_sparse.plan import BlockPlan
from dilabench.patterns.block_masks import block_mask
from dilabench.patterns.block_sparse import BlockSparsePattern
from dilabench.workload.spec import Workload


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
