"""A stored baseline against new sessions."""

from math import exp, log, sqrt
from statistics import mean, stdev

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from dilabench.errors import ConfigError
from dilabench.stats.decisions.calibration import detection_rate
from dilabench.stats.decisions.decide import decide
from dilabench.stats.decisions.history import StoredSessions, estimate_from_history, estimate_stored
from dilabench.stats.decisions.policy import Policy
from dilabench.stats.decisions.verdicts import Cause, Code

POLICY = Policy(user_margin=0.02)
slots = st.lists(st.lists(st.integers(900, 1100), min_size=1, max_size=4), min_size=1, max_size=3)
sides = st.lists(slots, min_size=1, max_size=4)


def stored(levels, n=20):
    """Sessions whose slots all take exactly exp(level)."""
    return [[[exp(level)] * n] * 3 for level in levels]


def test_prediction_interval_is_the_stated_formula():
    baseline = [log(1e7) + x for x in (0.0, 0.01, -0.02, 0.015, 0.005, -0.01)]
    candidate = [log(1e7) + x for x in (0.05, 0.06)]
    result = estimate_from_history(stored(baseline), stored(candidate))
    theta = mean(candidate) - mean(baseline)
    reach = scipy.stats.t.ppf(0.975, 5) * stdev(baseline) * sqrt(1 / 2 + 1 / 6)
    assert result.log_ratio == pytest.approx(theta)
    assert (result.interval.low, result.interval.high) == (pytest.approx(theta - reach), pytest.approx(theta + reach))
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


def test_as_many_more_sessions_as_asked_for_decide_and_no_fewer():
    """The history's degrees of freedom stay what they are, however many sessions the candidate adds."""
    base = stored([log(1e7) + x for x in (0.0, 0.004, -0.006, 0.005, -0.003)])
    level = log(1e7) + 0.029
    verdict = decide(estimate_from_history(base, stored([level])), POLICY)
    assert verdict.cause is Cause.IMPRECISE
    enough = next(
        k for k in range(1, 99) if decide(estimate_from_history(base, stored([level] * k)), POLICY).fails_gate
    )
    assert verdict.numbers.rounds_needed / 3 == pytest.approx(enough - 1, abs=1)
    assert f"about {enough - 1} more sessions would decide" in verdict.hint


def test_one_stored_session_gives_no_interval():
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
