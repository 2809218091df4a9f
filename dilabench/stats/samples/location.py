"""Where samples of times lie: quantiles, the median with its interval, and which of two lies higher (A12).

Times have a long right tail, so no mean is ever used. Quantiles are median-unbiased: whatever the distribution, the
k-th of n samples lies as often above as below the level (k - 1/3) / (n + 1/3) (type 8 of Hyndman and Fan, "Sample
quantiles in statistical packages", 1996). Medians over rounds of such quantiles make 20 samples comparable with 21.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import floor

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtr

from dilabench.errors import ConfigError
from dilabench.stats.samples.estimate import Interval

MIN_SAMPLES = 5
"""Below this many samples there is no interval ("n<5, no CI")."""


@dataclass(frozen=True, slots=True)
class Location:
    """Quantiles of one sample in ns; `interval` belongs to the median and is None below `MIN_SAMPLES`."""

    n: int
    p25_ns: float
    median_ns: float
    interval: Interval | None


def checked_samples(samples_ns: ArrayLike) -> NDArray[np.float64]:
    """The samples as one float64 vector. Raises ConfigError when empty, not finite or not positive."""
    values = np.asarray(samples_ns, dtype=np.float64).ravel()
    if values.size == 0:
        raise ConfigError("no samples; a location needs at least one: record the case as skipped or failed instead")
    # A NaN among them is the minimum, and below nothing.
    if not (values.min() > 0 and values.max() < np.inf):
        bad = values[~(np.isfinite(values) & (values > 0))][0]
        raise ConfigError(f"sample {bad} ns is not positive and finite, so it is no time; leave it out of the record")
    return values


def quantile(ordered: Sequence[float] | NDArray[np.float64], level: float) -> float:
    """Quantile at `level` in [0, 1] of values in ascending order, clamped to their range (type 8)."""
    n = len(ordered)
    position = min(max((n + 1 / 3) * level - 2 / 3, 0.0), n - 1.0)
    below = floor(position)
    above = min(below + 1, n - 1)
    return float(ordered[below] + (position - below) * (ordered[above] - ordered[below]))


@lru_cache(maxsize=4096)
def _median_rank(n: int, confidence: float) -> tuple[int, float]:
    """Rank k such that [x_(k), x_(n+1-k)] covers the median, and the coverage attained; k = 1 when none suffices."""
    below = bdtr(np.arange(n // 2 + 1, dtype=np.float64), n, 0.5)
    rank = max(1, int(np.searchsorted(below, (1 - confidence) / 2, side="right")))
    return rank, float(1 - 2 * below[rank - 1])


def median_interval(samples_ns: ArrayLike, confidence: float = 0.95) -> Interval | None:
    """Distribution-free interval of the median by order statistics; None below `MIN_SAMPLES`.

    P(median outside [x_(k), x_(n+1-k)]) = 2 P(Bin(n, 1/2) < k). Five samples reach 93.75 % at best: the interval is
    then their whole range and says so in its `confidence`.
    """
    return _interval_of_sorted(np.sort(checked_samples(samples_ns)), confidence)


def _interval_of_sorted(ordered: NDArray[np.float64], confidence: float) -> Interval | None:
    n = len(ordered)
    if n < MIN_SAMPLES:
        return None
    rank, coverage = _median_rank(n, confidence)
    return Interval(float(ordered[rank - 1]), float(ordered[n - rank]), coverage)


def locate(samples_ns: ArrayLike, confidence: float = 0.95) -> Location:
    """Summary of one sample for a report. Raises ConfigError for an empty or impossible sample."""
    ordered = np.sort(checked_samples(samples_ns))
    return Location(
        ordered.size, quantile(ordered, 0.25), quantile(ordered, 0.5), _interval_of_sorted(ordered, confidence)
    )


def a12(baseline_ns: ArrayLike, candidate_ns: ArrayLike) -> float:
    """Vargha-Delaney A12: P(candidate > baseline) + P(equal) / 2, in [0, 1]; 0.5 is no effect.

    Vargha and Delaney, "A critique and improvement of the CL common language effect size statistics", 2000. The
    original marks are 0.56 small, 0.64 medium, 0.71 large (and their mirrors below one half).
    """
    baseline, candidate = np.sort(checked_samples(baseline_ns)), np.sort(checked_samples(candidate_ns))
    below = np.searchsorted(baseline, candidate, side="left")
    upto = np.searchsorted(baseline, candidate, side="right")
    return float((below.sum() + upto.sum()) / (2 * baseline.size * candidate.size))
