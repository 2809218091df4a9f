"""All checks of one component of any kind: its package, then its behaviour."""

import random
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dilabench.choice.descriptors import wrong_device
from dilabench.choice.ways import Registry
from dilabench.conformance.backend import check_backend
from dilabench.conformance.fresh_import import ImportReport, import_reports
from dilabench.conformance.implementation import check_implementation
from dilabench.conformance.pattern import check_pattern
from dilabench.conformance.scorecard import Findings, Listener, Scorecard
from dilabench.engine.device.environment import snapshot
from dilabench.engine.runner import run
from dilabench.machine import Machine
from dilabench.metadata import note_text
from dilabench.patterns.dense import DENSE
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.descriptors import Backend, Implementation, Named, Reporter, Suite, Timer, WorkloadPreset
from dilabench.plugins.manager import REGISTRIES, Found
from dilabench.record import (
    Check,
    Failed,
    Measured,
    Memory,
    Outcome,
    PlannedCase,
    Row,
    RunHeader,
    RunRecord,
    Skipped,
    Slot,
    Timing,
    Verification,
)
from dilabench.report.findings import render, sections_of
from dilabench.request import RunRequest, run_request
from dilabench.retired import ANY_KIND, no_such_name
from dilabench.stats.samples.location import locate
from dilabench.suites.planner import Planner, expand, more_cases_of, preset_names, workload_request
from dilabench.units import counted, format_seconds
from dilabench.validation import targets_of
from dilabench.version import __version__
from dilabench.workload.spec import attended_pairs


def registries_with(name: str, catalogue: Catalogue, kind: str | None = None) -> list[str]:
    """Return the registries that have a name; only the one of `kind`, if given.

    Raises ConfigError with the nearest names when there is none.
    """
    asked = [
        registry_name for registry_name in REGISTRIES if kind is None or getattr(catalogue, registry_name).kind == kind
    ]
    holding = [registry for registry in asked if name in getattr(catalogue, registry)]
    if not holding:
        known = {name_ for registry_name in asked for name_ in getattr(catalogue, registry_name).names}
        left_out = [problem.plugin for problem in catalogue.problems]
        raise no_such_name(kind or ANY_KIND, name, known, left_out=left_out)
    return holding


def scorecard(
    registry_name: str, name: str, found: Found, machine: Machine, listener: Listener | None = None
) -> Scorecard:
    """Run all checks; `listener` is called with each finding. Takes from seconds to minutes."""
    registry: Registry[Any] = getattr(found.catalogue, registry_name)
    descriptor, plugin = registry.get(name), registry.origin(name)
    package, behaviour = Findings(listener), Findings(listener)
    check_package(descriptor, plugin, found, package)
    with behaviour.tried(registry.kind):
        CHECKS[registry_name](descriptor, found.catalogue, machine, behaviour)
    return Scorecard(
        name=descriptor.name,
        kind=registry.kind,
        plugin=plugin,
        version=__version__,
        device=machine.device,
        package=tuple(package),
        behaviour=tuple(behaviour),
    )


# Kinds whose targets run in workers and may load torch; targets of all other kinds run where records are shown.
IN_WORKERS = (Implementation, Backend, Timer)
# Modules that the main process imports, even if such a target names them.
LIGHT_FIELDS = frozenset({"sharding"})


def check_package(descriptor: Named, plugin: str, found: Found, findings: Findings) -> None:
    """Check registration, and what the imports load, connect to and change."""
    problems = [problem.why for problem in found.problems if problem.plugin == plugin]
    findings.hold("registration", "; ".join(problems) or None, f"by plug-in {plugin!r}")
    light, heavy = _modules(descriptor, found.modules[plugin])
    reports = import_reports(light, heavy)
    broken = "; ".join(f"{report.module}: {report.error}" for report in reports if report.error)
    spent = sum(report.lasted_ns for report in reports if report.module in light)
    loading = _problems((report for report in reports if report.module in light), "heavy")
    rule = f"{loading}; import it inside of the functions that need it, or `dilabench list` waits for it"
    lasted = f"{', '.join(light)} in {format_seconds(spent * 1e-9)}, nothing heavy"
    findings.hold("import", broken or (rule if loading else None), lasted)
    findings.hold("no network", _problems(reports, "network"), "no address was resolved or contacted at import")
    effects = _problems(reports, "effects")
    right = "no file, process, thread or setting at import"
    findings.hold("no side effects", effects, right)


def _modules(descriptor: Named, module: str) -> tuple[list[str], list[str]]:
    """Return the modules that must not load torch, the one of the hooks first, and those that may."""
    light, heavy = {module: None}, dict[str, None]()
    for name, target in targets_of(descriptor).items():
        if target is not None:
            (heavy if isinstance(descriptor, IN_WORKERS) and name not in LIGHT_FIELDS else light)[
                target.partition(":")[0]
            ] = None
    return list(light), [name for name in heavy if name not in light]


