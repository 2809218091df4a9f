"""A workload group: its cases are verified, timed in interleaved rounds, then their memory is measured. No torch."""

import random
from collections.abc import Iterator, Mapping, Sequence

from dilabench.engine.case_executor import CaseExecutor
from dilabench.engine.case_spec import case_spec, worker_key
from dilabench.engine.case_state import CaseState, TimerRun
from dilabench.engine.device.clocks import COOL_DOWN_REASONS
from dilabench.engine.method import MIN_TURNS
from dilabench.engine.plausibility import ISOLATED_SLOTS, interference, unproven_backend
from dilabench.engine.rounds import Rounds
from dilabench.engine.worker.client import WorkerFailure
from dilabench.engine.worker.protocol import MeasureMemory, Profile, TakeSlot, Verify
from dilabench.metadata import (
    BUDGET_EXCEEDED,
    CUT_SHORT,
    FEW_SAMPLES,
    INTERRUPTED,
    LAUNCH_BOUND,
    NO_LEDGER,
    NO_MEMORY_PASS,
    NOT_INTERLEAVED,
    THROTTLED,
    TIMER_UNUSABLE,
    UNDIAGNOSED,
)
from dilabench.plugins.catalogue import BUILTIN
from dilabench.record import Failed, FailureCode, Measured, Note, PlannedCase, Row, Skipped, Verification
from dilabench.units import counted, format_seconds

GRAPH_ROUNDS = 10
MEMORY_CALLS = 6
SHARE_KEPT_FOR_TIMING = 0.25
THROTTLED_SHARE = 0.2
DIAGNOSING_SHARE = 0.25
CALLS_PER_TURN = 3
CALLS_BEFORE_TURNS = 12


