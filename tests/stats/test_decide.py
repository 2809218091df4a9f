"""Verdicts: symmetry, invariance, the margin and each way to be inconclusive."""

from dataclasses import replace
from math import exp, log, log1p

import pytest
import scipy
from hypothesis import given, settings
from hypothesis import strategies as st

from dilabench.errors import ConfigError
from dilabench.stats.decisions.decide import Policy, decide, judge_many
from dilabench.stats.decisions.paired import Estimate, PairedRounds, estimate_many
from dilabench.stats.decisions.verdicts import Cause, Code, confirm
from dilabench.stats.samples.location import Interval
from tests.conftest import random_examples

MIRROR = {Code.SLOWER: Code.FASTER, Code.FASTER: Code.SLOWER}
NO_FLOOR = Policy(user_margin=0.02, resolution=0.02, min_change_ns=0)

slot = st.lists(st.integers(1_000_000, 1_200_000), min_size=1, max_size=7)
sessions = st.lists(st.lists(st.tuples(slot, slot), min_size=1, max_size=8), min_size=1, max_size=4)


def judge(cell, policy):
    return judge_many([cell], policy)[0]


def swapped(rounds):
    return [[(candidate, baseline) for baseline, candidate in session] for session in rounds]


def scaled(rounds, factor):
    return [[tuple([factor * x for x in side] for side in pair) for pair in session] for session in rounds]


def known(log_ratio=0.0, se=0.001, **changes):
    reach = 2.093 * se
    base = Estimate(
        log_ratio=log_ratio, se=se, df=19.0, interval=Interval(log_ratio - reach, log_ratio + reach, 0.95),
        rounds=20, sessions=1,
        session_log_ratios=(log_ratio,), baseline_ns=1e8, candidate_ns=1e8 * exp(log_ratio), a12=0.5,
    )  # fmt: skip
    return replace(base, **changes)


@random_examples(30, 100, rounds=sessions, shift=st.sampled_from([0.0, 0.03, 0.3]))
def test_exchanging_the_sides_mirrors_the_verdict(rounds, shift):
    rounds = [[(a, [x * (1 + shift) for x in b]) for a, b in session] for session in rounds]
    there, back = judge(PairedRounds(rounds), NO_FLOOR), judge(PairedRounds(swapped(rounds)), NO_FLOOR)
    assert back.code is MIRROR.get(there.code, there.code)
    assert back.cause is there.cause
    assert back.numbers.log_ratio == pytest.approx(-there.numbers.log_ratio, abs=1e-12)
    assert back.numbers.a12 == pytest.approx(1 - there.numbers.a12)
    if there.numbers.p_slower is not None:
        assert back.numbers.p_faster == pytest.approx(there.numbers.p_slower, rel=1e-6, abs=1e-12)


@random_examples(30, 100, rounds=sessions, factor=st.sampled_from([2, 16, 1024]))
def test_scaling_both_sides_leaves_the_verdict(rounds, factor):
    policy = Policy(user_margin=0.02, min_change_ns=2000)
    larger = replace(policy, min_change_ns=2000 * factor)
    one, other = judge(PairedRounds(rounds), policy), judge(PairedRounds(scaled(rounds, factor)), larger)
    assert one.code is other.code
    assert one.threshold == pytest.approx(other.threshold)
    assert one.numbers.log_ratio == pytest.approx(other.numbers.log_ratio, abs=1e-12)


@given(st.lists(sessions, min_size=1, max_size=5))
@settings(max_examples=30)
def test_a_batch_judges_each_cell_as_if_alone(many):
    cells = [PairedRounds(rounds) for rounds in many]
    assert judge_many(cells, NO_FLOOR) == [judge(cell, NO_FLOOR) for cell in cells]


@pytest.mark.parametrize("effect", [0.0, 0.05, -0.05])
@pytest.mark.parametrize("sizes", [(20, 21), (21, 20), (5, 20)])
def test_sides_of_unequal_size_compare_like_equal_ones(round_noise, sizes, effect):
    expected = {0.0: Code.SAME, 0.05: Code.SLOWER, -0.05: Code.FASTER}[effect]
    for seed in range(25):
        assert judge(round_noise(seed, sizes=sizes, sd=0.01, effect=effect), NO_FLOOR).code is expected


def test_a_side_with_more_samples_gains_nothing(round_noise):
    """The minimum of 40 lies far below that of 5; read at one level they agree."""
    ratios = [estimate_many([round_noise(seed, sizes=(5, 40), sd=0.1)])[0].log_ratio for seed in range(100)]
    assert abs(sum(ratios) / len(ratios)) < 0.01


