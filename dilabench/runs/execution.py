"""From a plan to its record: header, folder, measuring, reports, exit code."""

import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilabench.atomic_file import write_text
from dilabench.choice.descriptors import load_target
from dilabench.comparison.comparison import is_wrong
from dilabench.comparison.view import lengths_without_rows
from dilabench.engine.device.environment import snapshot
from dilabench.engine.progress import Progress
from dilabench.engine.runner import FollowUp, Project
from dilabench.engine.runner import run as run_cases
from dilabench.errors import (
    DilabenchError,
    EnvironmentNotReady,
    ExitCode,
    NothingToMeasure,
    PluginError,
    encodable,
    exit_code_for,
    listed,
)
from dilabench.machine import Machine
from dilabench.patterns.mask_files import with_kept_files
from dilabench.plugins.boundary import answered
from dilabench.plugins.catalogue import OWN, Catalogue
from dilabench.plugins.descriptors import Reporter
from dilabench.plugins.manager import Found
from dilabench.record import Failed, PlannedCase, Row, RunHeader, RunRecord
from dilabench.report.findings import Section, render, sections_of
from dilabench.request import RunRequest
from dilabench.runs.resume import resumed_header
from dilabench.store.archive import Archive
from dilabench.store.index import store_run
from dilabench.store.run_files import RECORD_NAME, RunFolder, completed_rows, read_record
from dilabench.suites.planner import Planner, RunPlan, more_cases_of
from dilabench.units import counted
from dilabench.version import __version__

if TYPE_CHECKING:
    from dilabench.engine.worker.nodes import Nodes

