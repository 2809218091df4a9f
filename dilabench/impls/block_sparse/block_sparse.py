"""`block-sparse`: attention over lists of visible blocks, forward and backward; on CUDA by Triton kernels.

With branches, the mask applies to the rows that each dilated branch keeps, read in place, and results merge as in
`strided`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.impls.block_sparse.on_cpu import blocked_backward, blocked_forward, listed_backward, listed_forward
from dilabench.impls.block_sparse.packed import InWholeBlocks, packed_union
from dilabench.impls.block_sparse.union import BlockBackward, BlockForward, BlockUnion, block_union
from dilabench.impls.packed import Packed
from dilabench.kernels.block_sparse.plan import Plan
from dilabench.kernels.cpu import flash
from dilabench.workload.spec import Workload


def build(workload: Workload, context: BuildContext) -> BlockUnion | InWholeBlocks | Packed:
    """Kernels by the kind of device. Raises ConfigError when a mask file does not fit."""
    make = block_union if workload.layout == "padded" else packed_union
    return make(workload, context, *kernels_for(context.device))


def kernels_for(device: torch.device) -> tuple[str, BlockForward, BlockBackward]:
    """Name, forward and backward of the kernels for a kind of device."""
    if device.type == "cuda":
        return "block-sparse tiles", tiles_forward, tiles_backward
    return "blocks", cpu_forward, cpu_backward


def cpu_forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float) -> tuple[Tensor, Tensor]:
    """`BlockForward` on a CPU: by dilabench's kernel if it can run, else by torch's."""
    forward = listed_forward if flash.serves(q.dtype) else blocked_forward
    return forward(q, k, v, plan, scale=scale)


def cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: Plan, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`BlockBackward` on a CPU, as `cpu_forward`."""
    backward = listed_backward if flash.serves(q.dtype) else blocked_backward
    return backward(dout, q, k, v, out, lse, plan, scale=scale)


def tiles_forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float) -> tuple[Tensor, Tensor]:
    """`BlockForward` by the Triton kernels, for any head dim up to 256."""
    # Triton is not installed everywhere, and only CUDA needs it.
    from dilabench.kernels.block_sparse.forward import block_sparse_forward

    return block_sparse_forward(q, k, v, plan, scale=scale)


def tiles_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: Plan, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`BlockBackward` by the Triton kernels, for any head dim up to 256."""
    from dilabench.kernels.block_sparse.backward import block_sparse_backward

    return block_sparse_backward(dout, q, k, v, out, lse, plan, scale=scale)
