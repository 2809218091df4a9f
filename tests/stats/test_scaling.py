"""Power laws and crossover lengths."""

import numpy as np
import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

from dilabench.errors import ConfigError
from dilabench.stats.scaling import crossover, fit_power_law

LENGTHS = [1024, 2048, 4096, 8192, 12288, 16384]


@given(st.integers(0, 500), st.integers(3, 9))
def test_fit_is_linear_regression_on_logarithms(seed, n):
    rng = np.random.default_rng(seed)
    lengths, times = 1024 * np.arange(1, n + 1), np.exp(rng.normal(10, 2, n))
    fit, expected = fit_power_law(lengths, times), scipy.stats.linregress(np.log(lengths), np.log(times))
    assert fit.exponent == pytest.approx(expected.slope)
    assert np.log(fit.coefficient_ns) == pytest.approx(expected.intercept)
    assert fit.r_squared == pytest.approx(expected.rvalue**2)
    reach = scipy.stats.t.ppf(0.975, n - 2) * expected.stderr
    assert fit.exponent_interval.half_width == pytest.approx(reach)


def test_an_exact_law_is_recovered_and_predicts():
    fit = fit_power_law(LENGTHS, [3.0 * x**1.5 for x in LENGTHS])
    assert fit.exponent == pytest.approx(1.5)
    assert fit.predict_ns(65536) == pytest.approx(3.0 * 65536**1.5)
    assert fit.exponent_interval.half_width < 1e-9


def test_two_lengths_have_no_interval_and_one_no_law():
    assert fit_power_law([1024, 4096], [1.0, 16.0]).exponent_interval is None
    with pytest.raises(ConfigError):
        fit_power_law([1024, 1024], [1.0, 2.0])


def falling(crossings):
    """Log ratios that fall with length, one session per row, each zero at its own length."""
    return np.array([-0.5 * np.log(np.array(LENGTHS) / at) for at in crossings])


def curves(k, at, sd, seed=0):
    """Sessions whose crossings scatter around `at`."""
    return falling(at * np.exp(np.random.default_rng(seed).normal(0, 2 * sd, k)))


def test_crossover_is_found_between_lengths():
    result = crossover(LENGTHS, curves(6, 3000, 0.05))
    assert result.low < 3000 < result.high
    assert result.low < result.length < result.high
    mirrored = crossover(LENGTHS, -curves(6, 3000, 0.05))
    assert mirrored.length == pytest.approx(result.length)


def test_interval_covers_as_often_as_eight_sessions_allow():
    hits = 0
    for seed in range(100):
        result = crossover(LENGTHS, curves(8, 4500, 0.1, seed), resamples=400)
        hits += result.low <= 4500 <= result.high
    assert hits >= 85


@pytest.mark.parametrize("factor", [1.0, -1.0])
def test_an_interval_that_leaves_the_lengths_measured_is_open(factor):
    early = crossover(LENGTHS, factor * falling([900, 950, 1200, 1400, 1500]))
    assert early.low is None
    assert 1024 < early.length < early.high < 1600
    late = crossover(LENGTHS, factor * falling([11000, 12000, 15000, 18000, 19000]))
    assert late.high is None
    assert 10000 < late.low < late.length < 16384


def test_no_crossover_and_few_sessions():
    always = crossover(LENGTHS, curves(5, 100, 0.01))
    assert (always.length, always.low, always.high, always.confidence) == (None, None, None, None)
    two = crossover(LENGTHS, curves(2, 3000, 0.01))
    assert two.length == pytest.approx(3000, rel=0.1)
    assert (two.low, two.confidence) == (None, None)


def test_lengths_must_ascend():
    with pytest.raises(ConfigError):
        crossover([2048, 1024], [[1.0, -1.0]])