# In addition to the record, which the folder itself writes.
ALWAYS_WRITTEN = ("plots", "markdown", "html")
# More reasons why nothing can run are counted.
MOST_REASONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """A run that is about to start: what to measure, where to write. `completed`: rows that are kept from before.

    `nodes`: where ranks run that torchrun has started.
    """

    plan: RunPlan
    header: RunHeader
    folder: RunFolder
    completed: tuple[Row, ...] = ()
    nodes: "Nodes | None" = None

    @classmethod
    def begin(
        cls,
        plan: RunPlan,
        output: Path,
        nodes: "Nodes | None" = None,
        argv: Sequence[str] | None = None,
        name: str = "",
    ) -> "Execution":
        """A new run, in a new folder under `output`, named after its suite or `name`.

        argv: the command line of the same request, sys.argv by default. Raises NothingToMeasure if no case can run.
        """
        refuse_idle_run(plan.planned, plan.planner())
        header = new_header(plan.found, plan.machine, plan.request, argv)
        folder = RunFolder.create(output, name or plan.request.suite, header.run_id)
        return cls(plan=plan, header=header, folder=folder, nodes=nodes)

    @classmethod
    def resume(
        cls,
        plan: RunPlan,
        run: Path,
        earlier: RunHeader,
        tell: Callable[[str], None],
        nodes: "Nodes | None" = None,
    ) -> "Execution":
        """A run that continues in its folder. Raises ConfigError if it was measured on another machine."""
        header = new_header(plan.found, plan.machine, plan.request)
        folder = RunFolder.resume(run, tell)
        rows = completed_rows(run, header)
        header = resumed_header(earlier, header, plan.machine)
        return cls(plan=plan, header=header, folder=folder, completed=rows, nodes=nodes)

    def measure(self, progress: AbstractContextManager[Progress]) -> RunRecord:
        """Measure what is planned; the folder then holds the record, or is gone where no row has ended."""
        plan = self.plan
        try:
            self.folder.keep_masks(case.case.workload for case in plan.planned if case.skip is None)
            with progress as shown:
                return run_cases(
                    plan.planned,
                    plan.request,
                    plan.catalogue,
                    plan.machine,
                    self.header,
                    self.folder,
                    progress=shown,
                    follow_up=_follow_up(plan),
                    completed=self.completed,
                    method=plan.method,
                    project=_project(plan),
                    trace_folder=self.folder.path / "traces",
                    launcher=self.nodes,
                )
        finally:
            self.folder.discard_if_empty()

    def keep(self, record: RunRecord, tell: Callable[[str], None]) -> None:
        """Keep the record for `history` and baselines. The run's own folder has it, so errors are only printed."""
        if not any(row.outcome.status == "measured" for row in record.rows):
            return
        try:
            store_run(Archive(), record)
        except DilabenchError as error:
            tell(f"not kept in the store: {error}")

    def recorded(self) -> RunRecord | None:
        """The record as it is on disk; None if there is none."""
        path = self.folder.path / RECORD_NAME
        return read_record(path) if path.exists() else None

    def copy_record(self, path: Path) -> None:
        """Write the record to this file, too."""
        record = self.folder.path / RECORD_NAME
        if record.exists():
            write_text(path, record.read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Reports:
    """The reports on a record, by what its suite says and with options of the command line."""

    record: RunRecord
    catalogue: Catalogue
    sections: Sequence[Section]
    options: Mapping[str, Any]

    @classmethod
    def of(cls, record: RunRecord, catalogue: Catalogue, options: Mapping[str, Any]) -> "Reports":
        """With the sections of the record's suite."""
        return cls(record, catalogue, sections_of(record, catalogue), options)

    def written(self, formats: Sequence[Reporter], folder: Path) -> tuple[list[Path], EnvironmentNotReady | None]:
        """Write what a run always leaves, and formats that have a file.

        Returns the files that are there, the record first, and why one could not be written (the disk is full, say).
        """
        always = [self.catalogue.reporters.get(name) for name in ALWAYS_WRITTEN]
        names, refusal = [RECORD_NAME], None
        for reporter in dict.fromkeys([*always, *formats]):
            if reporter.filename and reporter.filename != RECORD_NAME:
                names.append(reporter.filename)
                try:
                    self._rendered(reporter, folder)
                except EnvironmentNotReady as error:
                    refusal = refusal or error
        return [path for path in (folder / name for name in names) if path.exists()], refusal

    def printed(self, formats: Sequence[Reporter]) -> Iterator[str | Iterator[str]]:
        """The texts of the formats that are printed, each whole or in parts."""
        texts = (self._rendered(reporter, None) for reporter in formats if reporter.prints)
        return (text for text in texts if text is not None)

    def _rendered(self, reporter: Reporter, folder: Path | None) -> str | Iterator[str] | None:
        plugin = self.catalogue.reporters.origin(reporter.name)
        path = folder / RECORD_NAME if folder is not None and plugin not in OWN else None
        before = path.read_bytes() if path is not None and path.exists() else None
        text: str | Iterator[str] | None = None
        with self.catalogue.left_out(plugin, ""):
            text = render(reporter, self.record, folder, self.sections, self.catalogue, self.options)
        if path is not None and before is not None and (not path.is_file() or path.read_bytes() != before):
            write_text(path, before.decode())
            why = f"reporter {reporter.name!r} changed {RECORD_NAME}, which was put back"
            self.catalogue.blame(PluginError(why, plugin))
        return text


def refuse_idle_run(planned: Sequence[PlannedCase], planner: Planner) -> None:
    """Raise NothingToMeasure if every planned case has a reason against it. A shard may be empty: others measure."""
    reasons: dict[str, list[str]] = {}
    for case in planned:
        if case.skip is None:
            return
        for why in case.skip.why.split("; "):
            names = reasons.setdefault(why, [])
            if case.case.implementation not in names:
                names.append(case.case.implementation)
    if reasons and not planner.request.shard:
        alike: dict[tuple[str, ...], list[str]] = {}
        for why, names in reasons.items():
            alike.setdefault(tuple(names), []).append(why)
        needs = [f"{listed(list(names), 'and')}: {'; '.join(whys)}" for names, whys in alike.items()]
        more = f"; and {counted(len(needs) - MOST_REASONS, 'other reason')}" if needs[MOST_REASONS:] else ""
        none = "the only row cannot" if len(planned) == 1 else f"none of the {len(planned)} rows can"
        raise NothingToMeasure(
            f"{none} run on this {planner.machine.device}: {'; '.join(needs[:MOST_REASONS])}{more}; "
            f"{_what_runs(planned, planner)}"
        )


def _what_runs(planned: Sequence[PlannedCase], planner: Planner) -> str:
    """The way out: where the needs are listed, and which implementations would run the same workloads here."""
    workloads = list(dict.fromkeys(filter(None, (case.requested_workload for case in planned))))
    names = planner.on_one_device(*dict.fromkeys(workload.pattern for workload in workloads))
    able = [
        implementation.name
        for implementation in map(planner.catalogue.implementations.get, names)
        if any(case.skip is None for workload in workloads for case in planner.plan(implementation, workload))
    ]
    runs = f"; -i {','.join(able)} would run here" if able else ""
    return f"`dilabench list implementations --why` shows what each needs{runs}"


def new_header(found: Found, machine: Machine, request: RunRequest, argv: Sequence[str] | None = None) -> RunHeader:
    """The header of a run that starts now."""
    return RunHeader(
        tool_version=__version__,
        run_id=secrets.token_hex(4),
        suite=request.suite,
        # A path may have bytes that are no text.
        argv=tuple(map(encodable, sys.argv[1:] if argv is None else argv)),
        config=with_kept_files(request.model_dump(mode="json")),
        seed=request.seed,
        device=machine.device,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=snapshot(machine),
        plugins=tuple(found.plugins),
    )


def exit_code(
    record: RunRecord, *, interrupted: bool = False, broken: bool = False, allow_incomplete: bool = False
) -> ExitCode:
    """The exit code of a run. `interrupted`: also after its last row. `broken`: a plug-in failed during the run.

    `allow_incomplete`: a length without a measured row does not count.
    """
    return exit_code_for(
        interrupted=interrupted or record.status == "interrupted",
        wrong=any(is_wrong(row) or row.is_impossible for row in record.rows),
        failed=any(isinstance(row.outcome, Failed) for row in record.rows),
        broken=broken,
        nothing=not any(row.outcome.status == "measured" for row in record.rows),
        incomplete=not allow_incomplete and bool(lengths_without_rows(record)),
    )


def _follow_up(plan: RunPlan) -> FollowUp | None:
    catalogue = plan.catalogue
    suite = catalogue.suites.get(plan.request.suite)
    if suite.follow_up is None:
        return None

    def follow_up(rows: Sequence[Row]) -> Sequence[PlannedCase]:
        plugin = catalogue.suites.origin(suite.name)
        with catalogue.left_out(plugin, ""):
            # A plug-in gets a copy, so it cannot change the run.
            return more_cases_of(suite, plan.planner(), rows if plugin in OWN else deepcopy(rows))
        return ()

    return follow_up


def _project(plan: RunPlan) -> Project | None:
    catalogue = plan.catalogue
    suite = catalogue.suites.get(plan.request.suite)
    if (target := suite.projections) is None:
        return None

    def project(record: RunRecord) -> Sequence[dict[str, Any]]:
        plugin, what = catalogue.suites.origin(suite.name), f"projections of suite {suite.name!r}"
        with catalogue.left_out(plugin, what):
            given = record if plugin in OWN else deepcopy(record)
            found = answered(plugin, what, load_target(target), given, kind=(list, tuple))
            return RunRecord.model_validate({**record.model_dump(), "projections": found}).projections
        return ()

    return project