@pytest.mark.parametrize(
    ("log_ratio", "code"),
    [
        (log1p(0.02) + 0.0035, Code.SLOWER),
        (-log1p(0.02) - 0.0035, Code.FASTER),
        (0.01, Code.SAME),
        (0.02, Code.UNDECIDED),
    ],
)
def test_code_follows_the_interval(log_ratio, code):
    verdict = decide(known(log_ratio), NO_FLOOR)
    assert verdict.code is code
    assert verdict.reason
    assert bool(verdict.hint) is (code is Code.UNDECIDED)


def test_p_and_detectable_effect_are_those_of_the_t_distribution():
    verdict = decide(known(0.03, 0.004), NO_FLOOR)
    t = scipy.stats.t(19)
    assert verdict.numbers.p_slower == pytest.approx(t.sf((0.03 - log(1.02)) / 0.004))
    assert verdict.numbers.p_faster == pytest.approx(t.sf((-0.03 - log(1.02)) / 0.004))
    assert verdict.numbers.mde == pytest.approx(exp(log(1.02) + (t.ppf(0.995) + t.ppf(0.8)) * 0.004) - 1)


@pytest.mark.parametrize(("policy", "margin"), [(Policy(user_margin=0.03), 0.03), (Policy(user_margin=0.0), 0.02)])
def test_margin_is_the_largest_term(policy, margin):
    assert policy.margin(100_000.0) == pytest.approx(margin)


def test_a_change_of_less_than_two_microseconds_is_none():
    tiny = known(log(1.1), baseline_ns=10_000.0, candidate_ns=11_000.0)
    assert decide(tiny, Policy()).code is Code.SAME
    assert decide(known(log(1.1)), Policy()).code is Code.SLOWER


def test_default_margins_of_devices():
    assert Policy.for_device("cuda:1").user_margin == 0.03
    assert Policy.for_device("cpu").user_margin == 0.02
    given = Policy.for_device("cpu", user_margin=0.2)
    assert (given.user_margin, given.resolution) == (0.2, 0.2)
    assert (Policy.for_device("cuda").spread, Policy.for_device("cpu").spread) == (0.02, 0.05)


def test_too_few_rounds_give_no_interval(round_noise):
    verdict = judge(round_noise(0, rounds=3), NO_FLOOR)
    assert (verdict.code, verdict.cause) == (Code.UNDECIDED, Cause.TOO_FEW_ROUNDS)
    assert "2 more rounds" in verdict.hint
    assert verdict.numbers.ratio_low is None
    assert verdict.numbers.p_slower is None


def test_the_sessions_said_to_be_needed_are_enough_and_not_far_too_many(round_noise):
    """That many sessions decide in most cases, a quarter of them seldom does."""
    asked = decided = decided_early = 0
    for seed in range(60):
        verdict = judge(round_noise(seed, rounds=8, sd=0.03, effect=0.01), NO_FLOOR)
        needed = verdict.numbers.sessions_needed
        if verdict.code is not Code.UNDECIDED or needed is None or not 8 <= needed < 40:
            continue
        asked += 1
        later, early = (
            judge(round_noise(1000 + seed, rounds=8, sessions=count, sd=0.03, effect=0.01), NO_FLOOR)
            for count in (needed, needed // 4)
        )
        decided += later.code is not Code.UNDECIDED
        decided_early += early.code is not Code.UNDECIDED
    assert asked > 10
    assert decided / asked > 0.5
    assert decided_early < decided


def test_a_change_as_large_as_the_margin_is_decided_by_no_number_of_sessions():
    verdict = decide(known(log1p(0.02), 0.01), NO_FLOOR)
    assert (verdict.code, verdict.cause, verdict.numbers.sessions_needed) == (Code.UNDECIDED, Cause.IMPRECISE, None)
    assert "another `--threshold`" in verdict.hint


def test_only_the_second_data_decide():
    slower, same = decide(known(0.1), NO_FLOOR), decide(known(0.0), NO_FLOOR)
    assert confirm(slower, same) is same
    assert confirm(slower, slower) is slower
    assert confirm(same, slower) is same
    unconfirmed = confirm(slower, None)
    assert (unconfirmed.code, unconfirmed.cause) == (Code.UNDECIDED, Cause.NOT_REMEASURED)
    assert not unconfirmed.fails_gate


@pytest.mark.parametrize(
    "bad", [{"user_margin": -0.1}, {"sigma_aa": -1.0}, {"confidence": 1.0}, {"min_change_ns": float("nan")}]
)
def test_policy_refuses_impossible_values(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Policy(**bad)


@pytest.mark.parametrize("rounds", [[], [[]], [[([1.0], [])]], [[([1.0], [0.0])]], [[([1.0], [float("nan")])]]])
def test_impossible_samples_are_refused(rounds):
    with pytest.raises(ConfigError):
        judge(PairedRounds(rounds), NO_FLOOR)
