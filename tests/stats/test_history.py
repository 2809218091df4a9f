"""A stored baseline against new sessions."""

from dataclasses import replace
from math import exp, isinf, log, pi, sqrt
from statistics import mean, median

import numpy as np
import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

from dilabench.errors import ConfigError
from dilabench.stats.decisions.decide import Policy, decide, detection_rate
from dilabench.stats.decisions.history import Sessions, StoredSessions, estimate_stored
from dilabench.stats.decisions.verdicts import Cause, Code
from dilabench.stats.samples.location import Interval, flatten_slots

POLICY = Policy.for_device("cpu")
slots = st.lists(st.lists(st.integers(900, 1100), min_size=1, max_size=4), min_size=1, max_size=3)
sides = st.lists(slots, min_size=1, max_size=4)


def compared(baseline, candidate):
    """One comparison of sessions, each a list of slots of samples in ns."""
    flat = [flatten_slots([slot for session in side for slot in session]) for side in (baseline, candidate)]
    counts = [np.array([len(session) for session in side], np.intp) for side in (baseline, candidate)]
    return StoredSessions(*map(Sessions, flat, counts))


def estimate_from_history(baseline, candidate):
    return estimate_stored([compared(baseline, candidate)], default=0.05)[0]


def stored(levels, n=20):
    """Sessions whose slots all take exactly exp(level)."""
    return [[[exp(level)] * n] * 3 for level in levels]


def test_the_interval_is_students_if_the_sessions_at_hand_show_their_spread():
    baseline = [log(1e7) + x for x in (0.0, 0.01, -0.02, 0.015, 0.005, -0.01, 0.002)]
    candidate = [log(1e7) + x for x in (0.05, 0.06, 0.055)]
    result = estimate_from_history(stored(baseline), stored(candidate))
    assert result.log_ratio == pytest.approx(median(candidate) - median(baseline))
    deviations = [x - mean(side) for side in (baseline, candidate) for x in side]
    spread = sqrt(sum(x**2 for x in deviations) / 8)
    reach = scipy.stats.t(8).ppf(0.975) * spread * sqrt(pi / 2 * (1 / 7 + 1 / 3))
    assert (result.spread, result.spread_source, result.df) == (pytest.approx(spread), "sessions", 8)
    assert result.interval.high - result.log_ratio == pytest.approx(reach, rel=0.02)
    assert (result.stored, result.sessions, result.rounds) == (7, 3, 9)


@pytest.mark.parametrize(
    ("levels", "calibrated", "slot_spread", "spread", "source"),
    [
        ((1, 1), None, 0.0, 0.05, "assumed"),
        ((1, 1), 0.01, 0.0, 0.01, "calibrated"),
        # Wider slots, or sessions at hand, widen it.
        ((1, 1), None, 0.2, 0.2, "slots"),
        ((1, 1), 0.01, 0.2, 0.2, "slots"),
        ((3, 1), None, 0.0, 0.1, "sessions"),
        ((3, 3), None, 0.2, 0.1, "sessions"),
        ((3, 3), 0.01, 0.0, 0.1, "sessions"),
        ((1, 5), None, 0.0, 0.1, "sessions"),
    ],
)
def test_the_spread_is_calibrated_or_that_of_the_sessions_at_hand_or_assumed(
    levels, calibrated, slot_spread, spread, source
):
    """Sessions lie a tenth apart, in log units."""

    def side(count):
        centres = 0.1 * np.arange(count) if count == 3 else 0.1 * sqrt(0.4) * np.arange(count)
        quartiles = 1.349 / 2 * slot_spread * np.array([-1, -1, 0, 1, 1])
        return [[[1e7 * exp(centre + offset)] for offset in quartiles] for centre in centres]

    sides = [compared(*map(side, levels))]
    (result,) = estimate_stored(sides, default=0.05, calibrated=calibrated)
    assert (result.spread, result.spread_source) == (pytest.approx(spread), source)
    assert isinf(result.df) is (calibrated is not None or sum(levels) < 6)


