"""The location of samples of times: quantiles, the median with its interval, and which of two is higher (A12).

Times have a long right tail, so no mean is ever used. Quantiles are median-unbiased: for any distribution, the
k-th of n samples lies as often above as below the level (k - 1/3) / (n + 1/3) (type 8 of Hyndman and Fan, "Sample
quantiles in statistical packages", 1996). Medians over rounds of such quantiles make 20 samples comparable with 21.

Samples of one slot are correlated, and so are the slots of one process: a hundred samples in twenty slots carry little
more information than twenty samples. `locate_slots` takes the median of all samples. Its error comes from how the
share of samples below the median varies from block to block. A block is a slot; from three sessions on, a session.

A comparison of 10,000 pairs holds millions of samples in slots of five. `Slots` are therefore one flat array, and each
operation on groups runs over all of them; group sizes may differ (a session stopped early, 20 samples against 21).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import exp, floor, sqrt
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtr, stdtrit

from dilabench.errors import ConfigError

Floats = NDArray[np.float64]
Counts = NDArray[np.intp]

MIN_SAMPLES = 5
"""Below this many samples there is no interval ("n<5, no CI")."""

CONFIDENCE = 0.95
SESSIONS_FOR_SPREAD = 3
"""From this many sessions on, their own spread is the error."""

SHORT_SERIES = 256
"""Up to this length the products of a series with itself are faster than its Fourier transform."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Closed interval. `confidence`: attained by order statistics, which cannot choose it freely; nominal otherwise."""

    low: float
    high: float
    confidence: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    @property
    def is_certain(self) -> bool:
        """Return True if it is one of 95 %, and not the whole range of samples from too few turns."""
        return self.confidence >= CONFIDENCE

    def as_ratio(self) -> "Interval":
        """The interval of a ratio, from the interval of its logarithm."""
        return Interval(exp(self.low), exp(self.high), self.confidence)


@dataclass(frozen=True, slots=True)
class Location:
    """Quantiles of one sample in ns; `interval` belongs to the median and is None below `MIN_SAMPLES`."""

    n: int
    p25_ns: float
    median_ns: float
    interval: Interval | None


@dataclass(frozen=True, slots=True)
class Slots:
    """Samples of many slots one after the other: slot i is the next `sizes[i]` of `samples_ns`."""

    samples_ns: Floats
    sizes: Counts


def checked_samples(samples_ns: ArrayLike) -> NDArray[np.float64]:
    """The samples as one float64 vector. Raises ConfigError when empty, not finite or not positive."""
    values = np.asarray(samples_ns, dtype=np.float64).ravel()
    if values.size == 0:
        raise ConfigError("no samples; a location needs at least one: record the case as skipped or failed instead")
    # A NaN makes the minimum NaN, which is not positive.
    if not (values.min() > 0 and values.max() < np.inf):
        bad = values[~(np.isfinite(values) & (values > 0))][0]
        raise ConfigError(f"sample {bad} ns is not a positive, finite time; remove it from the record")
    return values


def quantile(ordered: Sequence[float] | NDArray[np.float64], level: float) -> float:
    """Quantile at `level` in [0, 1] of values in ascending order, clamped to their range (type 8)."""
    return float(_quantiles(ordered, level))


