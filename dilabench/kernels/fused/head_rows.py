"""How the block-sparse kernels see tensors: tiles of rows of one head."""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dilabench.kernels.fused.row_layout import HEAD_DIMS


def check_head_dim(dim: int) -> None:
    """Raises ValueError when there is no kernel for the head dimension."""
    if dim not in HEAD_DIMS:
        raise ValueError(f"head dimension {dim} is not one of {HEAD_DIMS}: pad it, or use the blocked path")


def head_rows(x: Tensor, rows: int) -> TensorDescriptor:
    """``x [B, N, H, D]`` as [B, H, N, D] in tiles of [1, 1, rows, D]; reads past the end give 0, writes go nowhere."""
    if x.stride(3) != 1 or any(stride * x.element_size() % 16 for stride in x.stride()[:3]) or x.data_ptr() % 16:
        x = x.contiguous()
    view = x.transpose(1, 2)
    return TensorDescriptor(view, list(view.shape), list(view.stride()), [1, 1, rows, x.shape[3]])
