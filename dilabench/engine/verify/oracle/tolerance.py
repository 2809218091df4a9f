"""Tolerances: how far a result may be from the oracle, derived from rounding.

An error is measured in units of the value's natural size, sqrt(sum of the squared terms) + |value|. Independent
rounding of the terms moves the value by eps times this size. A term counts for more if its score is larger
(rounding.py). In these units the error of a right computation is about the same in every row, whether the row averages
three keys or a million. A row of zeros is far beyond it.

    tolerance = max(2 · plain + exact, (floor + merges / 2) · eps, walk)

plain is the largest error of the plain same-dtype computation of the formula on the same rows. exact is the oracle's
own error: the same number, scaled from that dtype's eps to float64's.

The floor covers rows in which plain rounds nothing, such as rows with one key. It is two ulp for a softmax, and half an
ulp, one rounding, for each further branch that is merged into it. GPU kernels take exp2 and log2 from approximations
that are right to two ulp each (CUDA C++ Programming Guide, intrinsic functions). No later step averages these errors
out. An out of few keys may therefore be off by two ulp more, and lse by four. Gradients may be off by six, because they
take P from that lse by one more exp2. These are ulp of the accumulation dtype. For half precision all of them are less
than two ulp of the half-precision dtype.

Gradients also take P from scores that are summed a second time, perhaps in another order. A score is a sum of D terms
of either sign. After d terms the sum is about sqrt(d / D) of its size. Each addition rounds by up to u = eps / 2 of
that, uniformly distributed. The error of the sum has a standard deviation of u / sqrt(3) · sqrt(sum_d d / D) =
u sqrt(D / 6) of its size. lse and the second score are two such sums. Six standard deviations of their difference are
6 u sqrt(D / 3). The difference shows in float32 if a row sees one key. The row's P is 1 in plain, which sums both
scores in one order. In a kernel this P was seen to be off by 1.3e-6 of its size at D = 256.

walk covers sequential sums. plain is computed for few rows, in the order that suits its matrix product. A kernel may
add n terms to one running sum, and a check may look at every row. Each addition rounds by up to u = eps / 2 of the sum
so far, at random. The error of the sum is then lambda sqrt(n) u of it (Higham and Mary 2019, "A New Approach to
Probabilistic Rounding Error Analysis", theorem 2.4). Sizes count a sum about twice, so that lambda = 1 here is 2 there.
This is six standard deviations for a sum that grows evenly.

The eps of walk is that of the accumulation dtype, so walk matters if results are as exact as sums. On an H200, float32
over 8192 keys was off by 2.7e-6 with FlexAttention and with torch's plain kernels. There 2 · plain was 1.0e-6, and
sqrt(n) u is 5.4e-6. A weight is known no better than its score, which is a sum of D terms of either sign. Six of the
score's standard deviations (above) are sqrt(6 D) u. n therefore counts six times D in addition to the keys of a row.

In float64, n also counts the rounding of exp(score - constant), because plain subtracts the row's maximum in float32. A
difference between 16 and 32 is rounded by up to 16 u, uniformly distributed. The affected weights have a size of at
least sqrt(2) eps. Six standard deviations are therefore 6 · 16 / sqrt(6) u.

In a module with projections, out and the gradients of layers after the attention are linear in the attention's out. dx
and the gradients of layers before the attention are linear in dq, dk and dv. Independent rounding moves them by the
root mean square of J (± size(out)), or of J^T (± size(dq), ± size(dk), ± size(dv)), with random signs. The mean is over
a row of embeddings, a vector, or the row and the column of a matrix. This amount is added to the size of the value.

The parts may cancel, and they cancel completely if each row sees one key. Their rounding errors do not. In units of the
row of dx alone, a right result's error was seen to vary from 34 to 88 eps. In units of this size it was seen to vary
from 3 to 5 eps.

The gradient of a parameter is a sum over all n rows, whose terms have either sign. After k of them the sum is about
sqrt(k / n) of its size S. The error of one running sum has a standard deviation of u S sqrt(sum_k k / n) =
u S sqrt(n / 2). Six of these are allowed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dilabench.engine.call.inputs import TORCH_DTYPE
from dilabench.engine.verify.oracle.blocks import accumulation_dtype
from dilabench.engine.verify.oracle.slope import NO_SLOPE, SIGMAS, Slope, slope
from dilabench.workload.spec import Workload

# A softmax.
FLOOR_ULPS = 2.0
# A row counts as at least this share of the median row of all heads (`row_scale`). Heads that see 4096 times as many
# keys have rows a sixty-fourth as long.
LEAST_OF_ALL_HEADS = 1 / 64
# A softmax whose exp2 is an approximation.
OUT_FLOOR_ULPS = 4.0
# exp2 and log2, two ulp each.
LSE_FLOOR_ULPS = 4.0
# Scores minus a constant of up to 32, instead of the row's maximum, are rounded by half of 16 eps.
SHIFT = 16.0
# The lse, and exp2 once more.
GRADIENT_FLOOR_ULPS = 6.0


@dataclass(frozen=True, slots=True)
class Expected:
    """value: float64. size: the natural size of each value (may broadcast). tolerance: in units of size.

    plain: the slope of the plain computation on `value`. slope_floor: allowed error of a slope for any numbers.
    plain_rows: the largest error of a row of the plain computation (`row_errors`).
    """

    value: Tensor
    size: Tensor
    tolerance: float
    plain: Slope = NO_SLOPE
    slope_floor: float = 0.0
    plain_rows: float = 0.0


def expect(
    value: Tensor,
    size: Tensor,
    plain: Tensor,
    workload: Workload,
    dtype: torch.dtype,
    floor_ulps: float = FLOOR_ULPS,
    alike: float = 0.0,
    summed: int = 0,
) -> Expected:
    """Return the expectation for results of `dtype`. `size` is clamped in place.

    plain: the plain computation in `plain_dtype(dtype)`. workload: gives the number of terms in each sum and of merged
    branches. alike: `rounding.alike_weights`. summed: the number of rows that the gradient of a parameter sums.
    """
    clamp_size_(size, dtype)
    error = float(errors(plain, value, size).max()) if value.numel() else 0.0
    # float64 has no plain computation that differs from the oracle; rounding is linear in eps.
    scaled = eps(dtype) / eps(plain.dtype) if dtype == torch.float64 else 1.0
    error *= scaled
    exact = error * eps(torch.float64) / eps(dtype)
    floor = (floor_ulps + (workload.pattern.parts - 1) / 2) * eps(dtype)
    found = slope(*rows_last(plain, value, size))
    rows = float(row_errors(plain, value).max()) if value.ndim == 4 and value.numel() else 0.0
    of_sums = SIGMAS * math.sqrt(summed / 2) * eps(accumulation_dtype(dtype)) / 2
    return Expected(
        value,
        size,
        max(2 * error + exact, floor, _walk(workload, dtype), of_sums),
        plain=Slope(found.deviation * scaled, found.error * scaled, found.rows),
        slope_floor=_slope_floor(workload, dtype, alike),
        plain_rows=rows * scaled,
    )


def clamp_size_(size: Tensor, dtype: torch.dtype, *, by_item: bool = False) -> Tensor:
    """Clamp natural sizes in place. A value without terms has size zero: any result but zero is wrong there.

    by_item: by the largest of each batch item instead of all.
    """
    if not size.numel():
        return size
    largest = size.amax(tuple(range(1 if by_item else 0, size.ndim)), keepdim=True)
    return size.clamp_min_((largest * eps(dtype) ** 2).clamp_min_(torch.finfo(dtype).tiny))


def _slope_floor(workload: Workload, dtype: torch.dtype, alike: float) -> float:
    """Allowed error of the slope of a right result for any numbers (slope.py)."""
    own = eps(TORCH_DTYPE[workload.dtype])
    floor = max(GRADIENT_FLOOR_ULPS * eps(accumulation_dtype(dtype)), own / 16, alike * own / 2)
    # The oracle rounds in float64, too, which matters for results of float64.
    return floor * (1 + eps(torch.float64) / eps(dtype))


def rows_last(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors of out's or k's shape [b, R, H, D] as they are; lse's shape [b, H, R] gets an axis for D."""
    return tuple(tensor if tensor.ndim > 3 else tensor[..., None] for tensor in tensors)


