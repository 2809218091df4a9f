"""Carrying a planned run out: folder, header, runner, reports, verdict."""

import secrets
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from dilabench.atomic_file import write_text
from dilabench.choice.descriptors import load_target
from dilabench.cli.compare.noise import busy
from dilabench.cli.github import append_summary
from dilabench.cli.plugins import tell_of
from dilabench.cli.reading import read
from dilabench.cli.run.progress_bar import progress_shown
from dilabench.cli.run.way_on import way_on, without_time
from dilabench.cli.terminal import note, say
from dilabench.compare.comparison import is_wrong
from dilabench.engine.device.environment import snapshot
from dilabench.engine.runner import FollowUp
from dilabench.engine.runner import run as run_cases
from dilabench.engine.worker.launcher import Launcher
from dilabench.errors import DilabenchError, ExitCode, counted
from dilabench.machine import Machine
from dilabench.metadata import note_text
from dilabench.plugins.boundary import answered
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.descriptors import Reporter
from dilabench.plugins.manager import Found
from dilabench.predict.time import expected_time, slow_dtypes
from dilabench.record import Failed, PlannedCase, Row, RunHeader, RunRecord
from dilabench.report.findings import render, sections_of
from dilabench.report.pull_request import of_run
from dilabench.request import RunRequest
from dilabench.store.archive import Archive
from dilabench.store.run_files import RECORD_NAME, RunFolder
from dilabench.suites.planner import Planner, more_cases_of
from dilabench.version import __version__

ALWAYS_WRITTEN = ("json", "plots", "markdown", "html")
TABLE = "table"


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """A run that is about to start: what to measure, where to write, what to print."""

    found: Found
    machine: Machine
    request: RunRequest
    planned: tuple[PlannedCase, ...]
    header: RunHeader
    folder: RunFolder
    formats: tuple[Reporter, ...]
    completed: tuple[Row, ...] = ()
    keep: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    launcher: Launcher | None = None
    github_summary: bool = False

    def run(self) -> ExitCode:
        """Measure, report, and say how it ended."""
        known = len(self.found.problems)
        try:
            self._say(self._opening())
            if slow := slow_dtypes([one.case for one in self.planned if one.skip is None], self.machine):
                note(f"{slow}; --dtype float32 is faster there")
            for one in busy(read(self.machine)):
                note(f"{note_text(one)} (`dilabench doctor` says more)")
            record = self._measure()
        finally:
            self.folder.discard_if_empty()
        if self.folder.path.exists():
            self._store(record)
            self._report(record)
        code = exit_code(record)
        broken = self.found.problems[known:]
        tell_of(broken)
        if broken and code is ExitCode.OK:
            code = ExitCode.ENVIRONMENT
        follow_up = self.found.catalogue.suites.get(self.request.suite).follow_up
        if hint := way_on(record, self.machine, self.folder.path, more_follow=follow_up is not None):
            self._say(hint)
        self._say(verdict(record, code))
        return code

    def _measure(self) -> RunRecord:
        catalogue = self.found.catalogue
        self.folder.keep_masks(plan.case.workload for plan in self.planned if plan.skip is None)
        with progress_shown(self.request.budget_s) as progress:
            record = run_cases(
                self.planned,
                self.request,
                catalogue,
                self.machine,
                self.header,
                self.folder,
                progress=progress,
                follow_up=_follow_up(catalogue, self.machine, self.request),
                completed=self.completed,
                trace_folder=self.folder.path / "traces",
                launcher=self.launcher,
            )
        suite = catalogue.suites.get(self.request.suite)
        if suite.projections is not None:
            plugin, what = catalogue.suites.origin(suite.name), f"projections of suite {suite.name!r}"
            with catalogue.left_out(plugin, what):
                found = answered(plugin, what, load_target(suite.projections), record, kind=(list, tuple))
                record = RunRecord.model_validate({**record.model_dump(), "projections": found})
        return record

    def _report(self, record: RunRecord) -> None:
        """Write what a run always leaves and what was asked for; print what was asked for."""
        always = [self.found.catalogue.reporters.get(name) for name in ALWAYS_WRITTEN]
        written = [one for one in dict.fromkeys([*always, *self.formats]) if one.filename]
        catalogue = self.found.catalogue
        sections = sections_of(record, catalogue)
        for reporter in written:
            with catalogue.left_out(catalogue.reporters.origin(reporter.name), ""):
                render(reporter, record, self.folder.path, sections, catalogue, self.options)
        for reporter in self.formats:
            text = None
            with catalogue.left_out(catalogue.reporters.origin(reporter.name), ""):
                if reporter.prints:
                    text = render(reporter, record, None, sections, catalogue, self.options)
            if text is not None:
                say(text, styled=True)
        if self.github_summary:
            append_summary(of_run(record, sections))
        paths = [self.folder.path / str(one.filename) for one in written]
        self._say("\n" + "\n".join(str(path) for path in paths if path.exists()))

    def _store(self, record: RunRecord) -> None:
        """Keep the record for `history` and baselines. The run's own folder has it, so errors are only printed."""
        if not self.keep or not any(row.outcome.status == "measured" for row in record.rows):
            return
        try:
            Archive().add(record)
        except DilabenchError as error:
            self._say(f"not kept in the store: {error}")

    def _opening(self) -> str:
        runs = sum(plan.skip is None for plan in self.planned)
        kept = f", {len(self.completed)} of them kept from before" if self.completed else ""
        gpus = self.machine.used_gpus
        where = gpus[0].name if gpus else self.header.environment.cpu.model
        done = {row.case.case_id for row in self.completed}
        waiting = [one.case for one in self.planned if one.skip is None and one.case.case_id not in done]
        time = expected_time(waiting, self.machine, self.header.environment.cpu.cores, self.request.budget_s)
        cases = f"{counted(runs, 'case')}{kept}"
        opening = f"dilabench {self.request.suite} on {self.machine.device} ({where}): {cases}; {time}"
        return "\n".join(filter(None, (opening, self.machine.facts.warning)))

    def _say(self, text: str) -> None:
        """Print a message: to stderr when stdout carries another format than the table."""
        say(text, err=[one.name for one in self.formats] != [TABLE])


