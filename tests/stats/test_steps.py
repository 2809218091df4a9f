"""Level shifts of a history."""

import sys
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilabench.stats.decisions.steps import _potts, segments, steps


def history(levels, sd, seed, n=20):
    rng = np.random.default_rng(seed)
    return np.concatenate([level * np.exp(rng.normal(0, sd, n)) for level in levels]).tolist()


def cost(y, starts, penalty):
    parts = np.split(np.array(y), starts[1:])
    return sum(float(np.abs(part - np.median(part)).sum()) for part in parts) + penalty * (len(parts) - 1)


@given(st.lists(st.floats(-3, 3), min_size=4, max_size=9), st.floats(0.05, 4))
@settings(max_examples=60)
def test_segmentation_is_the_best_of_all(y, penalty):
    n = len(y)
    every = [
        [0, *inner]
        for count in range(n // 2)
        for inner in combinations(range(2, n - 1), count)
        if all(b - a >= 2 for a, b in zip([0, *inner], [*inner, n], strict=True))
    ]
    found = _potts(np.array(y), penalty, 2)
    assert cost(y, found, penalty) == pytest.approx(min(cost(y, starts, penalty) for starts in every))
    assert all(b - a >= 2 for a, b in zip(found, [*found[1:], n], strict=True))


@pytest.mark.parametrize("factor", [1.1, 0.9, 2.0])
def test_a_shift_is_found_where_it_is(factor):
    for seed in range(10):
        (step,) = steps(history([1e6, factor * 1e6], 0.01, seed))
        assert step.index == pytest.approx(20, abs=1)
        assert step.ratio == pytest.approx(factor, rel=0.02)


def test_noise_and_single_outliers_are_no_steps():
    flat = [steps(history([1e6], 0.03, seed, n=60)) for seed in range(60)]
    assert sum(map(bool, flat)) <= 1
    series = history([1e6], 0.01, 0, n=30)
    series[12] *= 3
    assert steps(series) == []


def test_changes_too_small_to_act_on_are_gated():
    assert steps(history([1e6, 1.01e6], 0.0005, 0)) == []
    assert len(steps(history([1e6, 1.01e6], 0.0005, 0), min_change=0.005)) == 1


def test_up_and_down_again():
    found = segments(history([1e6, 1.2e6, 1e6], 0.01, 3))
    assert [s.start for s in found] == [0, 20, 40]
    assert [s.stop for s in found] == [20, 40, 60]


def test_scaling_a_history_leaves_its_steps():
    series = history([1e6, 1.1e6], 0.01, 5)
    assert [s.index for s in steps(series)] == [s.index for s in steps([7 * x for x in series])]


def test_quantised_and_short_histories():
    assert steps([100.0] * 50) == []
    assert [s.index for s in steps([100.0] * 10 + [120.0] * 10)] == [10]
    assert steps([1.0]) == []
    assert segments([1.0, 2.0, 3.0])[0].median_ns == pytest.approx(2.0)


def calls(work):
    """How many functions are called, in Python and in C."""
    count = 0

    def watch(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_the_work_grows_with_the_history_and_not_with_its_square():
    short, long = (history([1e6, 1.2e6], 0.01, 0, n) for n in (100, 1000))
    assert [step.index for step in steps(long)] == [pytest.approx(1000, abs=1)]
    assert calls(lambda: steps(long)) < 12 * calls(lambda: steps(short))