def row_errors(actual: Tensor, value: Tensor, scale: Tensor | None = None) -> Tensor:
    """|actual - value| of each row [b, R, H] over `scale`, by default `row_scale(value)`; NaN if a value is NaN."""
    difference = torch.linalg.vector_norm(actual.to(value.dtype) - value, dim=-1)
    scale = row_scale(value) if scale is None else scale
    return difference.where(difference == 0, difference / scale)


def row_scale(value: Tensor) -> Tensor:
    """|row| for each row of [b, R, H, D], at least the median of its head: a row may cancel by chance, not a head.

    Rows of zeros do not count. In a head of a high rate they are the majority, because no branch covers them. All rows
    of a head may be noise: a query that sees one key has a gradient of 0 but for rounding. The least value is therefore
    a share of the median of all heads.
    """
    norm = torch.linalg.vector_norm(value, dim=-1)
    of_rows = norm.where(norm > 0, torch.nan)
    least = torch.fmax(of_rows.nanmedian(1, keepdim=True).values, LEAST_OF_ALL_HEADS * of_rows.nanmedian())
    return torch.maximum(norm, least.nan_to_num_(0.0)).clamp_min_(torch.finfo(norm.dtype).tiny)


def ones_tolerance(workload: Workload, dtype: torch.dtype, plain: float) -> float:
    """The tolerance of v = 1, in units of 2, the most that sqrt(sum P²) + 1 can be; `plain` is the plain error, of 1.

    A sum of weights has no cancellation, so its tolerance is far smaller than that of out. Each weight, the result and
    every further merged branch may be rounded once, by half an ulp. This holds for any number of keys.
    """
    rounded = (1 + (workload.pattern.parts - 1) / 2) * eps(dtype)
    return max(plain, rounded / 2, _walk(workload, dtype))


