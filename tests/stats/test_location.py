"""Quantiles, intervals of the median, spread, autocorrelation, the stop rule."""

import numpy as np
import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

from dilabench.errors import ConfigError
from dilabench.stats.samples import location
from dilabench.stats.samples.location import (
    a12,
    autocorrelations,
    effective_size,
    effective_sizes,
    flatten_slots,
    group_quantiles,
    locate,
    locate_slots,
    median_interval,
    quantile,
    relative_half_width,
)

times = st.lists(st.floats(1, 1e9), min_size=1, max_size=40)


@given(times, st.floats(0, 1))
def test_quantile_is_the_median_unbiased_one(samples, level):
    expected = np.quantile(samples, level, method="median_unbiased")
    assert quantile(sorted(samples), level) == pytest.approx(expected, rel=1e-9)


@given(st.lists(times, min_size=1, max_size=8), st.floats(0, 1))
def test_grouped_quantiles_equal_those_of_each_group(groups, level):
    slots = flatten_slots(groups)
    grouped = group_quantiles(slots.samples_ns, slots.sizes, np.full(len(groups), level))
    assert grouped == pytest.approx([quantile(sorted(group), level) for group in groups], rel=1e-12)


@given(times)
def test_summary_agrees_with_numpy_and_scipy(samples):
    summary = locate(samples)
    assert summary.n == len(samples)
    assert summary.median_ns == pytest.approx(np.median(samples))
    assert summary.p25_ns == quantile(sorted(samples), 0.25)
    assert summary.interval == median_interval(samples)


@pytest.mark.parametrize("n", [6, 7, 20, 21, 100, 501])
def test_median_interval_has_the_ranks_of_scipy(n):
    values = np.random.default_rng(n).permutation(np.arange(1.0, n + 1))
    ours = median_interval(values)
    theirs = scipy.stats.quantile_test(values, q=0, p=0.5).confidence_interval(0.95)
    assert (ours.low, ours.high) == (theirs.low, theirs.high)
    k = int(ours.low)
    assert ours.confidence == pytest.approx(1 - 2 * scipy.stats.binom.cdf(k - 1, n, 0.5))
    assert ours.confidence >= 0.95 > 1 - 2 * scipy.stats.binom.cdf(k, n, 0.5)


def test_few_samples_say_so():
    assert median_interval([1, 2, 3, 4]) is None
    five = median_interval([5, 1, 4, 2, 3])
    assert (five.low, five.high, five.confidence) == (1, 5, pytest.approx(0.9375))


def test_median_interval_covers_a_skewed_median():
    rng = np.random.default_rng(0)
    draws = rng.exponential(1.0, (1500, 15))
    intervals = [median_interval(row) for row in draws]
    covered = np.mean([i.low <= np.log(2) <= i.high for i in intervals])
    assert covered == pytest.approx(intervals[0].confidence, abs=0.02)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=25), st.lists(st.integers(1, 20), min_size=1, max_size=25))
def test_a12_is_the_mann_whitney_statistic(baseline, candidate):
    u = scipy.stats.mannwhitneyu(candidate, baseline, method="asymptotic").statistic
    assert a12(baseline, candidate) == pytest.approx(u / (len(baseline) * len(candidate)))


@pytest.mark.parametrize("bad", [[], [0.0], [-1.0], [1.0, float("inf")], [float("nan")]])
def test_impossible_times_are_refused(bad):
    with pytest.raises(ConfigError):
        locate(bad)


def ar1(phi, n, seed):
    rng = np.random.default_rng(seed)
    series = np.zeros(n)
    for i in range(1, n):
        series[i] = phi * series[i - 1] + rng.normal()
    return series


def test_autocorrelation_of_a_known_process():
    (correlation,) = autocorrelations(ar1(0.7, 4000, 0)[None], 3)
    assert correlation[0] == 1
    assert correlation[1:] == pytest.approx([0.7, 0.49, 0.343], abs=0.07)
    assert autocorrelations(np.full((1, 6), 5.0), 8).tolist() == [[1.0] + [0.0] * 8]


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.8])
def test_effective_size_of_a_known_process(phi):
    sizes = [effective_size(ar1(phi, 2000, seed)) for seed in range(10)]
    assert np.median(sizes) == pytest.approx(2000 * (1 - phi) / (1 + phi), rel=0.2)


@given(times)
def test_effective_size_never_exceeds_the_samples(samples):
    assert 1 <= effective_size(samples) <= len(samples)


def test_stop_rule():
    rng = np.random.default_rng(0)
    noisy = 1e6 * np.exp(rng.normal(0, 0.05, 400))
    assert relative_half_width(noisy[:4]) is None
    assert relative_half_width(noisy[:10]) > 0.01 >= relative_half_width(noisy)
    assert relative_half_width(np.full(5, 1e6)) <= 0.01


def test_stop_rule_is_not_fooled_by_correlation():
    """AR(1) noise of phi = 0.8 and the same spread is worth a ninth of the samples: a three times wider interval."""
    ratios = []
    for seed in range(20):
        white = np.random.default_rng(seed).normal(0, 0.02, 300)
        correlated = 0.02 * ar1(0.8, 300, seed) * (1 - 0.8**2) ** 0.5
        widths = [relative_half_width(np.exp(series)) for series in (white, correlated)]
        ratios.append(widths[1] / widths[0])
    assert 2 < np.median(ratios) < 4


def test_autocorrelation_is_the_same_by_products_and_by_fourier_transform(monkeypatch):
    series = np.stack([ar1(0.7, 200, 1), ar1(0.2, 200, 2)])
    by_products = autocorrelations(series, 199)
    monkeypatch.setattr(location, "SHORT_SERIES", 10)
    assert autocorrelations(series, 199) == pytest.approx(by_products, abs=1e-12)


def test_series_are_treated_together_as_each_is():
    series = np.stack([*(ar1(phi, 41, seed) for seed, phi in enumerate((0.0, 0.5, -0.7, 0.99))), np.full(41, 3.0)])
    assert effective_sizes(series).tolist() == [effective_size(values) for values in series]
    sizes, sessions = np.full(41, 1), np.zeros(41, np.intp)
    times = np.exp(series)
    assert locate_slots(times, sizes, sessions) == [locate_slots(values[None], sizes, sessions)[0] for values in times]


def test_a_long_series_is_not_correlated_by_products(monkeypatch):
    """The products of all lags of 2^18 values are 3 x 10^10."""
    monkeypatch.setattr(np, "correlate", None)
    assert effective_size(ar1(0.5, 2**18, 2)) == pytest.approx(2**18 / 3, rel=0.1)
