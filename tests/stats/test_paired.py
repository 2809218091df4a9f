"""The formulas of the paired estimate against a direct transcription."""

from math import log, sqrt
from statistics import mean, median, stdev

import numpy as np
import pytest
import scipy
from hypothesis import given, settings
from hypothesis import strategies as st

from dilabench.stats.decisions.paired import PairedRounds, estimate_many


def estimate(cell, **settings):
    return estimate_many([cell], **settings)[0]


def log_ratios(cell):
    return [[np.log(median(b) / median(a)) for a, b in session] for session in cell.rounds]


def quotient(cell):
    """The median of all samples of the candidate over the baseline's."""
    sides = zip(*(pair for session in cell.rounds for pair in session), strict=True)
    baseline, candidate = (median([sample for slot in side for sample in slot]) for side in sides)
    return candidate / baseline


def test_three_sessions_or_more_use_their_own_spread(round_noise):
    cell = round_noise(3, sizes=(7, 6), sessions=5, rounds=11, effect=0.04)
    result = estimate(cell)
    medians = [median(session) for session in log_ratios(cell)]
    centre = log(quotient(cell))
    se = max(stdev(medians) / sqrt(5), abs(mean(medians) - centre))
    assert result.session_log_ratios == pytest.approx(medians)
    assert result.log_ratio == pytest.approx(centre)
    assert (result.se, result.df) == (pytest.approx(se), 4)
    low, high = scipy.stats.t.interval(0.95, 4, centre, se)
    assert (result.interval.low, result.interval.high) == (pytest.approx(low), pytest.approx(high))


def test_one_session_uses_its_rounds_and_the_noise_floor(round_noise):
    cell = round_noise(4, rounds=20)
    y = log_ratios(cell)[0]
    result = estimate(cell, sigma_aa=0.01)
    gap = median(y) - log(quotient(cell))
    assert result.se == pytest.approx(max(sqrt(stdev(y) ** 2 / 20 + 0.01**2), abs(gap)))
    assert result.df == 19


@pytest.mark.parametrize("sessions", [1, 2, 4])
def test_the_ratio_is_the_quotient_of_the_two_times(round_noise, sessions):
    """Whatever the slots' sizes; and of the times given, if tables show others."""
    cell = round_noise(5, sizes=(5, 40), sessions=sessions, sd=0.1, effect=0.3)
    result = estimate(cell)
    assert result.ratio == pytest.approx(quotient(cell))
    assert result.ratio == pytest.approx(result.candidate_ns / result.baseline_ns)
    (given,) = estimate_many([cell], [(1e7, 1.2e7)])
    assert given.ratio == pytest.approx(1.2)
    assert given.interval.low < log(given.ratio) < given.interval.high


def test_the_interval_covers_the_rounds_if_the_two_times_say_something_else():
    """Half of the rounds are slow for both sides, so each median of all samples lies between two clusters."""
    rounds = [([1e6 * level], [1.1e6 * level]) for level in (1, 1, 1, 2, 2, 2)]
    result = estimate_many([PairedRounds([rounds])], [(1e6, 2.2e6)])[0]
    assert result.interval.low < log(1.1) < log(2.2) == pytest.approx(result.log_ratio)


def test_correlated_rounds_count_less():
    rng = np.random.default_rng(0)
    wave = np.zeros(60)
    for i in range(1, 60):
        wave[i] = 0.8 * wave[i - 1] + rng.normal(0, 0.01)
    cell = PairedRounds([[([1e6], [1e6 * float(np.exp(y))]) for y in wave]])
    independent = PairedRounds([[cell.rounds[0][at] for at in rng.permutation(60)]])
    assert estimate(cell).df < 25 < estimate(independent).df


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
    for cell, result in zip(cells, estimate_many(cells), strict=True):
        assert result.session_log_ratios == pytest.approx([median(y) for y in log_ratios(cell)])
        assert result.rounds == sum(map(len, cell.rounds))


def test_no_cells_no_estimates():
    assert estimate_many([]) == []
