"""The cases of `dilabench plan`, and with `--check` the traced peak of each and the one that the engine measures."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from dilabench.engine.outcomes import memory_in
from dilabench.errors import ExitCode, exit_code_for
from dilabench.patterns.dense import DENSE
from dilabench.predict.memory import WITHIN, plan_memory
from dilabench.record import Failed, Memory, PlannedCase, Skipped
from dilabench.suites.planner import Planner
from dilabench.units import format_bytes
from dilabench.workload.spec import WorkloadRequest

MODES = ("forward", "both")


def planned_for_memory(planner: Planner, batches: Sequence[int], lengths: Sequence[int]) -> tuple[PlannedCase, ...]:
    """Every requested batch size and mode, at these lengths unless the request names others."""
    planned: list[PlannedCase] = []
    for asked in planner.workload_requests([{"seq_len": length} for length in lengths]):
        # The defaults over ranks need traces.
        default = () if planner.request.implementations else _default(planner, asked)
        implementations = planner.implementations(default)
        modes = (asked.mode,) if "mode" in asked.model_fields_set else MODES
        for batch in batches:
            for mode in modes:
                request = asked.model_copy(update={"batch_size": batch, "mode": mode})
                planned += planner.compare([request], implementations)
    return tuple(sorted(planned, key=lambda case: (case.case.implementation, case.case.workload.mode)))


def _default(planner: Planner, asked: WorkloadRequest) -> tuple[str, ...]:
    """On one device those that need not compile; over ranks those with a trace of the workload, else all."""
    if planner.request.nproc == 1:
        return planner.on_one_device(DENSE.kind, asked.pattern)
    names = planner.over_ranks(asked)
    traced = [
        name
        for name in names
        if any(
            plan_memory(planned.case, planner.machine.device, planner.catalogue)
            for planned in planner.plan(planner.catalogue.implementations.get(name), asked)
        )
    ]
    return tuple(traced) or names


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes of a case as traced (None: no trace) and as measured, or why they were not measured."""

    planned: PlannedCase
    traced: int | None
    outcome: Memory | Skipped | Failed

    @property
    def measured(self) -> int | None:
        """Peak bytes on the device during a call; over ranks, of the rank that needed most."""
        return self.outcome.peak_bytes if isinstance(self.outcome, Memory) else None

    @property
    def ratio(self) -> float | None:
        """Traced / measured; None if either is missing."""
        return self.traced / self.measured if self.traced is not None and self.measured else None

    @property
    def is_off(self) -> bool:
        """Return True if the trace deviates too much from the measurement."""
        return self.ratio is not None and abs(self.ratio - 1) > WITHIN

    @property
    def why(self) -> str:
        """Why it was not measured; empty if it was."""
        return "" if isinstance(self.outcome, Memory) else f"{self.outcome.status}: {self.outcome.why}"

    def as_data(self) -> dict[str, Any]:
        """Fields that the check adds to the plan of the case."""
        why = None if isinstance(self.outcome, Memory) else self.outcome.why
        return {"measured_peak_bytes": self.measured, "traced_over_measured": self.ratio, "why_not_measured": why}


def peaks_of(
    planned: Sequence[PlannedCase], planner: Planner, capacity: int | None, budget_s: float | None
) -> Iterator[Peak]:
    """Each case with its measured peak, one after another; cases that do not fit or exceed the budget are skipped."""
    from dilabench.engine.worker.client import WorkerPool
    from dilabench.engine.worker.protocol import WorkerSettings

    started = monotonic()
    pool = WorkerPool(WorkerSettings(device=planner.machine.device))
    try:
        for case in planned:
            plan = plan_memory(case.case, planner.machine.device, planner.catalogue)
            traced = None if plan is None else plan.peak_bytes
            skip = case.skip
            if skip is None and traced is not None and capacity is not None and traced > capacity:
                skip = Skipped(code="does_not_fit", why=f"does not fit into {format_bytes(capacity)}")
            if skip is None and budget_s is not None and monotonic() - started > budget_s:
                skip = Skipped(code="budget", why="the budget was used up; raise --budget")
            outcome = skip or memory_in(pool, case.case, planner.catalogue, planner.request.seed)
            if isinstance(outcome, Failed):
                # Memory that it left on the device must not count for the next case.
                pool.close()
            yield Peak(case, traced, outcome)
    finally:
        pool.close()


def verdict(peaks: Iterable[Peak]) -> ExitCode:
    """5 if a trace is off, 4 if a case failed, 8 if no case could be compared."""
    peaks = tuple(peaks)
    return exit_code_for(
        wrong=any(peak.is_off for peak in peaks),
        failed=any(isinstance(peak.outcome, Failed) for peak in peaks),
        nothing=all(peak.ratio is None for peak in peaks),
    )
