"""Memory of the implementations that compile FlexAttention. On CUDA only.

Within 1 % of what one shape of each needed on an H200 (torch 2.11), forward alone and with backward.
"""

from dilabench.predict.memory.kernels import FLEX
from dilabench.predict.memory.sizes import INDEX_BYTES, MemoryPlan, Sizes, inputs_of
from dilabench.predict.memory.union import one_kernel, two_passes
from dilabench.workload.spec import Workload

# `create_block_mask` cuts to these blocks; a BlockMask has four lists of int32, by query and by key, full and partly.
BLOCK = 128
MASK_LISTS = 4
LIST_ITEM_BYTES = 4


def flex(workload: Workload, checkpointed: bool = False) -> MemoryPlan:
    """`flex`: out and lse in the layout of q, and the block mask."""
    tables = block_mask_bytes(workload, workload.num_heads, BLOCK)
    return one_kernel(workload, FLEX.stats, checkpointed, tables=tables, copied=dout_copy(workload))


def dout_copy(workload: Workload) -> float:
    """The copy of dout that a compiled backward pass starts with.

    torch.compile traces the backward pass before there is a dout. Up to torch 2.11 at least it expects a contiguous one
    (`guess_tangent_strides_as_outputs` is off in torch._functorch.config) and copies what comes otherwise; dout comes
    in the layout of q, as a transposed view to [B, H, N, D]. The view of a single head is contiguous. torch 2.13
    expects dout to lie as out does, copies nothing, and needs so much less.
    """
    return Sizes.of(workload).q if workload.num_heads > 1 else 0.0


def flex_permuted(workload: Workload) -> MemoryPlan:
    """`flex-permuted`: all tensors once more in another order, which is what the kernel and its backward pass see."""
    sizes = Sizes.of(workload)
    tables = block_mask_bytes(workload, workload.num_heads, BLOCK) + 2 * INDEX_BYTES * workload.seq_len
    copies = sizes.gradients
    if workload.mode == "forward":
        forward = copies + sizes.q + max(sizes.lse, sizes.q)
        return two_passes(workload, forward, 0.0, tables=tables)
    saved = copies + sizes.result
    # The result that the user holds, dout in the other order and its copy; the kernel's own out, which counts as saved
    # but is held by nobody else, is gone before there are gradients of the copies.
    beside = 2 * sizes.q + dout_copy(workload) - sizes.q
    backward = beside + sizes.gradients + FLEX.stats * sizes.rows_float32
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
