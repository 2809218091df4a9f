"""The interval of a median of samples that are alike inside a turn, and inside a session."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilabench.errors import ConfigError
from dilabench.stats.samples.location import flatten_slots, locate, locate_slots, median_interval

times = st.lists(st.floats(1, 1e9), min_size=1, max_size=12)


def locate_sessions(sessions):
    """Summary of one case's samples, `sessions[session][turn]`."""
    slots = flatten_slots([slot for session in sessions for slot in session])
    numbers = np.repeat(np.arange(len(sessions)), [len(session) for session in sessions])
    return locate_slots(slots.samples_ns[None], slots.sizes, numbers)[0]


def drawn(seed: int, sessions: int, turns: int, samples: int, session_sd: float, turn_sd: float) -> np.ndarray:
    """Times around 1, [sessions, turns, samples], with a share of the noise common to a session and to a turn."""
    rng = np.random.default_rng(seed)
    session = rng.normal(0, session_sd, (sessions, 1, 1))
    turn = rng.normal(0, turn_sd, (sessions, turns, 1))
    return np.exp(session + turn + rng.normal(0, 0.01, (sessions, turns, samples)))


def coverage(intervals) -> float:
    return float(np.mean([one.low <= 1 <= one.high for one in intervals]))


@pytest.mark.parametrize(
    ("sessions", "turns", "session_sd", "turn_sd"), [(1, 20, 0.0, 0.02), (1, 8, 0.0, 0.02), (4, 20, 0.02, 0.0)]
)
def test_it_covers_the_median_where_pooled_samples_do_not(sessions, turns, session_sd, turn_sd):
    draws = [drawn(seed, sessions, turns, 5, session_sd, turn_sd) for seed in range(400)]
    assert coverage([locate_sessions(one.tolist()).interval for one in draws]) >= 0.93
    assert coverage([median_interval(one.ravel()) for one in draws]) < 0.8


def test_independent_samples_lose_little():
    draws = [drawn(seed, 1, 20, 5, 0, 0) for seed in range(400)]
    blocked = [locate_sessions(one.tolist()).interval for one in draws]
    pooled = [median_interval(one.ravel()) for one in draws]
    assert coverage(blocked) >= 0.95
    assert np.median([a.half_width / b.half_width for a, b in zip(blocked, pooled, strict=True)]) < 1.2


@given(st.lists(st.lists(times, min_size=1, max_size=6), min_size=1, max_size=4))
def test_all_but_the_interval_is_that_of_the_samples(sessions):
    found = locate_sessions(sessions)
    pooled = locate([sample for session in sessions for turn in session for sample in turn])
    assert (found.n, found.median_ns, found.p25_ns) == (pooled.n, pooled.median_ns, pooled.p25_ns)
    assert (found.interval is None) == (pooled.interval is None)
    if found.interval is not None:
        assert found.interval.low <= found.median_ns <= found.interval.high
        assert 0 <= found.interval.confidence <= 1


def test_one_turn_tells_nothing_of_the_others():
    interval = locate_sessions([[list(range(1, 21))]]).interval
    assert (interval.low, interval.high, interval.confidence) == (1, 20, 0)


def test_turns_of_one_sample_have_the_range_that_order_statistics_give():
    interval = locate_sessions([[[5.0], [1.0], [4.0], [2.0], [3.0]]]).interval
    assert (interval.low, interval.high, interval.confidence) == (1, 5, pytest.approx(0.9375))


def test_alike_turns_are_not_believed_beyond_independent_samples():
    """Every turn has the same share below the median, which is luck or order, and no proof."""
    interval = locate_sessions([[[1.0, 2.0, 3.0, 4.0]] * 10]).interval
    assert interval.low < 2.5 < interval.high


def test_no_samples_are_refused():
    with pytest.raises(ConfigError, match="is empty"):
        locate_sessions([])
