"""Sends commands about cases to their workers; failures become the outcome of a case. No torch."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from dilabench.engine.budget import Budget
from dilabench.engine.call.specs import TimerSpec
from dilabench.engine.case_state import CaseState
from dilabench.engine.method import Method
from dilabench.engine.progress import Progress
from dilabench.engine.worker.client import Worker, WorkerFailure, WorkerPool
from dilabench.engine.worker.protocol import Command, Diagnose, Prepare, Release, ReplyT, WarmUp
from dilabench.engine.worker.replies import Prepared, Sampled
from dilabench.machine import Machine, device_named
from dilabench.metadata import TIMER_UNUSABLE
from dilabench.plugins.catalogue import Catalogue
from dilabench.record import Diagnostic, Failed, Skipped, Stage
from dilabench.units import format_seconds

MAX_TIMEOUT_S = 600.0
SHARES_PER_COMMAND = 4.0
OVERRUN_S = 1.0


@dataclass(slots=True)
class CaseExecutor:
    """Executes the steps of cases in their workers, with the method, the budget and the progress that groups share.

    `next_round` numbers the rounds of the whole run: slots with the same number were interleaved. `machine`: it decides
    which built-ins all rows are compared with; None: no such comparison. `patience_s`: seconds that a worker may take
    for an answer, independent of the fair share of its case. `wall_ns`: time that no measured case took, by stage.
    """

    catalogue: Catalogue
    pool: WorkerPool
    method: Method
    budget: Budget
    progress: Progress
    seed: int = 0
    trace_folder: Path | None = None
    timeout_s: float = MAX_TIMEOUT_S
    sleep: Callable[[float], None] = time.sleep
    next_round: int = 0
    machine: Machine | None = None
    patience_s: float = 0.0
    wall_ns: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def spending(self, wall_ns: Counter[str], stage: str) -> Iterator[None]:
        """Add the time inside to a stage of a case, or of the run."""
        started = self.budget.clock()
        try:
            yield
        finally:
            wall_ns[stage] += round((self.budget.clock() - started) * 1e9)

    def prepare(self, state: CaseState) -> bool:
        """Build the case in a live worker; False if that ended the case."""
        if self.budget.exhausted:
            state.outcome = self.budget_skip("before its turn")
            return False
        try:
            with self.spending(state.wall_ns, "worker"):
                worker = self.pool.resident(state.key)
        except WorkerFailure as failure:
            self.fail(state, "worker", failure)
            return False
        if state.home is worker:
            return True
        first_time = state.home is None
        state.home, state.warm = worker, set()
        prepared = self.prepare_in(worker, state, "build")
        if prepared is None:
            return False
        state.call_ns = prepared.call_ns
        if first_time:
            state.setup_ns = prepared.setup_ns
        else:
            state.drop_unchecked()
            state.session += 1
        return True

    def prepare_in(self, worker: Worker, state: CaseState, stage: Stage) -> Prepared | None:
        """Build the case in a given worker; None if that ended the case."""
        reply = self.ask_worker(worker, state, stage, Prepare(spec=state.spec))
        if reply is not None:
            state.add_notes(reply.notes)
        return reply

    def warm_up(self, state: CaseState, timer: TimerSpec) -> bool:
        """Prepare and warm up the timer of a case; False if that ended the case or the timer cannot be used."""
        if not self.prepare(state):
            return False
        if timer.name in state.warm:
            return True
        self.progress.stage_started(state.case, "warmup")
        limits = self.method.warm_up
        longest = min(limits.max_s, self.budget.share_s([state.case]) / 4)
        limits = limits.model_copy(update={"max_s": longest, "min_s": min(limits.min_s, longest)})
        warmed = self.ask(state, "warmup", WarmUp(timer=timer, limits=limits))
        if warmed is None:
            return False
        if warmed.unusable is not None:
            message = f"timer {timer.name!r} was not used: {warmed.unusable}"
            state.notes.append(TIMER_UNUSABLE.note(message))
            return False
        state.warm.add(timer.name)
        run = state.run_of(timer)
        run.warmup_ns += warmed.samples_ns
        run.notes = warmed.notes
        if warmed.samples_ns:
            state.call_ns = max(1, min(warmed.samples_ns[-3:]))
        return True

    def is_ready(self, state: CaseState, timer: TimerSpec) -> bool:
        """Return True if the timer of a case is warm in a live worker."""
        return state.home is not None and state.home.alive and timer.name in state.warm

    def judge(self, state: CaseState, reply: Sampled) -> None:
        """Record the checks of timed calls; a wrong output ends the case."""
        found = reply.verification
        if found is None or state.verification is None:
            return
        state.wall_ns["time"] -= found.duration_ns
        state.wall_ns["timed_checks"] += found.duration_ns
        if found.passed:
            before = state.verification
            added = {
                "timed_calls": before.timed_calls + found.timed_calls,
                "timed_rows": before.timed_rows + found.timed_rows,
                "duration_ns": before.duration_ns + found.duration_ns,
            }
            state.verification = before.model_copy(update=added)
        else:
            why = f"wrong once it is timed: {reply.why}"
            state.outcome = Failed(stage="verify", code="wrong_output", why=why, verification=found)
            self.release(state)

    def ask(self, state: CaseState, stage: Stage, command: Command[ReplyT]) -> ReplyT | None:
        """Send a command to the case's worker; None if that ended the case."""
        assert state.home is not None
        return self.ask_worker(state.home, state, stage, command)

    def ask_worker(self, worker: Worker, state: CaseState, stage: Stage, command: Command[ReplyT]) -> ReplyT | None:
        """The same to a given worker."""
        timeout_s = self.stage_timeout_s(state)
        try:
            with self.spending(state.wall_ns, stage):
                reply = worker.ask(command, state.spec.handle, timeout_s=timeout_s)
        except WorkerFailure as failure:
            if failure.code == "timeout" and timeout_s < self._least_s:
                state.outcome = self.budget_skip(f"during its stage {stage!r}")
            else:
                self.fail(state, stage, failure)
            return None
        # Each rank has a process.
        if reply.process_bytes is not None and state.case.world_size == 1:
            state.process_bytes = max(state.process_bytes or 0, reply.process_bytes)
        return reply

    def diagnostics(self, state: CaseState, turns: int) -> tuple[Diagnostic, ...]:
        """The parts of a call over ranks, timed interleaved. Raises WorkerFailure, which does not fail the case."""
        assert state.home is not None
        command = Diagnose(timer=self.method.timer, turns=turns)
        with self.spending(state.wall_ns, "diagnostics"):
            return state.home.ask(command, state.spec.handle, timeout_s=self.stage_timeout_s(state)).diagnostics

    def release(self, state: CaseState) -> None:
        """Free the memory of the case in its worker; a worker that fails to do so is ended."""
        if state.home is None or not state.home.alive:
            return
        try:
            with self.spending(state.wall_ns, "release"):
                state.home.ask(Release(), state.spec.handle, timeout_s=self.stage_timeout_s(state))
        except WorkerFailure:
            state.home.kill()

    def stage_timeout_s(self, state: CaseState) -> float:
        """Longest wait for one answer: generous against the case's fair share, little beyond the budget.

        If other cases wait, they keep half of the remaining budget, unless `patience_s` is set.
        """
        remaining = self.budget.remaining_s
        if remaining == inf:
            return self.timeout_s
        generous = max(self._least_s, self.patience_s, SHARES_PER_COMMAND * self.budget.share_s([state.case]))
        is_shared = self.budget.waiting > 1 and not self.patience_s
        return min(self.timeout_s, generous, (remaining / 2 if is_shared else remaining) + OVERRUN_S)

    @property
    def _least_s(self) -> float:
        """Seconds below which a timed-out case counts as short of budget, not as slow."""
        return min(self.timeout_s, device_named(self.pool.settings.device).min_timeout_s)

    def budget_skip(self, when: str) -> Skipped:
        """The outcome of a case that the budget skipped."""
        return Skipped(code="budget", why=f"{self.used_up(when)}; raise --budget, or continue with --resume")

    def used_up(self, when: str) -> str:
        """'budget of 40 s used up before its turn': the budget that was given, for reasons and notes."""
        given = self.budget.total_s
        return f"{'time' if given is None else f'budget of {format_seconds(given)}'} used up {when}"

    def fail(self, state: CaseState, stage: Stage, failure: WorkerFailure) -> None:
        """End a case with a worker's failure."""
        code, why = failure.code, failure.why
        if code == "timeout" and self.budget.exhausted:
            state.outcome = self.budget_skip(f"during its stage {stage!r}")
        elif code == "unusable_optimization":
            state.outcome = Skipped(code=code, why=why)
        elif code == "timeout" and stage == "build" and state.case.optimizations.compile:
            state.outcome = Skipped(code="unusable_optimization", why=f"torch.compile: {why}")
        elif code == "timeout" and stage == "verify":
            state.outcome = unverified_in_time(why, failure.traceback)
        else:
            state.outcome = Failed(
                stage=stage, code=code, why=why, verification=state.verification, traceback=failure.traceback
            )


def unverified_in_time(why: str, traceback: str | None) -> Failed:
    """The outcome of a case whose verification took too long, so that its output is unknown."""
    text = f"verification was not finished, so it is unknown whether the output is right: {why}"
    return Failed(stage="verify", code="verification_timeout", why=text, traceback=traceback)