def _quantiles(ordered: Any, level: float) -> Any:
    """The same along the first axis."""
    n = len(ordered)
    position = min(max((n + 1 / 3) * level - 2 / 3, 0.0), n - 1.0)
    below = floor(position)
    above = min(below + 1, n - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def t_quantile(df: float, level: float) -> float:
    """Quantile of Student's t with `df` degrees of freedom (not necessarily whole) at `level` in (0, 1)."""
    return float(stdtrit(df, level))


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


def locate_slots(samples_ns: Floats, slot_sizes: Counts, sessions: Counts, confidence: float = 0.95) -> list[Location]:
    """Summary of the samples of each of several cases, `samples_ns[case]`, whose slots have equal sizes and sessions.

    Slot i was taken in session `sessions[i]`; slots without samples do not count. As `locate` gives it, with the
    interval of `_intervals_of_blocks`. Raises ConfigError for no or impossible samples.
    """
    values = checked_samples(samples_ns).reshape(samples_ns.shape)
    if not slot_sizes.all() or (sessions != sessions[0]).any():
        values, slot_sizes, sessions = _by_session(values, slot_sizes, sessions)
    ordered = np.sort(values, axis=1)
    count = ordered.shape[-1]
    p25s, medians = (_quantiles(ordered.T, level).tolist() for level in (0.25, 0.5))
    if count < MIN_SAMPLES:
        return [Location(count, p25, median, None) for p25, median in zip(p25s, medians, strict=True)]
    ends = np.flatnonzero(sessions[1:] != sessions[:-1]) + 1
    by_session = len(ends) + 1 >= SESSIONS_FOR_SPREAD
    counts = np.add.reduceat(slot_sizes, [0, *ends]) if by_session else slot_sizes
    sizes = counts.astype(np.float64)
    # Medians equal to the value count half.
    below = 0.5 + 0.5 * np.sign(np.array(medians)[:, None] - values)
    shares = np.add.reduceat(below, np.cumsum(counts) - counts, axis=1) / sizes
    units = np.full(len(shares), float(len(sizes))) if by_session else effective_sizes(shares)
    intervals = _intervals_of_blocks(ordered, sizes, shares, units, confidence)
    return [Location(count, *figures) for figures in zip(p25s, medians, intervals, strict=True)]


def _by_session(values: Floats, sizes: Counts, sessions: Counts) -> tuple[Floats, Counts, Counts]:
    """The slots that have samples, by session, in the order in which the sessions began."""
    taken = np.flatnonzero(sizes)
    sizes, sessions = sizes[taken], sessions[taken]
    _, begins, session = np.unique(sessions, return_index=True, return_inverse=True)
    begun = begins[session]
    order = np.argsort(begun, kind="stable")
    return values[:, np.argsort(np.repeat(begun, sizes), kind="stable")], sizes[order], sessions[order]


def _intervals_of_blocks(
    ordered: Floats, sizes: Floats, shares: Floats, units: Floats, confidence: float
) -> list[Interval]:
    """Quantiles at the levels 1/2 ± t SE (Woodruff, "Confidence intervals for medians and other position measures",
    1952) of all n samples in ascending order, `ordered[case]`, from B blocks that are worth `units[case]` independent
    ones.

    With `shares[case]` p_b of the m_b samples of a block below the median (those equal to it count half), and m the
    mean of m_b (`sizes`):

        SE^2 = sum_b (m_b / m)^2 (p_b - 1/2)^2 / (B - 1) / units,    at least 1 / (4 n) as for independent samples

    with units - 1 degrees of freedom. An interval that reaches past the samples is cut to their whole range, which
    covers the median of independent blocks with probability 1 - 2^(1 - units).
    """
    blocks, n = shares.shape[1], ordered.shape[1]
    deviations = sizes / sizes.mean() * (shares - 0.5)
    variances = np.add.reduce(deviations * deviations, axis=1) / max(1, blocks - 1) / units
    t = stdtrit(np.maximum(1.0, units - 1), (1 + confidence) / 2)
    reaches = np.minimum(0.5, t * np.sqrt(np.maximum(variances, 0.25 / n))) if blocks > 1 else np.full(len(t), 0.5)
    levels = np.stack([0.5 - reaches, 0.5 + reaches])
    lows, highs = group_quantiles(ordered.ravel(), np.full(len(t), n), levels).tolist()
    return [
        Interval(low, high, confidence if reach < 0.5 else 1 - 2 ** (1 - worth))
        for low, high, reach, worth in zip(lows, highs, reaches.tolist(), units.tolist(), strict=True)
    ]


def autocorrelations(series: Floats, max_lag: int) -> Floats:
    """Autocorrelation of each series at lags 0..max_lag, `[series, max_lag + 1]`, from `[series, n]`.

    With the biased (positive definite) normalisation. A constant series has 1 at lag 0 and 0 elsewhere.
    """
    n = series.shape[1]
    centred = series - np.add.reduce(series, axis=1, keepdims=True) / n
    lags = min(max_lag, n - 1)
    if n <= SHORT_SERIES:
        products = np.array([np.correlate(values, values, "full")[n - 1 : n + lags] for values in centred])
    else:
        # With as many zeros behind it, a series meets none of its own values from the other end.
        length = 1 << (2 * n - 1).bit_length()
        products = np.fft.irfft(np.abs(np.fft.rfft(centred, length)) ** 2, length)[:, : lags + 1]
    correlations = np.zeros((len(series), max_lag + 1))
    correlations[:, 0] = 1.0
    varied = products[:, 0] > 0
    correlations[varied, : lags + 1] = products[varied] / products[varied, :1]
    return correlations


def effective_size(series: ArrayLike) -> float:
    """The effective size of one series; see `effective_sizes`."""
    return float(effective_sizes(np.asarray(series, np.float64)[None])[0])


def effective_sizes(series: Floats) -> Floats:
    """n / (1 + 2 sum of autocorrelations) of each series, in [1, n]: never more than the samples there are.

    The sum stops by Geyer's initial positive sequence: pairs of neighbouring lags are added while their sum is
    positive ("Practical Markov chain Monte Carlo", 1992). `series`: `[series, n]`.
    """
    n = series.shape[1]
    if n < 3:
        return np.full(len(series), float(n))
    correlations = autocorrelations(series, n - 1)
    pairs = correlations[:, : 2 * (n // 2) : 2] + correlations[:, 1 : 2 * (n // 2) : 2]
    positive = np.where(np.logical_and.accumulate(pairs > 0, axis=1), pairs, 0.0)
    sizes: Floats = np.clip(n / np.maximum(1.0, 2 * np.add.reduce(positive, axis=1) - 1), 1.0, n)
    return sizes


def relative_half_width(locations_ns: ArrayLike, confidence: float = 0.95) -> float | None:
    """Half the width of the median's interval over the median, from one location per round in the order taken.

    Sampling ends by it (measurement.md §5.1). It does not look at another case: to end once a difference becomes
    significant more than doubles false alarms. The order-statistic interval is widened by sqrt(n / effective n), since
    neighbouring rounds are alike. None below `MIN_SAMPLES` rounds.
    """
    values = checked_samples(locations_ns)
    interval = median_interval(values, confidence)
    if interval is None:
        return None
    return interval.half_width / float(np.median(values)) * sqrt(values.size / effective_size(values))


def a12(baseline_ns: ArrayLike, candidate_ns: ArrayLike) -> float:
    """Vargha-Delaney A12: P(candidate > baseline) + P(equal) / 2, in [0, 1]; 0.5 is no effect.

    Vargha and Delaney, "A critique and improvement of the CL common language effect size statistics", 2000. The
    original marks are 0.56 small, 0.64 medium, 0.71 large (and their mirrors below one half).
    """
    baseline, candidate = np.sort(checked_samples(baseline_ns)), np.sort(checked_samples(candidate_ns))
    below = np.searchsorted(baseline, candidate, side="left")
    upto = np.searchsorted(baseline, candidate, side="right")
    return float((below.sum() + upto.sum()) / (2 * baseline.size * candidate.size))


def flatten_slots(slots: Sequence[Sequence[float]]) -> Slots:
    """Lay the slots out flat. Raises ConfigError for an empty slot or a sample that is not a positive finite time."""
    sizes = np.fromiter(map(len, slots), np.intp, len(slots))
    return checked_slots(Slots(np.fromiter(chain.from_iterable(slots), np.float64, int(sizes.sum())), sizes))


def checked_slots(slots: Slots) -> Slots:
    """The slots. Raises ConfigError for an empty slot or a sample that is not a positive finite time."""
    if slots.sizes.size == 0 or slots.sizes.min() == 0:
        raise ConfigError("a slot (the samples of one case in one round) is empty; remove it from the record")
    return Slots(checked_samples(slots.samples_ns), slots.sizes)


def group_quantiles(values: Floats, counts: Counts, levels: Floats) -> Floats:
    """Quantile of each group at the group's level (`location.quantile`); group g is the next `counts[g]` values.

    `levels` and the result: `[..., groups]`. Groups of one size are sorted together, as the rows of a matrix.
    """
    result = np.empty(levels.shape)
    starts = np.cumsum(counts) - counts
    for count in np.unique(counts):
        chosen = np.flatnonzero(counts == count)
        members = values if len(chosen) == len(counts) else values[(starts[chosen][:, None] + np.arange(count)).ravel()]
        ordered = np.sort(members.reshape(len(chosen), count), axis=1)
        position = np.clip((count + 1 / 3) * levels[..., chosen] - 2 / 3, 0, count - 1)
        below = position.astype(np.intp)
        rows = np.arange(len(chosen))
        low, high = ordered[rows, below], ordered[rows, np.minimum(below + 1, count - 1)]
        result[..., chosen] = low + (position - below) * (high - low)
    return result


def joined_slots(parts: Sequence[Slots]) -> Slots:
    """The slots of all parts, one after the other."""
    return Slots(np.concatenate([part.samples_ns for part in parts]), np.concatenate([part.sizes for part in parts]))


def chosen_slots(slots: Slots, chosen: Counts) -> Slots:
    """The slots with these indices, in this order."""
    sizes = slots.sizes[chosen]
    begins = (np.cumsum(slots.sizes) - slots.sizes)[chosen] - (np.cumsum(sizes) - sizes)
    return Slots(slots.samples_ns[np.repeat(begins, sizes) + np.arange(sizes.sum())], sizes)


def group_medians(values: Floats, counts: Counts) -> Floats:
    """Median of each group; group g is the next `counts[g]` values (at least one)."""
    return group_quantiles(values, counts, np.full(len(counts), 0.5))


def group_sums(values: Floats, counts: Counts) -> Floats:
    """Sum of each group; group g is the next `counts[g]` values (at least one)."""
    return np.add.reduceat(values, np.cumsum(counts) - counts)


def group_counts(sizes: Counts, counts: Counts) -> Counts:
    """Samples of each group of slots; group g is the next `counts[g]` slots (at least one)."""
    return np.add.reduceat(sizes, np.cumsum(counts) - counts)


def group_means(values: Floats, counts: Counts) -> Floats:
    """Mean of each group; group g is the next `counts[g]` values (at least one)."""
    return group_sums(values, counts) / counts
