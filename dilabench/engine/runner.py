"""From planned cases to a run record. No torch: everything that computes runs in worker processes."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from dilabench.engine.budget import Budget, steady
from dilabench.engine.case_executor import MAX_TIMEOUT_S, CaseExecutor
from dilabench.engine.case_spec import worker_key
from dilabench.engine.device.environment import with_torch
from dilabench.engine.device.lock import device_lock
from dilabench.engine.isolated_run import IsolatedRun
from dilabench.engine.method import Method, method_for
from dilabench.engine.plausibility import suspicions
from dilabench.engine.progress import Progress
from dilabench.engine.temporary_folder import remove_left_over
from dilabench.engine.worker.client import Launcher, ThisMachine, Worker, WorkerFailure, WorkerPool
from dilabench.engine.worker.process import warm_server
from dilabench.engine.worker.protocol import MeasureCeilings, WorkerSettings
from dilabench.engine.workload_group import WorkloadGroupRun
from dilabench.errors import PluginError, heed
from dilabench.machine import Machine
from dilabench.metadata import UNCHECKED, matmul_key
from dilabench.plugins.catalogue import Catalogue
from dilabench.predict.time import case_expected_s
from dilabench.record import Case, Measured, PlannedCase, Row, RunHeader, RunRecord
from dilabench.request import RunRequest

FollowUp = Callable[[Sequence[Row]], Sequence[PlannedCase]]
Project = Callable[[RunRecord], Sequence[dict[str, Any]]]
CEILINGS_TIMEOUT_S = 120.0


class Sink(Protocol):
    """The receiver of finished rows (`dilabench.store.run_files.RunFolder`, for one)."""

    def start(self, header: RunHeader) -> None:
        """Called once, before the first row, with everything that is known about the run."""
        ...

    def row(self, row: Row) -> None:
        """Keep a row; when this returns, the row survives the death of the process."""
        ...

    def finish(self, record: RunRecord) -> None:
        """Called once, at the end, also of an interrupted run."""
        ...


def run(
    planned: Sequence[PlannedCase],
    request: RunRequest,
    catalogue: Catalogue,
    machine: Machine,
    header: RunHeader,
    sink: Sink,
    progress: Progress | None = None,
    follow_up: FollowUp | None = None,
    completed: Sequence[Row] = (),
    *,
    method: Method | None = None,
    project: Project | None = None,
    trace_folder: Path | None = None,
    timeout_s: float = MAX_TIMEOUT_S,
    launcher: Launcher | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> RunRecord:
    """Verify and measure the planned cases; each ends in exactly one row.

    `completed` are rows of an earlier part of the same run (`--resume`): they are kept and their cases not repeated.
    `follow_up` gets all rows when no case is left and may ask for more. With `--timing profiler`, a Chrome trace of
    every case goes to `trace_folder`. A worker that does not answer for `timeout_s` seconds is ended with its case.
    `method`: how each case is timed, by default as the request says. `project` gets the record at its end and gives its
    projections. `launcher`: where ranks run, this machine by default. Ctrl-C ends the run with status 'interrupted' and
    the rows so far.

    Raises ConfigError for an unknown `--timing`, EnvironmentNotReady when the device stays locked.
    """
    method = method or method_for(request, machine.device, catalogue)
    waiting = _waiting(planned, completed)
    executor = CaseExecutor(
        catalogue=catalogue,
        pool=WorkerPool(WorkerSettings(device=machine.device), partial(Worker, launcher=launcher)),
        method=method,
        budget=Budget(request.budget_s, [case.case for case in waiting if case.skip is None], steady(clock)),
        progress=progress or Progress(),
        seed=request.seed,
        trace_folder=trace_folder if method.trace else None,
        timeout_s=timeout_s,
        next_round=1 + max(_rounds_of(completed), default=-1),
        machine=machine,
    )
    ranks = max((case.case.world_size for case in waiting if case.skip is None), default=1)
    gpus = (launcher or ThisMachine()).gpus_here(ranks)
    return _Run(executor, machine, sink, planned, completed).go(header, follow_up, gpus, project)


def _rounds_of(rows: Iterable[Row]) -> Iterator[int]:
    """The numbers of the rounds of an earlier part of the run."""
    for row in rows:
        if isinstance(row.outcome, Measured):
            yield from (slot.round for timing in row.outcome.timings for slot in timing.slots)


def _waiting(planned: Iterable[PlannedCase], done: Iterable[Row]) -> list[PlannedCase]:
    """The planned cases without a row yet, each once."""
    ended = {row.case.case_id for row in done}
    cases = {case.case.case_id: case for case in planned}
    return [case for case_id, case in cases.items() if case_id not in ended]


class _Run:
    """One run: its workers, its rows, and the order in which groups are taken."""

    def __init__(
        self,
        executor: CaseExecutor,
        machine: Machine,
        sink: Sink,
        planned: Sequence[PlannedCase],
        completed: Sequence[Row],
    ) -> None:
        self.executor, self.machine, self.sink = executor, machine, sink
        self.progress = executor.progress
        self.planned = {case.case.case_id: case for case in planned}
        self.rows = {row.case.case_id: row for row in completed}
        self.completed = frozenset(self.rows)
        self.ceilings: dict[str, float] = {}
        self.confirmed = False
        self.began_at, self.began_s = datetime.now(UTC), time.monotonic()

    def go(
        self, header: RunHeader, follow_up: FollowUp | None, gpus: Sequence[int], project: Project | None
    ) -> RunRecord:
        """All groups, then the follow-up's cases, then the record. Workers end last, because one may not respond."""
        try:
            return self._go(header, follow_up, gpus, project)
        finally:
            self.executor.pool.close()

    def _go(
        self, header: RunHeader, follow_up: FollowUp | None, gpus: Sequence[int], project: Project | None
    ) -> RunRecord:
        status, started = "failed", False
        try:
            warm_server()
            with ExitStack() as stack:
                with self._spending("waiting"):
                    stack.enter_context(device_lock(self.machine, header.run_id, self.progress, gpus=gpus))
                # Waiting for another run to release the device does not count against the budget.
                remove_left_over()
                self.executor.budget.start()
                self.progress.device_held()
                self.ceilings = dict(header.ceilings)
                header = self._described(header)
                self.sink.start(header)
                started = True
                self.progress.run_started(self._expected_s())
                self._measure_all(follow_up)
            status = "complete"
        except KeyboardInterrupt as interrupt:
            heed(interrupt)
            status = "interrupted"
        finally:
            # Also after an error: the measured rows are kept.
            header = header.model_copy(update={"ceilings": self.ceilings or header.ceilings})
            try:
                record = self._ended(header, status, started, project)
            except KeyboardInterrupt:
                # Ctrl-C while it was written.
                self._ended(header, status, started)
                raise
        return record

    def _ended(self, header: RunHeader, status: str, started: bool, project: Project | None = None) -> RunRecord:
        record = self._record(header, status)
        if started:
            try:
                if project:
                    record = record.model_copy(update={"projections": tuple(project(record))})
            finally:
                self.sink.finish(record)
        return record

    def _record(self, header: RunHeader, status: str) -> RunRecord:
        # The clock may have been set meanwhile, also since the first part of a run that was resumed.
        finished = self.began_at + timedelta(seconds=time.monotonic() - self.began_s)
        finished_at = max(finished.isoformat(timespec="seconds"), header.started_at)
        rows = tuple(self._in_order())
        return RunRecord.model_validate(
            {
                **header.model_dump(),
                "status": status,
                "finished_at": finished_at,
                "rows": rows,
                "wall_ns": self.executor.wall_ns,
            }
        )

    def _spending(self, stage: str) -> AbstractContextManager[None]:
        return self.executor.spending(self.executor.wall_ns, stage)

    def _measure_all(self, follow_up: FollowUp | None) -> None:
        while True:
            for case in _waiting(self.planned.values(), self.rows.values()):
                if case.skip is not None:
                    self._keep(Row(planned=case, outcome=case.skip))
            groups = [(group, self._interleaved(group)) for group in self._groups()]
            try:
                self._take_least([run for _, run in groups if run is not None])
                for group, interleaved in groups:
                    self._know_peak(group)
                    self.progress.group_started(group[0].case.workload, group)
                    for row in self._rows_of(group, interleaved):
                        self._keep(row)
            except KeyboardInterrupt:
                for row in chain.from_iterable(run.interrupted_rows() for _, run in groups if run is not None):
                    if row.case.case_id not in self.rows:
                        self._keep(row)
                raise
            more = follow_up(tuple(self._in_order())) if follow_up else ()
            fresh = [case for case in more if case.case.case_id not in self.planned]
            if not fresh:
                return
            self.planned |= {case.case.case_id: case for case in fresh}
            self.executor.budget.add([case.case for case in fresh if case.skip is None])
            self.progress.run_started(self._expected_s())

    def _expected_s(self) -> dict[str, float]:
        """The cases that this part of the run measures, with their expected seconds."""
        cores = os.cpu_count() or 1
        return {
            case_id: case_expected_s(planned.case, self.machine, cores)
            for case_id, planned in self.planned.items()
            if planned.skip is None and case_id not in self.completed
        }

    def _interleaved(self, group: Sequence[PlannedCase]) -> WorkloadGroupRun | None:
        """The part of a group that is measured in rounds; None if there is none."""
        interleaved = [case for case in group if case.procedure == "interleaved"]
        return WorkloadGroupRun(self.executor, interleaved) if interleaved else None

    def _take_least(self, groups: Sequence[WorkloadGroupRun]) -> None:
        """Take the least samples of one case of every length before any length gets its best; none without a budget.

        Lengths with a row and a single length need none. These samples may take as much time again as the budget: a
        length without a row costs the user more than the wait.
        """
        lengths: dict[int, list[WorkloadGroupRun]] = {}
        for group in groups:
            lengths.setdefault(group.states[0].case.workload.seq_len, []).append(group)
        if self.executor.budget.total_s is None or len(lengths) < 2:
            return
        known = {row.case.workload.seq_len for row in self.rows.values() if isinstance(row.outcome, Measured)}
        open_lengths = sorted(lengths.keys() - known)
        with self.executor.budget.for_least_rows():
            for place, length in enumerate(open_lengths):
                self.executor.patience_s = self.executor.budget.remaining_s / (len(open_lengths) - place)
                for group in sorted(lengths[length], key=lambda group: group.is_reference):
                    planned = [state.planned for state in group.states]
                    self.progress.group_started(planned[0].case.workload, planned)
                    if group.least():
                        break
        self.executor.patience_s = 0.0

    def _rows_of(self, group: Sequence[PlannedCase], interleaved: WorkloadGroupRun | None) -> Iterator[Row]:
        """First the isolated cases, each in a separate process, then the other cases of the group in rounds."""
        for isolated in [case for case in group if case.procedure == "isolated"]:
            yield IsolatedRun(self.executor, isolated).row()
        if interleaved is not None:
            yield from interleaved.rows()

    def _groups(self) -> list[list[PlannedCase]]:
        """The waiting cases, grouped by workload, in the order planned."""
        groups: dict[str, list[PlannedCase]] = {}
        for case in _waiting(self.planned.values(), self.rows.values()):
            groups.setdefault(case.case.group_id, []).append(case)
        return list(groups.values())

    def _keep(self, row: Row) -> None:
        """Add notes on impossible times, give the row to the sink, then report progress."""
        try:
            notes = suspicions(row, self.ceilings, self.machine.device)
            if notes and self._ceilings_rose(row):
                notes = suspicions(row, self.ceilings, self.machine.device)
        except PluginError as error:
            notes = (UNCHECKED.note(str(error)),)
        if notes and isinstance(row.outcome, Measured):
            outcome = row.outcome.model_copy(update={"notes": (*row.outcome.notes, *notes)})
            row = row.model_copy(update={"outcome": outcome})
        self.rows[row.case.case_id] = row
        self.sink.row(row)
        self.progress.row_done(row)

    def _know_peak(self, group: Sequence[PlannedCase]) -> None:
        """Measure the ceilings of a new dtype, for example of a follow-up or a resumed run.

        If no worker starts, the row of each case says so.
        """
        running = [case.case for case in group if case.skip is None]
        if not running or matmul_key(running[0].workload.dtype) in self.ceilings:
            return
        try:
            worker = self._worker_of(running[0])
            with self._spending("ceilings"):
                self.ceilings = {**_measured_ceilings(worker, [running[0].workload.dtype]), **self.ceilings}
        except WorkerFailure:
            return

    def _ceilings_rose(self, row: Row) -> bool:
        """Measure the ceilings once more before a row is called impossible, in a new process: other programs may have
        lowered them. A confirmed ceiling is not measured again.
        """
        if self.confirmed:
            return False
        key, _, _ = worker_key(row.case, self.executor.catalogue).partition("@")
        try:
            with self._spending("ceilings"), self.executor.pool.fresh(key) as worker:
                again = _measured_ceilings(worker, [row.case.workload.dtype])
        except WorkerFailure:
            return False
        before, self.ceilings = self.ceilings, {**self.ceilings, **_higher(self.ceilings, again)}
        self.confirmed = self.ceilings == before
        return not self.confirmed

    def _worker_of(self, case: Case) -> Worker:
        """The resident worker of a case. Raises WorkerFailure."""
        with self._spending("worker"):
            return self.executor.pool.resident(worker_key(case, self.executor.catalogue))

    def _in_order(self) -> Iterator[Row]:
        """Rows in the order planned; rows of an earlier part that are no longer planned come last."""
        known = [*self.planned, *(case_id for case_id in self.rows if case_id not in self.planned)]
        return (self.rows[case_id] for case_id in known if case_id in self.rows)

    def _described(self, header: RunHeader) -> RunHeader:
        """The header with torch's own facts and the device's ceilings, from the first worker that will be needed."""
        waiting = [case for case in _waiting(self.planned.values(), self.rows.values()) if case.skip is None]
        if not waiting:
            return header
        dtypes = sorted({case.case.workload.dtype for case in waiting})
        try:
            worker = self._worker_of(waiting[0].case)
            environment = with_torch(header.environment, self.machine, worker.hello.torch)
            header = header.model_copy(update={"environment": environment})
            with self._spending("ceilings"):
                self.ceilings = {**self.ceilings, **_measured_ceilings(worker, dtypes)}
        except WorkerFailure:
            # If no worker starts, the row of each case says so.
            return header
        return header.model_copy(update={"ceilings": self.ceilings})


def _measured_ceilings(worker: Worker, dtypes: Sequence[str]) -> Mapping[str, float]:
    """The highest rates of a worker's device in these dtypes. Raises WorkerFailure."""
    return worker.ask(MeasureCeilings(dtypes=tuple(dtypes)), timeout_s=CEILINGS_TIMEOUT_S).ceilings


def _higher(known: Mapping[str, float], again: Mapping[str, float]) -> dict[str, float]:
    """The ceilings that are new or higher than known: a resumed run may know lower ones."""
    return {key: value for key, value in again.items() if value > known.get(key, 0.0)}
