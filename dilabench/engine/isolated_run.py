"""One case in a process of its own, from planned to row: a sequence that may not fit, or a stream. No torch."""

from collections.abc import Callable
from math import inf

import psutil

from dilabench.engine.case_state import CaseState
from dilabench.engine.driver import Driver
from dilabench.engine.method import default_timer
from dilabench.engine.worker.client import Worker, WorkerFailure
from dilabench.engine.worker.protocol import CommandName, IsolatedResult, case_spec, worker_key
from dilabench.machine import CPU, device_named
from dilabench.metadata import MEMORY_LIMIT, STREAM_CUT_SHORT, STREAM_INTERRUPTED, STREAM_WALL_NS
from dilabench.predict.memory import plan_memory
from dilabench.record import (
    Check,
    Failed,
    Measured,
    Memory,
    Note,
    Outcome,
    PlannedCase,
    Row,
    Skipped,
    Slot,
    Timing,
    Verification,
)
from dilabench.units import format_bytes, format_count, format_seconds

SHARE_OF_AVAILABLE = 0.9
SAMPLING_S = 1.0
# A slice of a stream lasts about this long: the end of the budget or Ctrl-C then costs no more than that.
SLICE_S = 5.0


class IsolatedRun:
    """Measures one planned case and makes its row. Running out of memory is an answer here, not a failure.

    `interrupted`: Ctrl-C came in a stream; the row holds what had passed by then.
    """

    def __init__(self, driver: Driver, planned: PlannedCase) -> None:
        self._driver = driver
        self._planned = planned
        self._device = driver.pool.settings.device
        self._patience_s = inf
        self.interrupted = False
        self._state = CaseState(
            planned=planned,
            spec=case_spec(planned.case, driver.catalogue, driver.seed),
            key=worker_key(planned.case, driver.catalogue),
        )

    def row(self) -> Row:
        """The row of the case."""
        driver = self._driver
        outcome: Outcome
        if driver.budget.exhausted:
            outcome = driver.budget_skip("before its turn")
        else:
            # Cases before this one may still be prepared in their workers.
            driver.pool.close()
            streamed = self._planned.case.optimizations.stream_tokens > 0
            outcome = self._carried_out(self._streamed if streamed else self._measured)
        driver.budget.done(self._planned.case)
        return Row(planned=self._planned, outcome=outcome)

    def _carried_out(self, work: Callable[[Worker], Outcome]) -> Outcome:
        try:
            with self._driver.pool.fresh(self._state.key) as worker:
                return work(worker)
        except WorkerFailure as failure:
            if failure.code == "out_of_memory":
                return Skipped(code="out_of_memory", why=f"does not fit into memory: {self._needed()}{failure.why}")
            if failure.code == "unusable_optimization":
                return Skipped(code=failure.code, why=failure.why)
            if failure.code == "timeout" and self._patience_s < self._driver.timeout_s:
                # Not slow by any measure of its own: the budget allowed no more. `--resume` tries again.
                return self._driver.budget_skip("during its stage 'time'")
            return Failed(stage="time", code=failure.code, why=failure.why, traceback=failure.traceback)

    def _measured(self, worker: Worker) -> Outcome:
        limit_bytes, limit_note = self._limit()
        share_s = self._driver.budget.share_s([self._state.case])
        seconds = min(SAMPLING_S, self._driver.method.sampling_s, share_s / 4)
        found = self._ask(worker, "isolated", limit_bytes=limit_bytes, seconds=seconds)
        assert found.verification is not None
        if not found.verification.passed:
            return Failed(stage="verify", code="wrong_output", why=found.why, verification=found.verification)
        slots = () if found.slot is None else (found.slot,)
        return self._outcome(found, found.verification, slots, found.memory, found.counters, limit_note)

    def _streamed(self, worker: Worker) -> Outcome:
        """Pieces in slices until all have passed or the budget ends; what passed is what counts."""
        case, budget = self._planned.case, self._driver.budget
        pieces = -(-case.optimizations.stream_tokens // case.workload.tokens)
        slots: list[Slot] = []
        checks: list[Check] = []
        counters: dict[str, int] = {}
        sampled, count = 0, 1
        found: IsolatedResult | None = None
        done = 0
        while done < pieces and (found is None or not budget.exhausted):
            count = min(count, pieces - done)
            try:
                found = self._ask(worker, "stream", pieces=pieces, start=done, count=count)
            except KeyboardInterrupt:
                if found is None:
                    raise
                self.interrupted = True
                break
            assert found.slot is not None
            assert found.verification is not None
            if not all(check.passed for check in found.verification.checks):
                return Failed(stage="verify", code="wrong_output", why=found.why, verification=found.verification)
            slots.append(found.slot.model_copy(update={"round": len(slots)}))
            checks += found.verification.checks
            sampled += found.verification.sampled_rows or 0
            counters = {name: counters.get(name, 0) + value for name, value in found.counters.items()}
            done += count
            per_piece_s = counters[STREAM_WALL_NS.key] * 1e-9 / done
            count = max(1, int(min(SLICE_S, budget.remaining_s / 2) / per_piece_s))
        assert found is not None
        verification = Verification(checks=tuple(checks), sampled_rows=sampled)
        memory = None if self.interrupted else self._ask(worker, "stream", pieces=pieces, start=done, count=0).memory
        return self._outcome(found, verification, tuple(slots), memory, counters, self._stream_note(done, pieces))

    def _outcome(
        self,
        found: IsolatedResult,
        verification: Verification,
        slots: tuple[Slot, ...],
        memory: Memory | None,
        counters: dict[str, int],
        note: Note | None,
    ) -> Measured:
        # Its calls are timed by the host, as on a CPU, whatever the device.
        timer = default_timer(CPU.name, self._driver.catalogue)
        return Measured(
            verification=verification,
            timings=(Timing(timer=timer.name, proves=timer.proves, slots=slots),),
            memory=memory,
            setup_ns=found.setup_ns,
            counters=counters,
            notes=(*found.notes, *([note] if note else [])),
        )

    def _ask(self, worker: Worker, name: CommandName, **arguments: object) -> IsolatedResult:
        driver = self._driver
        driver.progress.stage_started(self._state.case, "time")
        spec = self._state.spec.model_dump(mode="json")
        self._patience_s = driver.patience_s(self._state)
        reply = worker.ask(name, self._state.spec.handle, timeout_s=self._patience_s, spec=spec, **arguments)
        assert reply.isolated is not None
        return reply.isolated

    def _limit(self) -> tuple[int | None, Note | None]:
        """What the process may allocate, and the note that says so; a device with memory of its own needs none."""
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
        plan = plan_memory(case, self._device, self._driver.catalogue)
        who = "it needs" if case.world_size == 1 else "each rank needs"
        return "" if plan is None else f"{who} {format_bytes(plan.peak_bytes)} as traced; "

    def _stream_note(self, done: int, pieces: int) -> Note | None:
        if done == pieces:
            return None
        tokens = self._planned.case.workload.tokens
        ended = f"the budget of {format_seconds(self._driver.budget.total_s or 0.0)} ended"
        kind = STREAM_CUT_SHORT
        if self.interrupted:
            ended, kind = "the run was interrupted", STREAM_INTERRUPTED
        message = f"{ended} after {done} of {pieces} pieces: {format_count(done * tokens)} tokens processed"
        return kind.note(message, observed=done, threshold=pieces)
