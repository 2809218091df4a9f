"""False alarms and power of the whole decision on synthetic interleaved rounds with drift and AR(1) noise."""

import numpy as np
import pytest

from dilabench.stats.decisions.decide import Policy, detection_rate, judge_many
from dilabench.stats.decisions.verdicts import Code
from tests.conftest import slow

CPU = Policy.for_device("cpu")
GPU = Policy.for_device("cuda")


@pytest.mark.parametrize(("sessions", "repeats"), [(1, 1500), slow(2, 500), slow(3, 400), (5, 300)])
def test_identical_code_is_called_slower_at_most_once_in_two_hundred(cpu_noise, sessions, repeats):
    cells = cpu_noise.cells(np.random.default_rng(sessions), repeats, sessions=sessions)
    verdicts = judge_many(cells, CPU)
    assert detection_rate(verdicts, Code.SLOWER).rate <= 1 / 200
    assert detection_rate(verdicts, Code.FASTER).rate <= 1 / 200


@pytest.mark.parametrize(
    ("sessions", "effect", "wanted"),
    [(1, 0.05, 0.65), (1, 0.10, 0.99), (3, 0.10, 0.70), (5, 0.05, 0.70), (5, 0.10, 0.95)],
)
def test_a_slow_down_is_found(cpu_noise, sessions, effect, wanted):
    cells = cpu_noise.cells(np.random.default_rng(10 + sessions), 300, effect=effect, sessions=sessions)
    assert detection_rate(judge_many(cells, CPU)).rate >= wanted


@pytest.mark.parametrize("sessions", [1, 3])
def test_gpu_defaults_find_five_per_cent_and_no_false_alarm(gpu_noise, sessions):
    rng = np.random.default_rng(20 + sessions)
    assert detection_rate(judge_many(gpu_noise.cells(rng, 400, sessions=sessions), GPU)).hits == 0
    slower = gpu_noise.cells(rng, 200, effect=0.05, sessions=sessions)
    assert detection_rate(judge_many(slower, GPU)).rate >= 0.98


def test_same_is_proven_rather_than_assumed(gpu_noise):
    """On quiet identical code SAME is the usual verdict, and a change at the threshold is so at most at alpha."""
    rng, policy = np.random.default_rng(31), Policy.for_device("cuda", user_margin=0.03)
    assert detection_rate(judge_many(gpu_noise.cells(rng, 200), policy), Code.SAME).rate >= 0.95
    at_margin = judge_many(gpu_noise.cells(rng, 400, effect=0.03, sessions=5), policy)
    assert detection_rate(at_margin, Code.SAME).interval.low <= 0.025


@pytest.mark.parametrize(
    ("sessions", "low", "high"), [(1, 0.93, 0.99), slow(2, 0.93, 0.99), slow(3, 0.93, 1.0), (5, 0.93, 0.995)]
)
def test_interval_covers_the_true_ratio(cpu_noise, sessions, low, high):
    cells = cpu_noise.cells(np.random.default_rng(40), 600, effect=0.07, sessions=sessions)
    covered = [v.numbers.ratio_low <= 1.07 <= v.numbers.ratio_high for v in judge_many(cells, CPU)]
    assert low <= np.mean(covered) <= high
