"""The formulas of the paired estimate against a direct transcription."""

from math import sqrt
from statistics import mean, median, stdev

import numpy as np
import pytest
import scipy
from hypothesis import given, settings
from hypothesis import strategies as st

from dilabench.stats.decisions.paired import PairedRounds, estimate, estimate_many
from dilabench.stats.samples.location import quantile


def log_ratios(cell, level):
    return [
        [np.log(quantile(sorted(b), level) / quantile(sorted(a), level)) for a, b in session] for session in cell.rounds
    ]


def test_three_sessions_or_more_use_their_own_spread(round_noise):
    cell = round_noise(3, sizes=(7, 6), sessions=5, rounds=11, effect=0.04)
    result = estimate(cell)
    medians = [median(session) for session in log_ratios(cell, 0.25)]
    se = stdev(medians) / sqrt(5)
    assert result.session_log_ratios == pytest.approx(medians)
    assert result.log_ratio == pytest.approx(mean(medians))
    assert (result.se, result.df) == (pytest.approx(se), 4)
    low, high = scipy.stats.t.interval(0.95, 4, mean(medians), se)
    assert (result.interval.low, result.interval.high) == (pytest.approx(low), pytest.approx(high))


def test_one_session_uses_its_rounds_and_the_noise_floor(round_noise):
    cell = round_noise(4, rounds=20)
    y = log_ratios(cell, 2 / 16)[0]
    result = estimate(cell, sigma_aa=0.01)
    assert result.log_ratio == pytest.approx(median(y))
    assert result.se == pytest.approx(sqrt(stdev(y) ** 2 / 20 + 0.01**2))
    assert (result.units, result.df, result.unit) == (20, 19, "round")


def test_the_smallest_sample_is_the_location_of_a_short_session(round_noise):
    cell = round_noise(5)
    minima = [np.log(min(b) / min(a)) for a, b in cell.rounds[0]]
    assert estimate(cell).log_ratio == pytest.approx(median(minima))
    medians = [np.log(median(b) / median(a)) for a, b in cell.rounds[0]]
    assert estimate(cell, statistic="median").log_ratio == pytest.approx(median(medians))


def test_correlated_rounds_count_less():
    rng = np.random.default_rng(0)
    wave = np.zeros(60)
    for i in range(1, 60):
        wave[i] = 0.8 * wave[i - 1] + rng.normal(0, 0.01)
    cell = PairedRounds([[([1e6], [1e6 * float(np.exp(y))]) for y in wave]])
    assert estimate(cell).units < 25


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=6), st.integers(0, 99))
@settings(max_examples=40)
def test_sessions_of_any_size_are_kept_apart(sizes, seed):
    """Cells of different shapes side by side: every cell's sessions have the medians of their own rounds."""
    rng = np.random.default_rng(seed)
    cells = [
        PairedRounds(
            [[(rng.uniform(1, 2, 3).tolist(), rng.uniform(1, 2, 3).tolist()) for _ in range(n)] for n in rounds]
        )
        for rounds in sizes
    ]
    for cell, result in zip(cells, estimate_many(cells, statistic="median"), strict=True):
        assert result.session_log_ratios == pytest.approx([median(y) for y in log_ratios(cell, 0.5)])
        assert result.rounds == sum(map(len, cell.rounds))


def test_no_cells_no_estimates():
    assert estimate_many([]) == []