class WorkloadGroupRun:
    """Measures the cases of one group and makes their rows. A failing case ends alone; the others continue."""

    def __init__(self, executor: CaseExecutor, planned: Sequence[PlannedCase]) -> None:
        self._executor = executor
        self._random = random.Random(f"{executor.seed}:{planned[0].case.group_id}")
        self.states = [
            CaseState(
                planned=case_plan,
                spec=case_spec(case_plan.case, executor.catalogue, executor.seed, executor.machine),
                key=worker_key(case_plan.case, executor.catalogue),
            )
            for case_plan in planned
        ]

    @property
    def is_reference(self) -> bool:
        """Return True if it has only unranked references."""
        return all(state.planned.role == "yardstick" for state in self.states)

    def least(self) -> bool:
        """Verify one case and take its least samples, so that its length has a row, however long the others take.

        Returns False if none was measured. The first to be tried has the highest priority for `auto`.
        """
        executor, registry = self._executor, self._executor.catalogue.implementations
        for state in sorted(
            self.states,
            key=lambda state: (
                self._compiles(state),
                -registry.get(state.case.implementation).priority,
            ),
        ):
            if executor.budget.exhausted:
                return False
            if not self._qualify(state):
                continue
            Rounds(executor, [state], self._random).take(executor.method.timer, 0.0)
            if state.running:
                executor.release(state)
                state.drop_unchecked()
                state.home, state.least, state.runs = None, state.runs, {}
                state.exceeded_s = executor.budget.exceeded_s
                if _samples(state.least):
                    return True
        return False

    def rows(self) -> Iterator[Row]:
        """The rows of the group, each as soon as it is certain."""
        started, deadline = self._executor.budget.clock(), self._deadline(self.states)
        last_call = started + (1 - SHARE_KEPT_FOR_TIMING) * (deadline - started)
        ready: list[CaseState] = []
        slowest_s = 0.0
        for state in self._in_turn():
            began = self._executor.budget.clock()
            # Cases that compile for minutes come last, so that they take no time from the others.
            late = (self._compiles(state) and began > last_call) or not self._has_time(ready, slowest_s)
            if far := self._far_slower(state, ready):
                state.outcome = far
                self._executor.release(state)
                yield self._row(state)
            elif late and ready and state.running and state.home is None:
                state.outcome = self._executor.budget_skip("before its turn")
                yield self._row(state)
            elif state.running and self._qualify(state):
                ready.append(state)
            elif not self._crowded(state):
                yield self._row(state)
            slowest_s = max(slowest_s, self._executor.budget.clock() - began)
        yield from self._measured(ready, deadline)
        for state in [state for state in self.states if self._crowded(state)]:
            yield from self._isolated(state)

    def _has_time(self, ready: Sequence[CaseState], verifying_s: float) -> bool:
        """Whether the budget does for the least samples of verified cases after one more verification."""
        sampling_s = sum(state.call_ns * 1e-9 for state in ready) * self._executor.method.min_samples
        return self._executor.budget.remaining_s >= verifying_s + sampling_s

    def _in_turn(self) -> list[CaseState]:
        """The cases in the order in which they are verified: if far slower ones are skipped, the fastest first."""
        states = sorted(self.states, key=self._compiles)
        if self._executor.method.far_slower is None:
            return states
        for state in states:
            self._executor.progress.stage_started(state.case, "build")
            self._executor.prepare(state)
        return sorted(states, key=lambda state: state.call_ns)

    def _far_slower(self, state: CaseState, ready: Sequence[CaseState]) -> Skipped | None:
        """Why a case that cannot be the fastest is not timed, by one call of it and one of a verified case."""
        limit = self._executor.method.far_slower
        chooses = self._executor.catalogue.implementations.get(state.case.implementation).chooses
        if limit is None or chooses or not ready or not state.running:
            return None
        fastest = min(ready, key=lambda state: state.call_ns)
        if state.call_ns <= limit * fastest.call_ns:
            return None
        taken, least = (format_seconds(state.call_ns * 1e-9) for state in (state, fastest))
        why = f"not timed: a call took {taken}, over {limit:g} times the {least} of {fastest.case.implementation}"
        return Skipped(code="far_slower", why=why)

    def _compiles(self, state: CaseState) -> bool:
        """Its first call may take tens of seconds."""
        case, catalogue = state.case, self._executor.catalogue
        kernel = case.backend is not None and catalogue.backends.get(case.backend).compiles
        return case.optimizations.compile or kernel or catalogue.implementations.get(case.implementation).compiles

    def _crowded(self, state: CaseState) -> bool:
        """Return True if memory ran out, or the worker's clock was wrong, while other cases of the group were in the
        worker, too; then it is tried alone.
        """
        ran_out = isinstance(state.outcome, Failed) and state.outcome.code == "out_of_memory"
        return (ran_out or state.disturbed) and not state.isolated and len(self.states) > 1

    def _isolated(self, state: CaseState) -> Iterator[Row]:
        """Measure again without the other cases of the group in memory; a case fails only if it does not fit then."""
        self._executor.pool.close()
        reason = "the clock of its worker was wrong" if state.disturbed else "it does not fit into memory"
        state.home, state.outcome, state.isolated = None, None, True
        state.runs.clear()
        message = f"measured alone: {reason} together with its group, so it has no paired samples"
        state.notes.append(NOT_INTERLEAVED.note(message))
        if state.verification is None and not self._qualify(state):
            yield self._row(state)
        else:
            yield from self._measured([state], self._deadline([state]))

    def _qualify(self, state: CaseState) -> bool:
        """Build and verify it, and see which kernels run; False when that ended the case."""
        executor = self._executor
        executor.progress.stage_started(state.case, "build")
        if not executor.prepare(state):
            return False
        if state.verification is not None:
            return True
        executor.progress.stage_started(state.case, "verify")
        reply = executor.ask(state, "verify", Verify())
        if reply is None:
            return False
        state.verification = reply.verification
        if not reply.verification.passed:
            self._reject(state, "wrong_output", reply.why, reply.verification)
            return False
        return self._check_kernels(state)

    def _check_kernels(self, state: CaseState) -> bool:
        """Keep the kernel ledger; a row that claims a backend must show one of its kernels."""
        folder = self._executor.trace_folder
        trace = str(folder / f"{state.spec.handle}.trace.json") if folder else None
        reply = self._executor.ask(state, "kernels", Profile(trace=trace))
        if reply is None:
            return False
        state.kernels, state.memory = reply.kernels, reply.memory
        if state.case.backend is None or state.verification is None:
            return True
        if not reply.kernels:
            message = "the profiler saw no kernel, so the backend of this row is not proven"
            hint = "CUPTI is missing, not permitted, or in use by another profiler"
            state.notes.append(NO_LEDGER.note(message, hint=hint))
            return True
        catalogue = self._executor.catalogue
        # Only built-ins may declare that other kernels take a backend's place: a plug-in could claim any backend so.
        ours = catalogue.implementations.origin(state.case.implementation) == BUILTIN
        backend = catalogue.backends.get(state.case.backend)
        why = unproven_backend(backend, reply.kernels, state.notes if ours else ())
        if why is not None:
            self._reject(state, "backend_not_proven", why, state.verification)
        return why is None

    def _reject(self, state: CaseState, code: FailureCode, why: str, verification: Verification) -> None:
        state.outcome = Failed(stage="verify", code=code, why=why, verification=verification)
        self._executor.release(state)

    def _deadline(self, states: Sequence[CaseState]) -> float:
        """When the fair share of the states is over, everything included."""
        budget = self._executor.budget
        return budget.clock() + budget.share_s([state.case for state in states])

    def _measured(self, states: Sequence[CaseState], deadline: float) -> Iterator[Row]:
        """Time the cases, measure the peak memory of each, and free them."""
        executor = self._executor
        over_ranks = self.states[0].case.world_size > 1 and executor.method.max_turns > 0
        diagnosing_share = DIAGNOSING_SHARE if over_ranks else 0.0
        of_parts = over_ranks * (CALLS_BEFORE_TURNS + CALLS_PER_TURN * MIN_TURNS)
        later_s = sum((MEMORY_CALLS * (state.memory is None) + of_parts) * state.call_ns * 1e-9 for state in states)
        share_s = max(0.0, deadline - executor.budget.clock() - later_s)
        Rounds(executor, states, self._random).take(executor.method.timer, share_s * (1 - diagnosing_share))
        for state in states:
            self._check_samples(state)
        self._recheck([state for state in states if state.running])
        self._graph([state for state in states if state.running], share_s)
        for state in [state for state in states if state.running]:
            self._memory(state)
        # Last of all: a part that fails may end the ranks, and every row is complete by now.
        if over_ranks:
            self._diagnose([state for state in states if state.running], share_s * diagnosing_share)
        for state in states:
            executor.release(state)
        for state in states:
            if not self._crowded(state):
                yield self._row(state)

    def interrupted_rows(self) -> Iterator[Row]:
        """After an interrupt: the rows of cases that failed, or are verified and have samples enough to quote.

        No worker is needed for them. Rows that were given before are among them.
        """
        for state in self.states:
            if not state.running:
                if not self._crowded(state):
                    yield self._row(state)
            elif state.timed:
                # A resumed run would only take the samples again.
                missing = "after its timing" if state.memory else "before its memory was measured"
                state.notes.append(INTERRUPTED.note(f"the run was interrupted {missing}"))
                yield self._row(state)
            elif state.verification is not None and state.verification.passed:
                # The samples that were taken first of all had their last call checked.
                state.runs, state.least = state.least or state.runs, {}
                state.drop_unchecked()
                count = _samples(state.runs)
                if count >= self._executor.method.min_samples:
                    message = (
                        f"the run was interrupted after {counted(count, 'sample')} of it; --resume measures it again"
                    )
                    state.notes.append(CUT_SHORT.note(message, observed=count))
                    yield self._row(state)

    def _recheck(self, states: Sequence[CaseState]) -> None:
        """Measure one of the cases without the others in between, to see whether they changed its time."""
        executor, timer = self._executor, self._executor.method.timer
        if not executor.method.recheck or len(states) < 2 or executor.budget.exhausted:
            return
        chosen = self._random.choice(states)
        count = max(1, chosen.run_of(timer).samples // max(1, len(chosen.run_of(timer).slots)))
        if not chosen.run_of(timer).slots or not self._affordable(chosen, ISOLATED_SLOTS * count):
            return
        isolated = []
        for _ in range(ISOLATED_SLOTS):
            reply = executor.ask(chosen, "time", TakeSlot(timer=timer.name, count=count))
            if reply is None:
                return
            executor.judge(chosen, reply)
            if not chosen.running:
                return
            isolated.append(reply.slot)
        note = interference(chosen.run_of(timer).locations_ns, isolated)
        if note is not None:
            chosen.notes.append(note)

    def _graph(self, states: Sequence[CaseState], share_s: float) -> None:
        """Time launch-bound calls as CUDA graphs as well."""
        timer = self._executor.method.graph_timer
        bound = [state for state in states if any(LAUNCH_BOUND.among(run.notes) for run in state.runs.values())]
        if timer is not None and bound:
            Rounds(self._executor, bound, self._random).take(timer, share_s / 4, GRAPH_ROUNDS)

    def _diagnose(self, states: Sequence[CaseState], share_s: float) -> None:
        """Time the parts of calls over ranks. A failure here is a note, because the row was measured before."""
        executor = self._executor
        for state in states:
            seconds = min(share_s / len(states), executor.method.sampling_s)
            affordable = seconds * 1e9 / (CALLS_PER_TURN * state.call_ns)
            turns = int(min(executor.method.max_turns, max(MIN_TURNS, affordable)))
            if not self._affordable(state, CALLS_BEFORE_TURNS + CALLS_PER_TURN * turns):
                state.notes.append(_undiagnosed(executor.used_up("before it")))
                continue
            executor.progress.stage_started(state.case, "time")
            try:
                state.diagnostics = executor.diagnostics(state, turns)
            except WorkerFailure as failure:
                state.notes.append(_undiagnosed(failure.why))

    def _check_samples(self, state: CaseState) -> None:
        """A case without samples has no time; one with few says so, and so does one measured on a throttled GPU."""
        if not state.running:
            return
        state.drop_unchecked()
        state.timed = True
        if _samples(state.runs) < _samples(state.least):
            self._take_least(state)
        run = state.runs.get(self._executor.method.timer.name)
        if run is None or not run.slots:
            unusable = TIMER_UNUSABLE.among(state.notes)
            when = "before its timed calls were checked" if state.dropped else "before its first sample"
            skip: Skipped | Failed = self._executor.budget_skip(when)
            if state.dropped and not self._executor.budget.exhausted:
                skip = Failed(stage="time", code="no_samples", why="no timed call could be checked")
            state.outcome = Failed(stage="time", code="no_samples", why=unusable[0].message) if unusable else skip
            return
        floor = self._executor.method.min_samples
        if run.samples < floor:
            message = (
                f"fewer than {floor} samples, so no interval: {self._executor.used_up(f'after {run.samples} samples')}"
            )
            state.notes.append(FEW_SAMPLES.note(message, observed=run.samples, threshold=floor))
        heated = sum(bool(COOL_DOWN_REASONS.intersection(slot.throttle)) for slot in run.slots) / len(run.slots)
        if heated > THROTTLED_SHARE:
            message = f"the GPU was slowed down by heat or power delivery in {heated:.0%} of the rounds"
            hint = "improve cooling or lower the power limit, then repeat"
            state.notes.append(THROTTLED.note(message, observed=heated, threshold=THROTTLED_SHARE, hint=hint))

    def _memory(self, state: CaseState) -> None:
        """Peak memory of one call: the allocator's count knows what was there before, in any process.

        The call that showed the kernels may have shown it already.
        """
        if state.memory is not None:
            return
        if not self._affordable(state, MEMORY_CALLS):
            state.notes.append(NO_MEMORY_PASS.note(self._executor.used_up("before its memory was measured")))
            return
        self._executor.progress.stage_started(state.case, "memory")
        reply = self._executor.ask(state, "memory", MeasureMemory()) if self._executor.prepare(state) else None
        if reply is not None:
            state.memory = reply.memory

    def _affordable(self, state: CaseState, calls: int) -> bool:
        return calls * state.call_ns * 1e-9 < self._executor.budget.remaining_s

    def _take_least(self, state: CaseState) -> None:
        """Have the samples count that a case got before the others of its length."""
        state.outcome, state.runs, state.least = None, state.least, {}
        when = "before it could be interleaved with its group"
        state.notes.append(NOT_INTERLEAVED.note(f"measured alone: {self._executor.used_up(when)}"))
        if state.exceeded_s:
            message = f"the budget was exceeded by {format_seconds(state.exceeded_s)} so that its length has a row"
            state.notes.append(BUDGET_EXCEEDED.note(message, observed=state.exceeded_s * 1e9))

    def _row(self, state: CaseState) -> Row:
        if state.least and isinstance(state.outcome, Skipped) and state.outcome.code == "budget":
            self._take_least(state)
        self._executor.budget.done(state.case)
        row = state.row()
        if not isinstance(row.outcome, Measured):
            self._executor.wall_ns["unmeasured"] += state.wall_ns.total()
        return row


def _samples(runs: Mapping[str, TimerRun]) -> int:
    return sum(run.samples for run in runs.values())


def _undiagnosed(why: str) -> Note:
    return UNDIAGNOSED.note(f"communication and computation were not timed alone: {why}")
