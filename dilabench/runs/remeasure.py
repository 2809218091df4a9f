"""Measuring the cases of a record again, now and in fresh sessions."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from dilabench.engine.progress import Progress
from dilabench.engine.runner import run as run_cases
from dilabench.errors import ConfigError, EnvironmentNotReady
from dilabench.machine import Machine, detect
from dilabench.plugins.manager import Found
from dilabench.record import PlannedCase, RunHeader, RunRecord, Skipped
from dilabench.report.content import device_text
from dilabench.request import RunRequest
from dilabench.runs.execution import new_header
from dilabench.store.index import store_run
from dilabench.store.lookup import Store
from dilabench.store.run_files import RunFolder
from dilabench.validation import validated

SUITE = "check"


@dataclass(slots=True)
class Remeasure:
    """Runs the cases of an earlier record: the same request, the same seed and so the same inputs.

    Every session is a separate run in a separate folder, and is stored if `store` is not None. `progress` shows the
    progress of a session. `budget_s`: the time limit of a session, so that a reason for a missing row names the budget
    given now; the record's by default. Raises EnvironmentNotReady if this machine lacks the record's device.
    """

    found: Found
    like: RunRecord
    output: Path
    store: Store | None
    progress: Callable[[], AbstractContextManager[Progress]]
    budget_s: float | None = None
    machine: Machine = field(init=False)
    request: RunRequest = field(init=False)

    def __post_init__(self) -> None:
        device = self.like.device.partition(":")[0]
        try:
            self.machine = detect(device)
        except EnvironmentNotReady:
            raise EnvironmentNotReady(
                f"the baseline is from {device_text(self.like)}, this is a {detect().device.upper()}; measure on that "
                "machine, or make a baseline here (`dilabench run`, then `dilabench baseline save NAME`)"
            ) from None
        limit = {} if self.budget_s is None else {"budget_s": self.budget_s}
        self.request = validated(RunRequest, {**self.like.config, "suite": self.like.suite, **limit})

    def here(self) -> RunRecord:
        """An empty record of this machine, for a look at its fingerprint before anything is measured."""
        return RunRecord.model_validate(self._header().model_dump())

    def sessions(self, planned: Sequence[PlannedCase], count: int) -> list[RunRecord]:
        """Measure the cases in `count` sessions, one after the other. Ctrl-C in one of them ends it all."""
        records: list[RunRecord] = []
        for _ in range(count):
            records.append(self._session(planned))
            if records[-1].status == "interrupted":
                raise KeyboardInterrupt
        return records

    def _session(self, planned: Sequence[PlannedCase]) -> RunRecord:
        header = self._header()
        folder = RunFolder.create(self.output, SUITE, header.run_id)
        current = [case.model_copy(update={"skip": self._skip(case)}) for case in planned]
        try:
            with self.progress() as progress:
                record = run_cases(
                    current, self.request, self.found.catalogue, self.machine, header, folder, progress=progress
                )
        finally:
            folder.discard_if_empty()
        if self.store is not None:
            store_run(self.store.archive, record)
        return record

    def _header(self) -> RunHeader:
        return new_header(self.found, self.machine, self.request)

    def _skip(self, planned: PlannedCase) -> Skipped | None:
        """Why a case cannot run here now: plug-ins and libraries may have been removed since it was recorded."""
        if unknown := planned.case.optimizations.unknown:
            why = (
                f"optimizations that this dilabench does not know: {', '.join(unknown)}; measure with the one that does"
            )
            return Skipped(code="unusable_optimization", why=why)
        try:
            why = "; ".join(self.found.catalogue.reasons_against(planned.case, self.machine))
        except ConfigError as error:
            why = str(error)
        return Skipped(code="unsupported", why=why) if why else None
