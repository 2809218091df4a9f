"""How far a result may be from the oracle, derived from rounding.

An error is measured in units of the value's natural size: sqrt(sum of the squared terms) + |value|, what independent
rounding of the terms moves, over eps; a term counts for more where its score is larger (rounding.py). Measured so,
the error of a right computation is about the same in every row, whether it averages three keys or a million, and a
row of zeros is far beyond it.

    tolerance = max(2 · plain + exact, (floor + merges / 2) · eps)

plain is the largest error of the plain same-dtype computation of the formula on the same rows; exact is the oracle's
own, the same number scaled from that dtype's eps to float64's. The floor is for where plain rounds nothing (one key,
say): two ulp for a softmax, and half an ulp, one rounding, for each further branch that is merged into it. For lse it
is four: GPU kernels take exp2 and log2 from approximations that are right to two ulp each (CUDA C++ Programming Guide,
intrinsic functions), and nothing after them averages that out. Gradients take P from that lse by one more exp2: six
ulp of the accumulation dtype, which for half precision is less than two of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dilabench.spec import Workload

# exp2 and log2, two ulp each.
LSE_FLOOR_ULPS = 4.0
# The lse, and exp2 once more.
GRADIENT_FLOOR_ULPS = 6.0


@dataclass(frozen=True, slots=True)
class Expected:
    """value: float64. size: the natural size of each value (may broadcast). tolerance: in units of size."""

    value: Tensor
    size: Tensor
    tolerance: float


def expect(
    value: Tensor, size: Tensor, plain: Tensor, dtype: torch.dtype, merges: int, floor_ulps: float = 2.0
) -> Expected:
    """The expectation for results of `dtype`; `plain` is the plain computation in `plain_dtype(dtype)`.

    merges: as `branch_merges` says.
    """
    # Where nothing is summed the size is zero: far below the largest, whatever is not zero is wrong.
    largest = float(size.max()) if size.numel() else 0.0
    size = size.clamp_min(max(torch.finfo(dtype).tiny, eps(dtype) ** 2 * largest))
    error = float(errors(plain, value, size).max()) if value.numel() else 0.0
    # float64 has no plain computation that differs from the oracle; rounding is linear in eps.
    error *= eps(dtype) / eps(plain.dtype) if dtype == torch.float64 else 1.0
    exact = error * eps(torch.float64) / eps(dtype)
    return Expected(value, size, max(2 * error + exact, (floor_ulps + merges / 2) * eps(dtype)))


def errors(actual: Tensor, value: Tensor, size: Tensor) -> Tensor:
    """|actual - value| / size in float64; equal infinities are no error, NaN stays NaN."""
    actual = actual.double()
    return (actual - value).abs_().masked_fill_(actual == value, 0.0).div_(size)


def branch_merges(workload: Workload) -> int:
    """How many branches of a head are merged into its first: none where a head has one branch or there are none."""
    dilated = workload.dilated
    if dilated is None or dilated.heads == "grouped":
        return 0
    return len(dilated.branches) - 1


def plain_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the plain computation: the workload's own; for float64 float32, scaled by `expect`."""
    return torch.float32 if dtype == torch.float64 else dtype


def eps(dtype: torch.dtype) -> float:
    """Distance from 1 to the next number."""
    return float(torch.finfo(dtype).eps)
