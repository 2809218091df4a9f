"""Check an implementation: verification of odd workloads, grouped by their features."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from dilabench.choice.descriptors import unmet, wrong_device
from dilabench.conformance.odd_workloads import has_empty_rows, odd_last_rows_of, odd_workloads_of
from dilabench.conformance.scorecard import Findings
from dilabench.engine.outcomes import Outcome, Result, measured_memory, mistake_of, outcomes_of, said_of
from dilabench.machine import Machine
from dilabench.patterns.registry import known_kinds, pattern_type
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.descriptors import Implementation
from dilabench.predict.memory import WITHIN, plan_memory, why_no_plan
from dilabench.record import Case, CheckName, Memory, PlannedCase, Skipped, Verification
from dilabench.units import counted, format_bytes
from dilabench.workload.spec import UNBOUNDED, DType, Mode, Workload

# The dtypes by preference: most workloads use the first supported one, two workloads of each pattern the others.
DTYPES: tuple[DType, ...] = ("float32", "bfloat16", "float16", "float64")
RANKS = 2
SEED = 0
MEMORY_LENGTH = 1024


@dataclass(frozen=True, slots=True)
class Aspect:
    """A feature that some cases have."""

    name: str
    has: Callable[[Case], bool]


def check_implementation(
    implementation: Implementation,
    catalogue: Catalogue,
    machine: Machine,
    findings: Findings,
    *,
    kinds: Iterable[str] = (),
    backend: str | None = None,
) -> None:
    """Verify odd workloads of every supported pattern, in every dtype, mode and layout; then its memory.

    `kinds`: only these patterns. `backend`: the dense kernel it is built over; if it needs one and none is named, the
    one that supports most.
    """
    if lacking := unmet(implementation.requires, machine) or wrong_device(implementation.supports.devices, machine):
        findings.add("verification", "skipped", "; ".join(lacking))
        return
    wanted = [kind for kind in kinds or known_kinds() if implementation.supports.computes(kind)]
    # `auto` would take the fastest, which may have limits.
    over = [backend] if backend else implementation.backends or catalogue.preferred_backends(machine)[::-1]
    backends = over if implementation.uses_backend else [None]
    planned = [_planned(case, implementation, backends, catalogue, machine) for case in _cases(implementation, wanted)]
    tried = _verified(planned, list(_aspects(wanted)), catalogue, machine, findings)
    _judge_checks([outcome for _, outcome in tried if isinstance(outcome, Verification)], implementation, findings)
    passed = [case for case, outcome in tried if isinstance(outcome, Verification) and outcome.passed]
    _check_memory(passed, catalogue, machine, findings)


def _verified(
    planned: list[PlannedCase], aspects: list[Aspect], catalogue: Catalogue, machine: Machine, findings: Findings
) -> list[tuple[PlannedCase, Outcome]]:
    """Return every case with its outcome; each aspect is judged as soon as its last case is done."""
    tried: list[tuple[PlannedCase, Outcome]] = []
    named: set[str] = set()
    waiting = {aspect: sum(aspect.has(case.case) for case in planned) for aspect in aspects}
    findings.listener.verified(0, len(planned), "")
    for planned_case, outcome in zip(planned, outcomes_of(planned, catalogue, machine, SEED), strict=True):
        tried.append((planned_case, outcome))
        workload = planned_case.case.workload
        findings.listener.verified(len(tried), len(planned), f"{workload.label()} {workload.pattern.label()}")
        for aspect in [aspect for aspect in waiting if aspect.has(planned_case.case)]:
            waiting[aspect] -= 1
            if not waiting[aspect]:
                _judge(aspect.name, [trial for trial in tried if aspect.has(trial[0].case)], named, findings)
    return tried


def _cases(implementation: Implementation, kinds: Iterable[str]) -> Iterator[Case]:
    """Yield every odd workload in one dtype and mode both; some of them in every dtype and mode, and over ranks."""
    supports = implementation.supports
    base = next((dtype for dtype in DTYPES if dtype in supports.dtypes), DTYPES[0])
    ranks = supports.max_world_size is None or supports.max_world_size >= RANKS
    seen: set[str] = set()
    for kind in kinds:
        odd = [*odd_workloads_of(kind, base), *odd_last_rows_of(kind, base)]
        # A sequence that can be halved, and one whose length is a prime.
        samples = [workload for workload in odd if workload.seq_len in (96, 97) and workload.layout == "padded"][:2]
        varied = [workload.replace(dtype=dtype) for workload in samples for dtype in get_args(DType)]
        varied += [workload.replace(mode=mode) for workload in samples for mode in get_args(Mode)]
        cases = [Case(implementation=implementation.name, workload=workload) for workload in (*odd, *varied)]
        if ranks:
            cases += [case.model_copy(update={"world_size": RANKS}) for case in cases[: len(odd)]]
        for case in cases:
            if case.case_id not in seen:
                seen.add(case.case_id)
                yield case


def _planned(
    case: Case, implementation: Implementation, backends: Sequence[str | None], catalogue: Catalogue, machine: Machine
) -> PlannedCase:
    """Plan the case over the first backend that supports it; in mode forward if only the gradient is unsupported."""
    forward = case.workload.replace(mode="forward")
    trials = [
        case.model_copy(update={"workload": workload, "backend": backend})
        for workload in (case.workload, forward)
        for backend in backends
    ]
    reasons = [catalogue.reasons_against(trial, machine) for trial in trials]
    able = next((trial for trial, against in zip(trials, reasons, strict=True) if not against), None)
    skip = None if able else Skipped(code="unsupported", why="; ".join(reasons[0]))
    return PlannedCase(case=able or case, takes=implementation.takes, skip=skip)


def _aspects(kinds: Iterable[str]) -> Iterator[Aspect]:
    def of(name: str, has: Callable[[Workload], bool]) -> Aspect:
        return Aspect(name, lambda case: has(case.workload))

    for kind in kinds:
        yield of(f"pattern {kind}", lambda workload, kind=kind: workload.pattern.kind == kind)  # type: ignore[misc]
    for dtype in get_args(DType):
        yield of(f"dtype {dtype}", lambda workload, dtype=dtype: workload.dtype == dtype)  # type: ignore[misc]
    for mode in get_args(Mode):
        yield of(f"mode {mode}", lambda workload, mode=mode: workload.mode == mode)  # type: ignore[misc]
    yield of("causal", lambda workload: workload.causal)
    yield of("not causal", lambda workload: not workload.causal)
    yield of("window", lambda workload: workload.window != UNBOUNDED)
    yield of("packed sequences", lambda workload: workload.layout == "packed")
    yield of("fewer key/value heads (GQA)", lambda workload: workload.num_kv_heads < workload.num_heads)
    yield of("an explicit scale", lambda workload: workload.scale is not None)
    yield of("a single token", lambda workload: workload.seq_len == 1)
    yield of("queries that are the last rows of their keys", lambda workload: workload.query_len is not None)
    yield of("rows without a key", has_empty_rows)
    yield of("grouped heads", lambda workload: workload.pattern.has_grouped_heads)
    yield of("detached merge", lambda workload: workload.pattern.is_detached)
    yield of("zero keys", lambda workload: workload.pattern.has_zero_keys)
    yield Aspect(f"{RANKS} ranks", lambda case: case.world_size > 1)


def _judge(name: str, tried: list[tuple[PlannedCase, Outcome]], named: set[str], findings: Findings) -> None:
    """Add one finding for the cases of an aspect: the gravest result, with the first reason for it.

    `named`: mistakes that an earlier finding has shown with a place; they are repeated by name only.
    """
    results = [(case, said_of(outcome)[0], outcome) for case, outcome in tried]
    graves: tuple[Result, ...] = ("wrong", "failed")
    for grave in graves:
        matching = [(case, outcome) for case, result, outcome in results if result == grave]
        if matching:
            case, (mistake, at_length) = matching[0][0].case, mistake_of(matching[0][1])
            where = f"{case.workload.label()} {case.workload.pattern.label()} {case.workload.mode}"
            shown = mistake if mistake in named else f"{at_length}; on {where}"
            named.add(mistake)
            findings.add(name, grave, f"{len(matching)} of {counted(len(tried), 'case')}: {shown}")
            return
    right = sum(result == "right" for _, result, _ in results)
    if right:
        findings.add(name, "right", counted(right, "case"))
    else:
        findings.add(name, "skipped", mistake_of(results[0][2])[0])


def _judge_checks(verifications: list[Verification], implementation: Implementation, findings: Findings) -> None:
    """Add a finding per check of verification (semantics.md §4), by its name."""
    counts = Counter(check.name for verification in verifications for check in verification.checks)
    passed = Counter(check.name for verification in verifications for check in verification.checks if check.passed)
    for name, count in counts.items():
        if passed[name] < count:
            findings.add(f"check {name}", "wrong", f"{passed[name]} of {count} passed")
    if right := [f"{name} {count}" for name, count in counts.items() if passed[name] == count]:
        findings.add("checks passed", "right", ", ".join(right))
    if counts:
        promise = "bitwise, as declared" if implementation.deterministic else "within tolerance (no more is declared)"
        held = passed[CheckName.REPEAT] == counts[CheckName.REPEAT]
        findings.add("determinism", "right" if held else "wrong", f"two identical calls agree {promise}")


def _check_memory(passed: Iterable[PlannedCase], catalogue: Catalogue, machine: Machine, findings: Findings) -> None:
    """Compare the traced peak with the measured one, at a length beyond an allocator's granularity."""
    smallest = next(
        (case for case in passed if case.case.world_size == 1 and case.case.workload.layout == "padded"), None
    )
    if smallest is None:
        findings.add("memory", "skipped", "no case passed that it could be measured on")
        return
    kind = pattern_type(smallest.case.workload.pattern.kind)
    workload = smallest.case.workload.replace(seq_len=MEMORY_LENGTH, pattern=kind.from_request({}))
    case = smallest.case.model_copy(update={"workload": workload})
    if against := catalogue.reasons_against(case, machine):
        findings.add("memory", "skipped", "; ".join(against))
        return
    plan = plan_memory(case, machine.device, catalogue)
    if plan is None:
        findings.add("memory", "skipped", f"no trace: {why_no_plan(case, machine.device, catalogue)}")
        return
    memory = measured_memory(case, catalogue, machine, SEED)
    if not isinstance(memory, Memory):
        findings.add("memory", "failed", memory.why)
        return
    peaks = f"{format_bytes(plan.peak_bytes)} traced, {format_bytes(memory.peak_bytes)} measured on {workload.label()}"
    off = abs(plan.peak_bytes / memory.peak_bytes - 1) > WITHIN
    hint = "; tables belong into context.patterns, and a custom operator needs a fake form that allocates alike"
    findings.hold("memory", peaks + hint if off else None, peaks)
