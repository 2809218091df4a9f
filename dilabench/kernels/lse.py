"""Merging by log-sum-exp: results over disjoint sets of keys become the result over all of them, in place.

A result is out, and lse, the log of its softmax's denominator. The union of results i has lse = log sum_i exp(lse_i)
and out = sum_i exp(lse_i - lse) out_i. A row with lse -inf saw no key: it is empty, its share 0.

A Triton kernel on CUDA where Triton runs (`merge`); elsewhere PyTorch, by the formulas of this module.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from packaging.version import Version
from torch import Tensor

# Elements of a slice that a half-precision merge holds in float32: what a cache keeps, and work enough for a GPU.
SLICE_ELEMENTS = 2**13
SLICE_ELEMENTS_ON_CUDA = 2**24
# The most partial results that one pass of `combine` reads; a ring over four ranks needs one pass.
MOST_PARTS = 4


# The version of Triton in torch 2.10, the first that dilabench's kernels ran with. Descriptors require it, too
# (`choice.implementations`).
LEAST_TRITON = "3.6"


@cache
def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton merges results of the dtype on the device: from sm_80 and 3.6 on, also where CUDA is traced."""
    if device.type != "cuda" or dtype == torch.float64 or find_spec("triton") is None:
        return False
    import triton

    if Version(triton.__version__) < Version(LEAST_TRITON):
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


def share_of(lse: Tensor, union_lse: Tensor) -> Tensor:
    """exp(lse - union_lse): the share of a result in a union of results; 0 where both are -inf."""
    return torch.exp(lse - union_lse.masked_fill(union_lse == float("-inf"), 0.0))


def share_of_two(lse: Tensor, other: Tensor) -> Tensor:
    """The share of the first in the union of two results, whose lse is logaddexp(lse, other); 0 if that is -inf."""
    return torch.sigmoid(lse - other).masked_fill_(lse == float("-inf"), 0.0)


def by_row(share: Tensor) -> Tensor:
    """[..., A, L] as [..., L, A, 1], which broadcasts to out."""
    return share.transpose(-1, -2).unsqueeze(-1)


def merge_rows_(out: Tensor, lse: Tensor, branch_out: Tensor, branch_lse: Tensor) -> None:
    """Make (out, lse) the attention over both key sets, given each set's own out and lse.

    out, branch_out [..., L, A, D] (4 or 5 dimensions); lse, branch_lse [..., A, L]; views of any strides. A side with
    lse -inf is empty and must have out 0, which then stays 0. In PyTorch no copy of the rows is made.
    """
    if has_kernel(out.device, out.dtype):
        # Triton is not installed everywhere, and only CUDA needs it.
        from dilabench.kernels.merge import merge_rows_ as merge_rows_fused_

        merge_rows_fused_(out, lse, branch_out, branch_lse)
        return
    share = share_of_two(branch_lse, lse)
    lse.copy_(torch.logaddexp(lse, branch_lse))
    if out.dtype == share.dtype:
        out.lerp_(branch_out, by_row(share))
    else:
        _lerp_in_slices_(out, branch_out, by_row(share))


def add_null_mass_(out: Tensor, lse: Tensor, log_mass: Tensor) -> None:
    """Add to out [B, N, H, D] and lse [B, H, N], in place, a mass whose logarithm broadcasts to lse; -inf adds none.

    A row without keys gets lse log n, and must have out 0. One pass over out.
    """
    if has_kernel(out.device, out.dtype):
        from dilabench.kernels.merge import merge_rows_ as merge_rows_fused_

        # Like keys whose out is a row of zeros.
        merge_rows_fused_(out, lse, out.new_zeros(out.shape[-1]).expand(out.shape), log_mass.expand(lse.shape))
        return
    share = share_of_two(lse, log_mass)
    lse.copy_(torch.logaddexp(lse, log_mass))
    out.mul_(by_row(share))


def _lerp_in_slices_(out: Tensor, end: Tensor, weight: Tensor) -> None:
    """`out.lerp_(end, weight)` computed in the dtype of the weight, some rows at a time."""
    rows = out.shape[-3]
    elements = SLICE_ELEMENTS_ON_CUDA if out.device.type == "cuda" else SLICE_ELEMENTS
    rows_per_slice = max(1, elements * rows // max(1, out.numel()))
    for start in range(0, rows, rows_per_slice):
        part = slice(start, start + rows_per_slice)
        kept, added = out[..., part, :, :], end[..., part, :, :]
        kept.copy_(kept.to(weight.dtype).lerp_(added.to(weight.dtype), weight[..., part, :, :]))
