"""`dilabench verify --all`: every implementation x backend x dtype x family, as a table of marks with reasons."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dilabench.cli.terminal import Lines, say, say_folded
from dilabench.engine.worker.outcomes import Result
from dilabench.errors import ConfigError
from dilabench.patterns.registry import known_kinds, pattern_type
from dilabench.plugins.descriptors import Implementation
from dilabench.record import PlannedCase
from dilabench.request import ALL
from dilabench.suites.planner import Planner
from dilabench.validation import validated
from dilabench.workload.spec import DEFAULT_PATTERN, WorkloadRequest

# Short enough for every row to be compared, awkward in the ways that go wrong.
SHAPE: dict[str, Any] = {"batch_size": 1, "seq_len": 195, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
DTYPES = ("float64", "float32", "float16", "bfloat16")
HEAD = ("implementation", "backend", "dtype")
EVERY = "every"
# How a result stands in a line of one case, and in a cell of the table.
SIGNS: Mapping[Result, str] = {"right": "✓", "wrong": "✗", "failed": "failed", "skipped": "skipped"}
MARKS: Mapping[Result, str] = {"right": "✓", "wrong": "✗", "failed": "!", "skipped": "-"}
# In the list of reasons, in its order.
WORDS: Mapping[Result, str] = {"wrong": "WRONG", "failed": "FAILED", "skipped": "skipped"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One case of the table and the family it belongs to."""

    family: str
    planned: PlannedCase

    @property
    def line(self) -> tuple[str, str, str]:
        """The cells that name its line."""
        case = self.planned.case
        return case.implementation, case.backend or "-", case.workload.dtype


def trials_of(planner: Planner) -> tuple[Trial, ...]:
    """The cases, those of one line together. What the user set or named narrows the table.

    Raises ConfigError when presets or fields of a family are given: the families are the point.
    """
    if planner.request.presets:
        raise ConfigError("--all brings its own workloads; leave --config out, or leave --all out")
    fixed = planner.request.overrides
    families = families_of_patterns()
    clash = sorted(fixed.keys() & {name for fields in families.values() for name in fields} - SHAPE.keys())
    if clash:
        raise ConfigError(f"--all goes through every value of {clash[0]}; leave it out, or leave --all out")
    asking = planner.asking(backends=planner.request.backends or (ALL,))
    dtypes = (fixed["dtype"],) if "dtype" in fixed else DTYPES
    trials: list[Trial] = []
    for implementation in planner.implementations(planner.catalogue.implementations.names):
        for dtype in dtypes:
            for family, fields in families.items():
                asked = validated(WorkloadRequest, {"mode": "both", **SHAPE, **fields, **fixed, "dtype": dtype})
                trials += _planned(asking, implementation, family, asked)
    return tuple(sorted(trials, key=lambda trial: planner_order(planner, trial)))


def families_of_patterns() -> dict[str, dict[str, Any]]:
    """Requests by the name of their family: what each pattern is tried on, the default pattern first."""
    kinds = dict.fromkeys((DEFAULT_PATTERN, *known_kinds()))
    return {name: {"pattern": kind, **fields} for kind in kinds for name, fields in pattern_type(kind).trials().items()}


def planner_order(planner: Planner, trial: Trial) -> tuple[int, str, int]:
    """Lines in the order of the catalogue."""
    implementation, backend, dtype = trial.line
    return planner.catalogue.implementations.names.index(implementation), backend, DTYPES.index(dtype)


def _planned(planner: Planner, implementation: Implementation, family: str, asked: WorkloadRequest) -> list[Trial]:
    planned = planner.plan(implementation, asked)
    forward_only = [
        one for one in planned if one.skip and asked.mode == "both" and _only_backward_is_missing(planner, one)
    ]
    if forward_only:
        planned = tuple(
            planner_case
            for one in planned
            for planner_case in (_forward(planner, implementation, asked, one) if one in forward_only else (one,))
        )
    return [Trial(family=family, planned=one) for one in planned]


def _only_backward_is_missing(planner: Planner, one: PlannedCase) -> bool:
    forward = one.case.model_copy(update={"workload": one.case.workload.replace(mode="forward")})
    return not planner.catalogue.reasons_against(forward, planner.machine)


def _forward(
    planner: Planner, implementation: Implementation, asked: WorkloadRequest, one: PlannedCase
) -> Sequence[PlannedCase]:
    """The same without gradients, for what has a forward pass only."""
    planned = planner.plan(implementation, asked.model_copy(update={"mode": "forward"}))
    return [other for other in planned if other.case.backend == one.case.backend]


class Marks:
    """Prints a line as soon as its last family is known; reasons come at the end, each once."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self._families = tuple(families_of_patterns())
        self._running = {trial.line[:2] for trial in trials if trial.planned.skip is None}
        self._pending: dict[tuple[str, str, str], int] = {}
        for trial in trials:
            line = self._line(trial)
            self._pending[line] = self._pending.get(line, 0) + 1
        self._marks: dict[tuple[str, str, str], dict[str, str]] = {}
        self._reasons: dict[tuple[Result, str], list[str]] = {}
        known = [(*line, *self._families) for line in self._pending]
        self._lines = Lines((*HEAD, *self._families), known, names=len(HEAD))

    def _line(self, trial: Trial) -> tuple[str, str, str]:
        """What runs in no dtype gets one line for all of them."""
        return trial.line if trial.line[:2] in self._running else (*trial.line[:2], EVERY)

    def add(self, trial: Trial, result: Result, detail: str) -> bool:
        """The result of a trial with its reason. Returns whether that completed a line, which was printed."""
        only_forward = result == "right" and trial.planned.case.workload.mode == "forward"
        line = self._line(trial)
        self._pending[line] -= 1
        marks = self._marks.setdefault(line, {})
        marks[trial.family] = MARKS[result] + ("fwd" if only_forward else "")
        if result != "right":
            implementation, backend, dtype = trial.line
            where = f"{implementation} over {backend}" if backend != "-" else implementation
            self._reasons.setdefault((result, detail), []).append(f"{where} {dtype} {trial.family}")
        if self._pending[line]:
            return False
        self._lines.print((*line, *(marks.get(family, MARKS["skipped"]) for family in self._families)))
        return True

    def close(self) -> None:
        """The reasons, wrong results first, skipped ones last; equal ones together."""
        say()
        order = list(WORDS)
        for (result, detail), places in sorted(self._reasons.items(), key=lambda item: order.index(item[0][0])):
            shown = places[0] if len(places) == 1 else f"{places[0]} and {len(places) - 1} more"
            say_folded(f"{WORDS[result]}: {detail} ({shown if result == 'skipped' else ', '.join(places)})", "  ")