def errors(actual: Tensor, value: Tensor, size: Tensor) -> Tensor:
    """|actual - value| / size in float64; equal infinities are no error, NaN stays NaN."""
    actual = actual.double()
    return (actual - value).abs_().masked_fill_(actual == value, 0.0).div_(size)


def _walk(workload: Workload, dtype: torch.dtype) -> float:
    """Rounding of sequential sums over a score's terms and the keys of a row, or the queries of a key."""
    longest = workload.pattern.keys_per_row(max(end - start for start, end in workload.sequences))
    shift = (SIGMAS * SHIFT) ** 2 / 6 if dtype == torch.float64 else 0.0
    return math.sqrt(longest + SIGMAS**2 / 6 * workload.head_dim + shift) * eps(accumulation_dtype(dtype)) / 2


def plain_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the plain computation: the workload's own; for float64 float32, scaled by `expect`."""
    return torch.float32 if dtype == torch.float64 else dtype


def out_floor_ulps(dtype: torch.dtype) -> float:
    """The floor of out, in ulp of `dtype`."""
    return max(FLOOR_ULPS, OUT_FLOOR_ULPS * eps(accumulation_dtype(dtype)) / eps(dtype))


def gradient_floor_ulps(workload: Workload, dtype: torch.dtype) -> float:
    """The floor of dq, dk and dv, and of what is linear in them, in ulp of `dtype`."""
    recomputed = SIGMAS * math.sqrt(workload.head_dim / 3) / 2
    return max(FLOOR_ULPS, max(GRADIENT_FLOOR_ULPS, recomputed) * eps(accumulation_dtype(dtype)) / eps(dtype))


def eps(dtype: torch.dtype) -> float:
    """Distance from 1 to the next number."""
    return float(torch.finfo(dtype).eps)
