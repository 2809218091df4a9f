"""Merging a branch's rows into the output, in place."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

# Elements of a slice that a half-precision merge holds in float32: what a cache keeps, and work enough for a GPU.
SLICE_ELEMENTS = 2**13
SLICE_ELEMENTS_ON_CUDA = 2**24


def merge_rows_(out: Tensor, lse: Tensor, branch_out: Tensor, branch_lse: Tensor) -> None:
    """Make (out, lse) the attention over both key sets, given each set's own out and lse.

    out, branch_out [..., L, A, D] (4 or 5 dimensions); lse, branch_lse [..., A, L]; views of any strides. A side with
    lse -inf is empty and must have out 0, which then stays 0. One Triton kernel on CUDA where Triton runs; elsewhere
    PyTorch, without a copy of the rows.
    """
    if has_kernel(out.device, out.dtype):
        # Triton is not installed everywhere, and only CUDA needs it.
        from dilabench.kernels.merge import merge_rows_ as merge_rows_fused_

        merge_rows_fused_(out, lse, branch_out, branch_lse)
        return
    share = torch.sigmoid(branch_lse - lse).masked_fill_(branch_lse == float("-inf"), 0.0)
    lse.copy_(torch.logaddexp(lse, branch_lse))
    share_of_row = share.transpose(-1, -2).unsqueeze(-1)
    if out.dtype == share.dtype:
        out.lerp_(branch_out, share_of_row)
    else:
        _lerp_in_slices_(out, branch_out, share_of_row)


@cache
def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton merges results of the dtype on the device: from sm_80 on, also where CUDA is only traced."""
    if device.type != "cuda" or dtype == torch.float64 or find_spec("triton") is None:
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


def _lerp_in_slices_(out: Tensor, end: Tensor, weight: Tensor) -> None:
    """`out.lerp_(end, weight)` computed in the dtype of the weight, some rows at a time."""
    rows = out.shape[-3]
    elements = SLICE_ELEMENTS_ON_CUDA if out.device.type == "cuda" else SLICE_ELEMENTS
    rows_per_slice = max(1, elements * rows // max(1, out.numel()))
    for start in range(0, rows, rows_per_slice):
        part = slice(start, start + rows_per_slice)
        kept, added = out[..., part, :, :], end[..., part, :, :]
        kept.copy_(kept.to(weight.dtype).lerp_(added.to(weight.dtype), weight[..., part, :, :]))
