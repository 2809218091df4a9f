"""One case in separate processes, from planned to row: a sequence that may not fit. No torch."""

import time
from collections import Counter
from math import inf

import psutil

from dilabench.engine.case_executor import CaseExecutor
from dilabench.engine.case_spec import case_spec, worker_key
from dilabench.engine.case_state import CaseState
from dilabench.engine.method import default_timer
from dilabench.engine.worker.client import Worker, WorkerFailure
from dilabench.engine.worker.protocol import MeasureIsolated
from dilabench.engine.worker.replies import Isolated
from dilabench.machine import CPU, device_named
from dilabench.metadata import MEMORY_LIMIT
from dilabench.predict.memory import plan_memory
from dilabench.record import (
    Failed,
    Measured,
    Note,
    Outcome,
    PlannedCase,
    Row,
    Skipped,
    Timing,
)
from dilabench.units import format_bytes

SHARE_OF_AVAILABLE = 0.9
SAMPLING_S = 1.0


class IsolatedRun:
    """Measures one planned case and makes its row. Running out of memory is an answer here, not a failure."""

    def __init__(self, executor: CaseExecutor, planned: PlannedCase) -> None:
        self._executor = executor
        self._planned = planned
        self._device = executor.pool.settings.device
        self._timeout_s = inf
        self._state = CaseState(
            planned=planned,
            spec=case_spec(planned.case, executor.catalogue, executor.seed),
            key=worker_key(planned.case, executor.catalogue),
        )

    def row(self) -> Row:
        """The row of the case."""
        executor = self._executor
        outcome: Outcome
        if executor.budget.exhausted:
            outcome = executor.budget_skip("before its turn")
        else:
            # Cases before this one may still be prepared in their workers.
            executor.pool.close()
            spent: Counter[str] = Counter()
            with executor.spending(spent, "unmeasured"):
                outcome = self._in_worker()
            if isinstance(outcome, Measured):
                spent = Counter(worker=spent.total() - sum(outcome.wall_ns.values()))
            executor.wall_ns.update(spent)
        executor.budget.done(self._planned.case)
        return Row(planned=self._planned, outcome=outcome)

    def _in_worker(self) -> Outcome:
        try:
            with self._executor.pool.fresh(self._state.key) as worker:
                return self._measured(worker)
        except WorkerFailure as failure:
            if failure.code == "out_of_memory":
                return Skipped(code="out_of_memory", why=f"does not fit into memory: {self._needed()}{failure.why}")
            if failure.code == "unusable_optimization":
                return Skipped(code=failure.code, why=failure.why)
            if failure.code == "timeout" and self._timeout_s < self._executor.timeout_s:
                # The case need not be slow: the budget allowed no more time. `--resume` tries again.
                return self._executor.budget_skip("during its stage 'time'")
            return Failed(stage="time", code=failure.code, why=failure.why, traceback=failure.traceback)

    def _measured(self, worker: Worker) -> Outcome:
        limit_bytes, limit_note = self._limit()
        share_s = self._executor.budget.share_s([self._state.case])
        seconds = min(SAMPLING_S, self._executor.method.sampling_s, share_s / 4)
        started = time.perf_counter_ns()
        result = self._ask(worker, limit_bytes, seconds)
        took_ns, checks_ns = time.perf_counter_ns() - started, result.verification.duration_ns
        if not result.verification.passed:
            return Failed(stage="verify", code="wrong_output", why=result.why, verification=result.verification)
        # Its calls are timed by the host on every device.
        timer = default_timer(CPU.name, self._executor.catalogue)
        return Measured(
            verification=result.verification,
            timings=(Timing(timer=timer.name, proves=timer.proves, slots=(result.slot,)),),
            memory=result.memory,
            setup_ns=result.setup_ns,
            wall_ns={"verify": checks_ns, "time": took_ns - checks_ns},
            counters=result.counters,
            notes=(*result.notes, *([limit_note] if limit_note else [])),
        )

    def _ask(self, worker: Worker, limit_bytes: int | None, seconds: float) -> Isolated:
        executor = self._executor
        executor.progress.stage_started(self._state.case, "time")
        self._timeout_s = executor.stage_timeout_s(self._state)
        command = MeasureIsolated(spec=self._state.spec, limit_bytes=limit_bytes, seconds=seconds)
        return worker.ask(command, self._state.spec.handle, timeout_s=self._timeout_s)

    def _limit(self) -> tuple[int | None, Note | None]:
        """The memory limit of the process, and the note on it; a device with separate memory needs none."""
        asked = self._planned.memory_limit_bytes
        if asked is not None:
            message = f"its process was allowed {format_bytes(asked)} by --memory-limit; the machine may have more"
            return asked, MEMORY_LIMIT.note(message, threshold=asked)
        if device_named(self._device).own_memory:
            return None, None
        ranks = self._planned.case.world_size
        limit = int(SHARE_OF_AVAILABLE * psutil.virtual_memory().available) // ranks
        shared = "" if ranks == 1 else f" over {ranks} ranks"
        message = f"its process was allowed {format_bytes(limit)}, {SHARE_OF_AVAILABLE:.0%} of what was free{shared}"
        return limit, MEMORY_LIMIT.note(message, threshold=limit)

    def _needed(self) -> str:
        case = self._planned.case
        plan = plan_memory(case, self._device, self._executor.catalogue)
        who = "it needs" if case.world_size == 1 else "each rank needs"
        return "" if plan is None else f"{who} {format_bytes(plan.peak_bytes)} as traced; "
