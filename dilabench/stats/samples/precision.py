"""The stop rule: measure until the interval is narrow.

Stopping when a difference becomes significant more than doubles false alarms (measurement.md §5.1); the width of an
interval does not look at the other side and cannot.
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import ArrayLike

from dilabench.stats.samples.autocorrelation import effective_size
from dilabench.stats.samples.location import MIN_SAMPLES, checked_samples, median_interval

DEFAULT_PRECISION = {"cuda": 0.01, "cpu": 0.02}
"""Relative half width to stop at, by device type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Whether to stop. `half_width` is relative to the median, None below `MIN_SAMPLES` ("n<5, no CI")."""

    reached: bool
    half_width: float | None
    target: float
    n: int
    effective_n: float
    reason: str


def precision(locations_ns: ArrayLike, target: float, confidence: float = 0.95) -> Precision:
    """How precisely the median of one side's slot locations is known, one location per round in the order taken.

    The order-statistic interval is widened by sqrt(n / effective n), since neighbouring rounds are alike. Call it for
    every implementation of a pair and stop when all are reached, or when the budget ends.
    """
    values = checked_samples(locations_ns)
    n = values.size
    interval = median_interval(values, confidence)
    effective = effective_size(values)
    if interval is None:
        reason = f"n<{MIN_SAMPLES}, no CI"
        return Precision(reached=False, half_width=None, target=target, n=n, effective_n=effective, reason=reason)
    half_width = interval.half_width / float(np.median(values)) * sqrt(n / effective)
    reached = half_width <= target
    reason = f"median known to {100 * half_width:.2g} % ({n} rounds), target {100 * target:.2g} %"
    return Precision(reached=reached, half_width=half_width, target=target, n=n, effective_n=effective, reason=reason)
