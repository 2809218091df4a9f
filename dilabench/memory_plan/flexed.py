"""Memory of the implementations that compile FlexAttention. On CUDA only; derived, not yet measured on a GPU."""

from dilabench.memory_plan.kernels import FLEX
from dilabench.memory_plan.sizes import INDEX_BYTES, MemoryPlan, Sizes, inputs_of
from dilabench.memory_plan.union import one_kernel, two_passes
from dilabench.spec import Workload

# `create_block_mask` cuts to these blocks; a BlockMask has four lists of int32, by query and by key, full and partly.
BLOCK = 128
MASK_LISTS = 4
LIST_ITEM_BYTES = 4


def flex(workload: Workload, checkpointed: bool = False) -> MemoryPlan:
    """`flex`: out and lse in the layout of q, and the block mask."""
    return one_kernel(workload, FLEX.stats, checkpointed, tables=block_mask_bytes(workload, workload.num_heads, BLOCK))


def flex_permuted(workload: Workload) -> MemoryPlan:
    """`flex-permuted`: all tensors once more in another order, which is what the kernel and its backward pass see."""
    sizes = Sizes.of(workload)
    tables = block_mask_bytes(workload, workload.num_heads, BLOCK) + 2 * INDEX_BYTES * workload.seq_len
    copies = sizes.gradients
    if workload.mode == "forward":
        forward = copies + sizes.q + max(sizes.lse, sizes.q)
        return two_passes(workload, forward, 0.0, tables=tables)
    saved = copies + sizes.result
    # The result that the user holds, dout in the other order, and the gradients of the copies.
    backward = 2 * sizes.q + sizes.gradients + FLEX.stats * sizes.rows_float32
    return MemoryPlan(
        inputs_bytes=inputs_of(workload, sizes),
        saved_bytes=round(saved),
        workspace_bytes=round(backward),
        tables_bytes=tables,
    )


def block_mask_bytes(workload: Workload, mask_heads: int, block: int) -> int:
    """The lists of a BlockMask, each as long as there are blocks."""
    blocks = -(-workload.seq_len // block)
    return MASK_LISTS * LIST_ITEM_BYTES * mask_heads * blocks**2