def _problems(reports: Iterable[ImportReport], what: str) -> str | None:
    problems = [
        f"importing {report.module}: {', '.join(getattr(report, what))}" for report in reports if getattr(report, what)
    ]
    return "; ".join(problems) or None


def check_workload(preset: WorkloadPreset, catalogue: Catalogue, machine: Machine, findings: Findings) -> None:
    """Check that each of its workloads resolves, is not empty, and has a registered implementation."""
    for name in preset_names(catalogue, [preset.name]):
        with findings.tried(name):
            workload = workload_request(catalogue, name, {}).resolve(machine.auto_dtype, machine.auto_tokens)
            device = machine.device
            able = [
                implementation
                for implementation in catalogue.implementations
                if not catalogue.unsupported(implementation, workload, device)
            ]
            problem = None if able else "no registered implementation computes it here"
            if not attended_pairs(workload):
                problem = "no query sees any key"
            findings.hold(name, problem, f"{workload.label()}, computed by {counted(len(able), 'implementation')}")


def check_suite(suite: Suite, catalogue: Catalogue, machine: Machine, findings: Findings) -> None:
    """Check its plan on this machine, and its follow-up and analysis of synthetic records; nothing is measured."""
    request = run_request(catalogue, suite=suite.name, run={"device": machine.device})
    planned = expand(catalogue, machine, request)
    runs = sum(case.skip is None for case in planned)
    summary = f"{counted(len(planned), 'case')}, of which {runs} run here"
    findings.hold("plan", None if planned else "it plans no case for a request without options", summary)
    again = expand(catalogue, machine, request)
    same = [case.case.case_id for case in planned] == [case.case.case_id for case in again]
    findings.hold("determinism", None if same else "the same request gives other cases the second time")
    odd = odd_outcomes()
    records = {
        "measured": made_record(planned, request, machine),
        "with failures": made_record(planned, request, machine, odd[: len(planned)]),
        "nothing measured": made_record(planned[: len(odd)], request, machine, odd[: len(planned)]),
    }
    for name, record in records.items():
        with findings.tried(f"analysis, {name}"):
            _check_analysis(name, record, catalogue, findings)
    if suite.follow_up is not None:
        with findings.tried("follow-up"):
            more = more_cases_of(suite, Planner(catalogue, machine, request), records["measured"].rows)
            findings.hold("follow-up", None, f"asks for {counted(len(more), 'more case')}")


def _check_analysis(name: str, record: RunRecord, catalogue: Catalogue, findings: Findings) -> None:
    """Check the analysis; its exception appears among the catalogue's problems instead of being raised."""
    known = len(catalogue.problems)
    sections = sections_of(record, catalogue)
    problems = "; ".join(problem.why for problem in catalogue.problems[known:])
    del catalogue.problems[known:]
    if not problems and sections != sections_of(record, catalogue):
        problems = "the same record has other sections the second time"
    findings.hold(f"analysis, {name}", problems or None, counted(len(sections), "section"))


def check_reporter(reporter: Reporter, catalogue: Catalogue, machine: Machine, findings: Findings) -> None:
    """Check printing and writing of synthetic records of the first suite, twice, for equal text."""
    first = max(catalogue.suites, key=lambda suite: suite.priority)
    request = run_request(catalogue, suite=first.name, run={"device": machine.device})
    planned, odd = expand(catalogue, machine, request), odd_outcomes()
    records = {
        "all measured": made_record(planned, request, machine),
        "with failures": made_record(planned, request, machine, odd),
        "nothing measured": made_record(planned[: len(odd)], request, machine, odd),
        "no row": made_record((), request, machine).model_copy(update={"status": "interrupted"}),
    }
    for name, record in records.items():
        with findings.tried(name):
            findings.hold(name, *_rendered(reporter, record, catalogue))


def _rendered(reporter: Reporter, record: RunRecord, catalogue: Catalogue) -> tuple[str | None, str]:
    """Return the problem of the rendering, or None; and a summary of its output."""
    sections = sections_of(record, catalogue)
    # A record without times may give an empty plot or table.
    measured = any(row.outcome.status == "measured" for row in record.rows)
    with tempfile.TemporaryDirectory() as name:
        folder, rendered = Path(name), []
        if reporter.prints:
            texts = ["".join(render(reporter, record, None, sections, catalogue) or ()) for _ in range(2)]
            if not texts[0] and measured:
                return "it prints nothing", ""
            if texts[0] != texts[1]:
                return "the same record gives another text the second time", ""
            rendered.append(counted(len(texts[0].splitlines()), "line"))
        if reporter.filename:
            render(reporter, record, folder, sections, catalogue)
            path = folder / reporter.filename
            if measured and not path.exists():
                return f"it did not write {reporter.filename!r} into the folder it was given", ""
            rendered.append(counted(sum(1 for path in folder.rglob("*") if path.is_file()), "file"))
        return None, ", ".join(rendered)


