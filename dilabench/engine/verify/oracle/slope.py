"""The deviation of a result's regression on the oracle from slope 1: rounding averages out, mistakes do not.

Errors y = (actual - value) / size and values x = value / size are measured in natural sizes, as in tolerance.py. Every
element therefore counts by how well it is known. The least squares slope of y on x is

    deviation = sum(x y) / sum(x²)

It is zero for a right result up to rounding, and 0.01 for a result that is 1.01 times too large. Independent rounding
of relative size eps gives it a standard error of about eps · rms(y / eps) / (rms(x) · sqrt(n)). In bf16 at 10^5
elements the standard error is a few 1e-5, while the largest error alone is a few 1e-2. Elements of a row share its
divisor, so n counts rows, not elements. The standard error is that of row sums,
sqrt(sum_rows (sum x (y - deviation x))²) / sum(x²). This formula needs no assumption about errors inside a row.

    limit = 2 · |plain deviation| + SIGMAS · max(own standard error, plain's) + floor + noise

plain is the plain same-dtype computation, as in tolerance.py. Rounding may be biased: scores rounded in half precision
make lse larger on average, and numbers below float16's smallest become zero. Then plain has this bias, too, and right
results have at most as much. Six standard errors of 64 rows or more are exceeded once in 10^7 results (Student's t).
Errors that cancel in a row make it less.

The gradient of a parameter is a sum over positions, and the error of one position is in all its rows. Its slope is
therefore known only as well as that of the gradient of the input, whose rows are positions.

The floor covers biases of any kernel. exp2, log2 and a rounded `scale · log2(e)` give six ulp of the accumulation dtype
(tolerance.py). An exp may be only as exact as half precision needs. torch's flash kernel on a CPU was seen to be off by
5e-6 on average, and FlashAttention 4 takes a polynomial that is right to 1e-4. A sixteenth of eps of the workload's
dtype covers both: 6e-5 in float16 is more than the first, and 5e-4 in bfloat16 is more than the second. If the weights
are alike (rounding.py), they are rounded to one side, by half of eps at most. This share of it counts too.

The noise is the oracle's own. If the right values are zero but for rounding, x is this rounding, and a regression on it
has no meaning. An error of 4 eps of float64 in x moves the slope by at most its square over the mean of x².
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SIGMAS = 6.0
# Fewer rows of about the same weight do not separate a slope from rounding.
MIN_ROWS = 64


@dataclass(frozen=True, slots=True)
class Slope:
    """The slope's `deviation` from 1, its standard `error`, and its `noise`.

    `rows`: the number of rows of equal weight with the same information.
    """

    deviation: float = 0.0
    error: float = 0.0
    rows: float = 0.0
    noise: float = 0.0


NO_SLOPE = Slope()


def slope(actual: Tensor, value: Tensor, size: Tensor) -> Slope:
    """The regression over all elements; rows are along the last axis. Infinite values on both sides do not count."""
    x, y = value / size, (actual.double() - value) / size
    ordinary = torch.isfinite(x)
    x, y = x.where(ordinary, 0.0), y.where(ordinary, 0.0)
    weights, products = (x * x).sum(-1), (x * y).sum(-1)
    all_weights = weights.sum()
    slope_minus_1 = products.sum() / all_weights
    spreads = (products - slope_minus_1 * weights).square_().sum()
    # Read from the device together: each read waits for it.
    total, deviation, spread, squares = torch.stack(
        [all_weights, slope_minus_1, spreads, weights.square().sum()]
    ).tolist()
    if total <= 0.0:
        return NO_SLOPE
    noise = (4 * torch.finfo(torch.float64).eps) ** 2 * x.numel() / total
    return Slope(deviation, spread**0.5 / total, total**2 / squares, noise)


def no_better_than(found: Slope, by_position: Slope) -> Slope:
    """The slope of a sum over positions, whose rows are not independent, if the slope of its terms is `by_position`."""
    error, rows = max(found.error, by_position.error), min(found.rows, by_position.rows)
    return Slope(found.deviation, error, rows, found.noise)


def slope_limit(own: Slope, plain: Slope, floor: float) -> float:
    """How far from 1 the slope of a right result may be; infinite if too little is known to say."""
    if own.rows < MIN_ROWS or own.noise > 1:
        return float("inf")
    return 2 * abs(plain.deviation) + SIGMAS * max(own.error, plain.error) + floor + own.noise