@pytest.mark.parametrize(("ratio", "code"), [(4.5, Code.SLOWER), (1 / 4.5, Code.FASTER), (1.01, Code.SAME)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_one_session_on_each_side_decides_by_the_assumed_spread(device, ratio, code):
    sides = [compared(stored([log(1e7)]), stored([log(ratio * 1e7)]))]
    policy = Policy.for_device(device)
    (estimate,) = estimate_stored(sides, default=policy.spread)
    verdict = decide(estimate, policy)
    assert verdict.code is code
    # 5 % between sessions of a CPU: "no change above 16 % seen", which further sessions narrow.
    assert verdict.imprecise is ((device, code) == ("cpu", Code.SAME))
    assert verdict.reason.endswith(f"one session each, assumed to spread by {policy.spread:.0%}".replace("%", " %"))


@pytest.mark.parametrize(("ratio", "undecided"), [(1.03, False), (1.2, True)])
def test_a_coarse_no_change_needs_an_interval_that_reaches_into_the_margin(ratio, undecided):
    """A threshold of the user's is the resolution; without one, a change that is likely stays undecided."""
    (estimate,) = estimate_stored([compared(stored([log(1e7)]), stored([log(ratio * 1e7)]))], default=0.05)
    verdict = decide(estimate, Policy.for_device("cpu"))
    given = decide(estimate, Policy.for_device("cpu", user_margin=0.1))
    assert (verdict.undecided, given.undecided) == (undecided, True)
    if undecided:
        assert "is not excluded" in verdict.reason
        assert f"{verdict.numbers.both_needed} sessions on either side should decide" in verdict.hint


@pytest.mark.parametrize("change", [0.0, 0.05, 0.1, 0.15, 0.2])
def test_no_change_against_one_stored_session_is_seldom_said_below_the_true_change(change):
    draws = np.random.default_rng(5).normal(log(1e7), 0.05, (400, 7))
    draws[:, 1:] += log(1 + change)
    sides = [compared(stored(draw[:1], 5), stored(draw[1:], 5)) for draw in draws]
    verdicts = [decide(estimate, Policy.for_device("cpu")) for estimate in estimate_stored(sides, default=0.05)]
    same = [verdict.numbers.unchanged_within for verdict in verdicts if verdict.code is Code.SAME]
    assert sum(within < change for within in same) <= 0.07 * len(verdicts)
    assert change > 0 or len(same) >= 0.85 * len(verdicts)


@pytest.mark.parametrize("spread", [0.04, 0.05, 0.06])
def test_as_many_sessions_as_are_said_to_be_needed_show_the_same_mostly(spread):
    levels = log(1e7) + spread * np.array([1, -1] * 6) * sqrt(11 / 12)
    base = estimate_from_history(stored(levels), stored(levels[:2]))
    wide = replace(base, se=1.0, interval=Interval(-2.0, 2.0, 0.95))
    count = decide(wide, POLICY).numbers.sessions_needed
    draws = np.random.default_rng(3).normal(log(1e7), spread, (500, 12 + count))
    sides = [compared(stored(draw[:12], 1), stored(draw[12:], 1)) for draw in draws]
    verdicts = [decide(estimate, POLICY) for estimate in estimate_stored(sides, default=0.05)]
    assert detection_rate(verdicts, Code.SAME).rate >= 0.65
    assert detection_rate(verdicts, Code.SLOWER).rate <= 0.01


def test_a_baseline_too_small_for_its_spread_is_named_with_the_size_that_would_do():
    base = stored(log(1e7) + 0.17 * np.array([-1, 1, 0, 1, -1]))
    verdict = decide(estimate_from_history(base, stored([log(1e7)] * 3)), POLICY)
    assert (verdict.code, verdict.cause) == (Code.UNDECIDED, Cause.IMPRECISE)
    assert verdict.numbers.sessions_needed is None
    assert f"{verdict.numbers.both_needed} sessions on either side should decide" in verdict.hint


def test_twenty_samples_against_twenty_one():
    base, new = stored(log(1e7) + 0.001 * np.arange(6), n=20), stored([log(1e7) + 0.002] * 2, n=21)
    assert decide(estimate_from_history(base, new), POLICY).code is Code.SAME


def test_false_alarms_between_sessions_that_differ():
    rng = np.random.default_rng(0)
    draws = rng.normal(log(1e7), 0.05, (400, 8))
    verdicts = [decide(estimate_from_history(stored(d[:6], 5), stored(d[6:], 5)), POLICY) for d in draws]
    assert detection_rate(verdicts).rate <= 0.01


@pytest.mark.parametrize("empty", [[], [[]], [[[]]]])
def test_empty_sides_are_refused(empty):
    with pytest.raises(ConfigError):
        estimate_from_history(empty, stored([1.0]))


@given(st.lists(st.tuples(sides, sides), min_size=1, max_size=4))
def test_a_batch_estimates_each_cell_as_if_alone(many):
    cells = [compared(baseline, candidate) for baseline, candidate in many]
    assert estimate_stored(cells, default=0.05) == [
        estimate_from_history(baseline, candidate) for baseline, candidate in many
    ]