TIMED_SHAPE = {"pattern": DENSE.kind, "batch_size": 1, "num_heads": 4, "head_dim": 64}
# The work differs by more than a thousand times, which every timer must show.
TIMED_LENGTHS = (64, 2048)
TIMED_SAMPLES = 5


class _Nowhere:
    """A sink that discards rows; the record has them."""

    def start(self, header: RunHeader) -> None: ...
    def row(self, row: Row) -> None: ...
    def finish(self, record: RunRecord) -> None: ...


def check_timer(timer: Timer, catalogue: Catalogue, machine: Machine, findings: Findings) -> None:
    """Measure a dense case at two lengths, like `dilabench run --timing NAME`."""
    if lacking := wrong_device(timer.devices, machine):
        findings.add("samples", "skipped", "; ".join(lacking))
        return
    # No budget: on a busy machine the suite's budget may end before a timer that starts processes.
    settings = {"timing": timer.name, "timing_runs": TIMED_SAMPLES, "device": machine.device, "budget_s": None}
    suite = max(catalogue.suites, key=lambda other_suite: other_suite.priority)
    request = run_request(catalogue, suite=suite.name, run=settings)
    planner = Planner(catalogue, machine, request)
    plain = next(
        implementation
        for implementation in catalogue.implementations
        if implementation.uses_backend and implementation.supports.only_dense
    )
    requests = planner.workload_requests([{**TIMED_SHAPE, "seq_len": length} for length in TIMED_LENGTHS])
    planned = planner.compare(requests, [plain])
    header = RunHeader(
        tool_version="0", run_id="conformance", suite=suite.name, started_at="", environment=snapshot(machine)
    )
    rows = run(planned, request, catalogue, machine, header, _Nowhere()).rows
    medians = []
    for length, row in zip(TIMED_LENGTHS, rows, strict=True):
        outcome, name = row.outcome, f"samples at {length} tokens"
        if not isinstance(outcome, Measured):
            findings.add(name, "failed", outcome.why)
            continue
        timing = outcome.timings[0]
        samples = timing.samples_ns
        medians.append(locate(samples).median_ns)
        other = f"the samples are by {timing.timer!r}: {'; '.join(map(note_text, outcome.notes))}"
        summary = f"{counted(len(samples), 'sample')}, median {format_seconds(medians[-1] * 1e-9)}"
        findings.hold(name, None if timing.timer == timer.name else other, summary)
    if len(medians) == len(TIMED_LENGTHS):
        findings.hold("longer work takes longer", None if medians[0] < medians[1] else "it does not")


# The check of the behaviour of each kind of component: `check(descriptor, catalogue, machine, findings)`.
CHECKS: Mapping[str, Callable[[Any, Catalogue, Machine, Findings], None]] = {
    "patterns": check_pattern,
    "implementations": check_implementation,
    "backends": check_backend,
    "workloads": check_workload,
    "suites": check_suite,
    "reporters": check_reporter,
    "timers": check_timer,
}


ROUNDS, SAMPLES = 8, 3


def made_record(
    planned: Sequence[PlannedCase], request: RunRequest, machine: Machine, others: Sequence[Outcome] = ()
) -> RunRecord:
    """Return a record of the planned cases, measured unless skipped; the first rows have the outcomes `others`.

    Its samples are random, not measured: such a record only tests code and is never shown or stored.
    """
    outcomes = [*others, *(case.skip or _measured(case) for case in planned[len(others) :])]
    return RunRecord(
        tool_version="0",
        run_id="conformance",
        suite=request.suite,
        config=request.model_dump(mode="json"),
        device=machine.device,
        started_at="2000-01-01T00:00:00+00:00",
        environment=snapshot(machine),
        rows=tuple(Row(planned=case, outcome=outcome) for case, outcome in zip(planned, outcomes, strict=False)),
    )


def odd_outcomes() -> tuple[Outcome, ...]:
    """Outcomes without a time, with texts that are hard to lay out."""
    long = "a reason " * 60
    wrong = Verification(checks=(Check(name="out", passed=False, error=0.5, tolerance=1e-6),), diagnosis="no window")
    return (
        Failed(stage="verify", code="wrong_output", why="out: error 0.5", verification=wrong),
        Failed(stage="time", code="crash", why=f"{long}<b>|`\u2026 \u0434\u043b\u0438\u043d\u0430"),
        Skipped(code="unsupported", why=long),
    )


def _measured(planned: PlannedCase) -> Measured:
    noise = random.Random(planned.case.case_id)
    median = 1e6 * planned.case.workload.tokens**0.5
    slots = tuple(
        Slot(round=index, samples_ns=tuple(round(median * noise.lognormvariate(0, 0.02)) for _ in range(SAMPLES)))
        for index in range(ROUNDS)
    )
    return Measured(
        verification=Verification(checks=(Check(name="out", passed=True),)),
        timings=(Timing(timer="made-up", proves="nothing", slots=slots),),
        memory=Memory(peak_bytes=2**20, isolated=True, source="allocator"),
    )
