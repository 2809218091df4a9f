"""The fixture `dilabench_benchmark`, in a pytest session of its own and by a clock that the test winds."""

import json
from pathlib import Path

import pytest

import dilabench
from dilabench.errors import ConfigError
from dilabench.pytest_plugin import Benchmark
from dilabench.stats.decisions.verdicts import Code

pytest_plugins = ["pytester"]


class Wound:
    """A clock that moves only when a function says so."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now

    def taking(self, *durations_ns):
        """A function that takes the durations in turn."""
        calls = iter(range(10**9))

        def work():
            self.now += durations_ns[next(calls) % len(durations_ns)]

        return work


@pytest.fixture
def clock():
    return Wound()


@pytest.fixture
def benchmark(clock):
    return Benchmark(tell=lambda _: None, clock=clock, seed="test")


def test_samples_are_per_call(benchmark, clock):
    timed = benchmark.adjusted(rounds=4, samples=3)(clock.taking(1_000_000))
    assert timed.samples_ns == (1_000_000,) * 12
    assert timed.location.median_ns == 1_000_000


def test_short_calls_are_batched(benchmark, clock):
    timed = benchmark.adjusted(rounds=2, samples=1)(clock.taking(1_000, 3_000))
    assert timed.samples_ns == (2_000, 2_000)


@pytest.mark.parametrize(
    ("candidate_ns", "code"), [(1_100_000, Code.SLOWER), (900_000, Code.FASTER), (1_000_000, Code.SAME)]
)
def test_verdict(benchmark, clock, candidate_ns, code):
    faced = benchmark.compare(clock.taking(1_000_000), clock.taking(candidate_ns))
    assert faced.verdict.code is code
    allowed = {Code.SLOWER: [], Code.FASTER: ["not_slower", "faster"], Code.SAME: ["not_slower", "same"]}[code]
    for claim in ("not_slower", "faster", "same"):
        check = getattr(faced, f"assert_{claim}")
        if claim in allowed:
            check()
        else:
            with pytest.raises(pytest.fail.Exception, match=code):
                check()


def test_margin(benchmark, clock):
    faced = benchmark.adjusted(margin="20%").compare(clock.taking(1_000_000), clock.taking(1_100_000))
    assert faced.verdict.code is Code.SAME


def test_a_slow_first_look_is_taken_again(benchmark, clock):
    """The candidate was slow only at first: the second data decide."""
    calls = []

    def candidate():
        calls.append(None)
        clock.now += 2_000_000 if len(calls) < 150 else 1_000_000

    faced = benchmark.adjusted(rounds=10).compare(clock.taking(1_000_000), candidate)
    assert faced.verdict.code is Code.SAME
    assert len(calls) > 150


def test_limit(benchmark, clock):
    timed = benchmark(clock.taking(1_000_000))
    timed.assert_below("1.5ms")
    with pytest.raises(pytest.fail.Exception, match=r"above 0\.5ms"):
        timed.assert_below("0.5ms")


def test_a_clock_that_goes_backwards_gives_no_impossible_time(benchmark, clock):
    timed = benchmark.adjusted(rounds=3)(clock.taking(1_000_000, -5_000_000))
    assert min(timed.samples_ns) >= 1


@pytest.mark.parametrize("settings", [{"rounds": 0}, {"samples": 0}])
def test_impossible_settings(benchmark, settings):
    with pytest.raises(ConfigError, match="at least 1"):
        benchmark.adjusted(**settings)


def test_in_a_session_of_its_own(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(dilabench.__file__).parents[1]))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(
        """
        import sys, time

        def test_good(dilabench_benchmark):
            quick = dilabench_benchmark.adjusted(rounds=5, samples=2)
            quick(sum, range(1000)).assert_below("10s")
            quick.compare(sorted, lambda data: time.sleep(0.001), [3, 1, 2]).assert_faster()

        def test_light():
            assert not {"torch", "numpy", "typer"} & set(sys.modules)
        """
    )
    result = pytester.runpytest_subprocess("-p", "dilabench.pytest_plugin", "-k", "light")
    result.assert_outcomes(passed=1, deselected=1)
    written = ("--dilabench-json", "timed.json")
    result = pytester.runpytest_subprocess("-p", "dilabench.pytest_plugin", "-k", "good", *written)
    result.assert_outcomes(failed=1)
    (entry,) = json.loads((pytester.path / "timed.json").read_text())["benchmarks"]
    assert entry["fullname"].endswith("::test_good: sum")
    stats = entry["stats"]
    assert stats["rounds"] == len(stats["data"]) == 10
    assert 0 < stats["min"] <= stats["q1"] <= stats["median"] <= stats["q3"] <= stats["max"] < 1
    result.stdout.fnmatch_lines(["*SLOWER*", "*= dilabench =*", "*test_good: sum: *"])
