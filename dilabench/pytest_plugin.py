"""The pytest fixtures. `dilabench_benchmark`: time a function, or gate one against another, from your own tests.

    def test_merge_is_no_slower(dilabench_benchmark):
        faced = dilabench_benchmark.compare(old_merge, new_merge, data)   # interleaved rounds, like `dilabench run`
        faced.assert_not_slower()

    def test_merge_is_quick(dilabench_benchmark):
        dilabench_benchmark(new_merge, data).assert_below("5ms")

`pytest --dilabench-json FILE` writes what was timed as pytest-benchmark's JSON, which services and `pytest-benchmark
compare` read.

And `dilabench_check`: hold what your package registers to everything that dilabench asks of it.

    def test_it_conforms(dilabench_check):
        dilabench_check("my-attention")                  # `dilabench plugin check my-attention`, as an assertion

Both are found through the entry point `pytest11`; `-p no:dilabench` leaves them out. torch is never imported here: a
GPU is waited for only when a test has put it to use.
"""

import gc
import importlib
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dilabench.engine.device.capture import no_collection
from dilabench.errors import ConfigError, counted
from dilabench.units import format_seconds, parse_duration, parse_fraction

if TYPE_CHECKING:
    from dilabench.stats.decisions.verdicts import Code, Verdict
    from dilabench.stats.samples.location import Location

Function = Callable[..., object]
Work = Callable[[], object]

REPORT = pytest.StashKey[list[str]]()
TIMED = pytest.StashKey[list[tuple[str, "Timed"]]]()
SAMPLE_NS = 100_000
WARM_UP_S = 0.1
WARM_UP_CALLS = 3


@dataclass(frozen=True, slots=True)
class Timed:
    """Samples of one function, in ns per call."""

    name: str
    samples_ns: tuple[int, ...]

    @property
    def location(self) -> "Location":
        """Quartiles and the interval of the median."""
        from dilabench.stats.samples.location import locate

        return locate(self.samples_ns)

    def assert_below(self, limit: str) -> None:
        """Fail when the whole interval of the median lies above a limit such as "5ms"."""
        interval, allowed_ns = self.location.interval, parse_duration(limit) * 1e9
        if interval is not None and interval.low > allowed_ns:
            low, high = (format_seconds(end * 1e-9) for end in (interval.low, interval.high))
            pytest.fail(f"{self.name} takes {low} to {high}, which is above {limit}")