def ready_to_draw() -> None:
    """Load what draws the plots, which takes a while: before the run there is time, for workers load even more."""
    for kind in ("bars", "curves"):
        import_module(f"dilabench.report.plots.{kind}")


def new_header(found: Found, machine: Machine, request: RunRequest) -> RunHeader:
    """The header of a run that starts now."""
    return RunHeader(
        tool_version=__version__,
        run_id=secrets.token_hex(4),
        suite=request.suite,
        argv=tuple(sys.argv[1:]),
        config=request.model_dump(mode="json"),
        seed=request.seed,
        device=machine.device,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=snapshot(machine),
        plugins=tuple(found.plugins),
    )


def _follow_up(catalogue: Catalogue, machine: Machine, request: RunRequest) -> FollowUp | None:
    suite = catalogue.suites.get(request.suite)
    if suite.follow_up is None:
        return None

    def follow_up(rows: Sequence[Row]) -> Sequence[PlannedCase]:
        with catalogue.left_out(catalogue.suites.origin(suite.name), ""):
            return more_cases_of(suite, Planner(catalogue, machine, request), rows)
        return ()

    return follow_up


def exit_code(record: RunRecord) -> ExitCode:
    """How a run ended, as an exit code: interrupted, wrong output, a failed case, nothing measured, or fine."""
    if record.status == "interrupted":
        return ExitCode.INTERRUPTED
    if any(is_wrong(row) for row in record.rows):
        return ExitCode.WRONG_OUTPUT
    if any(isinstance(row.outcome, Failed) for row in record.rows):
        return ExitCode.CASE_FAILED
    if not any(row.outcome.status == "measured" for row in record.rows):
        return ExitCode.NOTHING_MEASURED
    return ExitCode.OK


VERDICTS = {
    ExitCode.OK: "ok",
    ExitCode.ENVIRONMENT: "A PLUG-IN FAILED",
    ExitCode.CASE_FAILED: "SOME CASE FAILED",
    ExitCode.WRONG_OUTPUT: "WRONG OUTPUT",
    ExitCode.NOTHING_MEASURED: "NOTHING MEASURED",
    ExitCode.INTERRUPTED: "INTERRUPTED, results so far are saved",
}


def verdict(record: RunRecord, code: ExitCode) -> str:
    """The line that a CI log ends with."""
    counts = Counter(row.outcome.status for row in record.rows)
    word = "incomplete" if code is ExitCode.OK and without_time(record) else VERDICTS[code]
    ended = ", ".join(f"{counts[status]} {status}" for status in ("measured", "skipped", "failed"))
    return f"verdict: {word} ({ended}; exit code {code.value})"


def copy_record(folder: RunFolder, output: Path) -> None:
    """Where `-o` named a .json file, put the record there as well."""
    record = folder.path / RECORD_NAME
    if output.suffix == ".json" and record.exists():
        write_text(output, record.read_text(encoding="utf-8"))
