"""A stored baseline against new sessions."""

from math import exp, log, sqrt
from statistics import mean

import numpy as np
import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

from dilabench.errors import ConfigError
from dilabench.stats.decisions.decide import Policy, decide, detection_rate, sessions_needed
from dilabench.stats.decisions.history import StoredSessions, estimate_stored
from dilabench.stats.decisions.verdicts import Cause, Code

POLICY = Policy(user_margin=0.02)
slots = st.lists(st.lists(st.integers(900, 1100), min_size=1, max_size=4), min_size=1, max_size=3)
sides = st.lists(slots, min_size=1, max_size=4)


def estimate_from_history(baseline, candidate):
    return estimate_stored([StoredSessions(baseline, candidate)])[0]


def stored(levels, n=20):
    """Sessions whose slots all take exactly exp(level)."""
    return [[[exp(level)] * n] * 3 for level in levels]


def test_the_interval_is_students():
    baseline = [log(1e7) + x for x in (0.0, 0.01, -0.02, 0.015, 0.005, -0.01)]
    candidate = [log(1e7) + x for x in (0.05, 0.06)]
    result = estimate_from_history(stored(baseline), stored(candidate))
    expected = scipy.stats.ttest_ind(candidate, baseline)
    low, high = expected.confidence_interval(0.95)
    assert result.log_ratio == pytest.approx(mean(candidate) - mean(baseline))
    assert (result.interval.low, result.interval.high) == (pytest.approx(low), pytest.approx(high))
    assert result.df == expected.df
    assert (result.unit, result.sessions, result.rounds, result.advisory) == ("session", 2, 6, False)


def test_fewer_than_five_stored_sessions_never_fail_a_gate():
    slow = stored([log(2e7)])
    for count in (2, 4):
        base = stored(log(1e7) + 0.001 * np.arange(count))
        verdict = decide(estimate_from_history(base, slow), POLICY)
        assert verdict.code is Code.SLOWER
        assert verdict.advisory
        assert not verdict.fails_gate
        assert "advisory" in verdict.hint
    five = decide(estimate_from_history(stored(log(1e7) + 0.001 * np.arange(5)), slow), POLICY)
    assert five.fails_gate


@pytest.mark.parametrize(("spread", "count"), [(0.006, 3), (0.009, 6), (0.010, 12)])
def test_as_many_sessions_as_are_said_to_be_needed_show_the_same_four_times_in_five(spread, count):
    levels = log(1e7) + spread * np.array([1, -1] * 4) * sqrt(7 / 8)
    base = estimate_from_history(stored(levels), stored(levels))
    assert sessions_needed(base, log(1.02), POLICY) == count
    look = 1 + int(np.log2(count / 3))
    draws = np.random.default_rng(3).normal(log(1e7), spread, (500, 8 + count))
    sides = [StoredSessions(stored(draw[:8], 1), stored(draw[8:], 1)) for draw in draws]
    estimates = estimate_stored(sides, confidence=POLICY.confidence_at(look))
    rate = detection_rate([decide(one, POLICY) for one in estimates], Code.SAME).rate
    assert 0.7 <= rate <= 1.0


def test_a_baseline_too_small_for_its_spread_is_named_with_the_size_that_would_do():
    base = stored(log(1e7) + 0.03 * np.array([-1, 1, 0, 1, -1]))
    verdict = decide(estimate_from_history(base, stored([log(1e7)] * 3)), POLICY)
    assert (verdict.code, verdict.cause, verdict.undecided) == (Code.INCONCLUSIVE, Cause.OUT_OF_REACH, False)
    assert verdict.numbers.sessions_needed is None
    assert "too much for the baseline's 5: " in verdict.hint
    assert f"{verdict.numbers.both_needed} on either side should decide" in verdict.hint


def test_one_session_on_each_side_gives_no_interval():
    verdict = decide(estimate_from_history(stored([log(1e7)]), stored([log(2e7)])), POLICY)
    assert (verdict.code, verdict.cause) == (Code.INCONCLUSIVE, Cause.TOO_FEW_SESSIONS)
    assert verdict.numbers.ratio == pytest.approx(2.0)


def test_twenty_samples_against_twenty_one():
    base, new = stored(log(1e7) + 0.001 * np.arange(6), n=20), stored([log(1e7) + 0.002] * 2, n=21)
    assert decide(estimate_from_history(base, new), POLICY).code is Code.SAME


def test_false_alarms_between_sessions_that_differ():
    rng = np.random.default_rng(0)
    draws = rng.normal(log(1e7), 0.05, (400, 8))
    verdicts = [decide(estimate_from_history(stored(d[:6], 5), stored(d[6:], 5)), POLICY) for d in draws]
    assert detection_rate(verdicts).rate <= 0.03


@pytest.mark.parametrize("empty", [[], [[]], [[[]]]])
def test_empty_sides_are_refused(empty):
    with pytest.raises(ConfigError):
        estimate_from_history(empty, stored([1.0]))


@given(st.lists(st.tuples(sides, sides), min_size=1, max_size=4))
def test_a_batch_estimates_each_cell_as_if_alone(many):
    cells = [StoredSessions(baseline, candidate) for baseline, candidate in many]
    assert estimate_stored(cells) == [estimate_from_history(baseline, candidate) for baseline, candidate in many]