@dataclass(frozen=True, slots=True)
class JudgedPair:
    """The verdict on a candidate against a baseline, measured a second time where the first verdict was SLOWER."""

    name: str
    verdict: "Verdict"

    def assert_not_slower(self) -> None:
        """Fail when the candidate is proven slower by more than the margin."""
        from dilabench.stats.decisions.verdicts import Code

        self._refuse(Code.SLOWER)

    def assert_faster(self) -> None:
        """Fail unless the candidate is proven faster by more than the margin."""
        from dilabench.stats.decisions.verdicts import Code

        self._refuse(Code.SLOWER, Code.SAME, Code.INCONCLUSIVE)

    def assert_same(self) -> None:
        """Fail unless both are proven to differ by less than the margin."""
        from dilabench.stats.decisions.verdicts import Code

        self._refuse(Code.SLOWER, Code.FASTER, Code.INCONCLUSIVE)

    def _refuse(self, *codes: "Code") -> None:
        if self.verdict.code in codes:
            hint = f"; {self.verdict.hint}" if self.verdict.hint else ""
            pytest.fail(f"{self.name}: {self.verdict.code}: {self.verdict.reason}{hint}")


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What the fixture gives. `adjusted` changes rounds, samples per turn, margin ("5%") or the seed of the order."""

    tell: Callable[[str], None]
    keep: Callable[["Timed"], None] = lambda _: None
    rounds: int = 20
    samples: int = 5
    margin: str | None = None
    seed: str = ""
    clock: Callable[[], int] = field(default=time.perf_counter_ns, repr=False)

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.samples < 1:
            raise ConfigError(f"rounds={self.rounds} and samples={self.samples} must be at least 1")

    def adjusted(self, **changes: Any) -> "Benchmark":
        """A copy with other settings: `dilabench_benchmark.adjusted(rounds=40)(function, data)`."""
        return replace(self, **changes)

    def __call__(self, function: Function, *args: Any, **kwargs: Any) -> Timed:
        """Time `function(*args, **kwargs)`."""
        turns = self._interleaved([lambda: function(*args, **kwargs)])
        timed = Timed(_name(function), tuple(sample for (turn,) in turns for sample in turn))
        self.keep(timed)
        count = counted(len(timed.samples_ns), "sample")
        self.tell(f"{timed.name}: {format_seconds(timed.location.median_ns * 1e-9)} ({count})")
        return timed

    def compare(self, baseline: Function, candidate: Function, *args: Any, **kwargs: Any) -> JudgedPair:
        """Judge `candidate(*args, **kwargs)` against `baseline`, in rounds in which both take turns.

        A candidate that looks slower or faster is measured once more, and only the second data decide.
        """
        from dilabench.stats.decisions.verdicts import confirm

        pair: list[Work] = [lambda: baseline(*args, **kwargs), lambda: candidate(*args, **kwargs)]
        verdict = self._judged(pair)
        if verdict.flagged:
            verdict = confirm(verdict, self._judged(pair))
        faced = JudgedPair(f"{_name(candidate)} against {_name(baseline)}", verdict)
        self.tell(f"{faced.name}: {verdict.code}: {verdict.reason}")
        return faced

    def _judged(self, pair: Sequence[Work]) -> "Verdict":
        from dilabench.stats.decisions.decide import judge
        from dilabench.stats.decisions.paired import PairedRounds
        from dilabench.stats.decisions.policy import Policy

        rounds = [(baseline, candidate) for baseline, candidate in self._interleaved(pair)]
        margin = None if self.margin is None else parse_fraction(self.margin)
        device = "cpu" if _device_wait() is None else "cuda"
        return judge(PairedRounds([rounds]), Policy.for_device(device, user_margin=margin))

    def _interleaved(self, works: Sequence[Work]) -> list[list[list[int]]]:
        """Samples `[round][work][sample]` in ns per call; the order inside a round is random but reproducible."""
        order = random.Random(self.seed)
        batches = [self._warm_up(work) for work in works]
        rounds = []
        gc.collect()
        with no_collection():
            for _ in range(self.rounds):
                turns: list[list[int]] = [[] for _ in works]
                for index in order.sample(range(len(works)), len(works)):
                    turns[index] = [self._sample(works[index], batches[index]) for _ in range(self.samples)]
                rounds.append(turns)
        return rounds

    def _warm_up(self, work: Work) -> int:
        """Call it for a while; returns how many calls make a sample long enough for the clock."""
        started, calls, fastest = self.clock(), 0, 0
        while calls < WARM_UP_CALLS or (calls < 1000 and self.clock() - started < WARM_UP_S * 1e9):
            spent = self._sample(work, 1)
            fastest = min(fastest, spent) if calls else spent
            calls += 1
        return max(1, -(-SAMPLE_NS // fastest))

    def _sample(self, work: Work, batch: int) -> int:
        wait = _device_wait()
        if wait:
            wait()
        started = self.clock()
        for _ in range(batch):
            work()
        if wait:
            wait()
        # a host clock that is set back must not give a time that is none
        return max(1, (self.clock() - started) // batch)


@pytest.fixture
def dilabench_check() -> Callable[..., object]:
    """The conformance suite of a name: `dilabench.testing.check_plugin`, imported when a test asks for it."""
    # By name: the kit for authors lies beside this module, and imports torch.
    check: Callable[..., object] = importlib.import_module("dilabench.testing").check_plugin
    return check


@pytest.fixture
def dilabench_benchmark(request: pytest.FixtureRequest) -> Benchmark:
    """Time a callable, or judge one against another: see `dilabench.pytest_plugin`."""
    lines = request.config.stash.setdefault(REPORT, [])
    timed = request.config.stash.setdefault(TIMED, [])
    node: str = request.node.nodeid
    return Benchmark(
        tell=lambda text: lines.append(f"{node}: {text}"), keep=lambda one: timed.append((node, one)), seed=node
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--dilabench-json FILE`."""
    group = parser.getgroup("dilabench")
    group.addoption("--dilabench-json", metavar="FILE", help="Write what was timed as pytest-benchmark's JSON.")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the file that was asked for. Under xdist each worker has its own times, so it is refused there."""
    path = session.config.getoption("--dilabench-json")
    if not path:
        return
    if session.config.pluginmanager.hasplugin("dsession") or hasattr(session.config, "workerinput"):
        if not hasattr(session.config, "workerinput"):
            session.config.stash.setdefault(REPORT, []).append(
                f"{path} not written: tests that share the processor time each other; run with -n 0"
            )
        return
    from dilabench.report.pytest_benchmark import as_json

    timed: list[tuple[str, Timed]] = session.config.stash.setdefault(TIMED, [])
    Path(path).write_text(as_json(timed), encoding="utf-8")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One line per measurement at the end of the session."""
    lines = config.stash.get(REPORT, [])
    if lines:
        terminalreporter.section("dilabench")
        for line in lines:
            terminalreporter.write_line(line)


def _name(function: Function) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _device_wait() -> Work | None:
    """Waits for the GPU, when torch is loaded and a test has used it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    wait: Work = torch.cuda.synchronize
    return wait
