"""The cases that `dilabench verify` checks: the user's request, or all."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dilabench.errors import ConfigError
from dilabench.patterns.registry import known_kinds, pattern_type
from dilabench.plugins.descriptors import Implementation
from dilabench.record import PlannedCase
from dilabench.request import ALL
from dilabench.suites.planner import Planner
from dilabench.validation import validated
from dilabench.workload.spec import DEFAULT_PATTERN, WorkloadRequest

# Awkward on purpose: no segment, block or rate divides N, and queries are grouped.
SHORT = {"batch_size": 1, "seq_len": 771}
HEADS = {"num_heads": 4, "num_kv_heads": 2}
# Short enough for every row to be compared, awkward in the ways that go wrong.
SHAPE: dict[str, Any] = {"batch_size": 1, "seq_len": 195, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
DTYPES = ("float64", "float32", "float16", "bfloat16")


def verified_cases(planner: Planner) -> tuple[PlannedCase, ...]:
    """Every implementation on the requested workload, with gradients; unsupported ones are skipped with the reason.

    Without a preset or pattern, each runs the trial of a pattern that it computes, with and without a causal mask. With
    one, each runs the workload of `run`, at a short length if none is given.
    """
    request, implementations = planner.request, planner.implementations([ALL])
    planned: tuple[PlannedCase, ...] = ()
    if request.names_pattern:
        for asked in planner.workload_requests([SHORT]):
            for implementation in implementations:
                planned += planner.plan(implementation, _both_ways(asked))
    else:
        by_kind: dict[str, list[Implementation]] = {}
        for implementation in implementations:
            by_kind.setdefault(_first_kind(implementation), []).append(implementation)
        # A given number of heads might not fit the trial's number of key/value heads.
        heads = {} if HEADS.keys() & request.overrides.keys() else HEADS
        for kind, several in by_kind.items():
            (fields, *_) = pattern_type(kind).trials().values()
            defaults = [{"pattern": kind, **SHORT, **heads, **fields, "causal": causal} for causal in (True, False)]
            planned += planner.compare([_both_ways(asked) for asked in planner.workload_requests(defaults)], several)
    places = {place: index for index, place in enumerate(dict.fromkeys(map(_heading, planned)))}
    return tuple(sorted(planned, key=lambda case: places[_heading(case)]))


def _first_kind(implementation: Implementation) -> str:
    """The kind of pattern on which it is checked. Dense-only implementations run the default's shape undilated."""
    supports = implementation.supports
    if supports.only_dense:
        return DEFAULT_PATTERN
    return next((kind for kind in (DEFAULT_PATTERN, *known_kinds()) if supports.computes(kind)), DEFAULT_PATTERN)


def _both_ways(asked: WorkloadRequest) -> WorkloadRequest:
    """Set mode both, so that gradients are checked, unless the user chose a mode."""
    return asked if "mode" in asked.model_fields_set else asked.model_copy(update={"mode": "both"})


def _heading(case: PlannedCase) -> tuple[str, ...]:
    """The cells that the cases of one workload share."""
    workload = case.case.workload
    return workload.label(), workload.pattern.label(), workload.mode


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
    """The cases, grouped by line. The user's options narrow the table.

    Raises ConfigError if presets or fields of a family are given, because the table covers all families.
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
        case for case in planned if case.skip and asked.mode == "both" and _only_backward_is_missing(planner, case)
    ]
    if forward_only:
        planned = tuple(
            planner_case
            for case in planned
            for planner_case in (_forward(planner, implementation, asked, case) if case in forward_only else (case,))
        )
    return [Trial(family=family, planned=case) for case in planned]


def _only_backward_is_missing(planner: Planner, case: PlannedCase) -> bool:
    forward = case.case.model_copy(update={"workload": case.case.workload.replace(mode="forward")})
    return not planner.catalogue.reasons_against(forward, planner.machine)


def _forward(
    planner: Planner, implementation: Implementation, asked: WorkloadRequest, case: PlannedCase
) -> Sequence[PlannedCase]:
    """The same case without gradients, for an implementation with a forward pass only."""
    planned = planner.plan(implementation, asked.model_copy(update={"mode": "forward"}))
    return [other for other in planned if other.case.backend == case.case.backend]
