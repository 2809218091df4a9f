"""One cell: all implementations of one workload, verified, timed in interleaved rounds, then weighed. No torch."""

import random
from collections.abc import Iterator, Sequence

from dilabench.bench.claims import unproven_backend
from dilabench.bench.clocks import COOL_DOWN_REASONS
from dilabench.bench.commands import case_spec, worker_key
from dilabench.bench.contender import Contender
from dilabench.bench.method import LAUNCH_BOUND, MIN_TURNS
from dilabench.bench.recheck import SLOTS_ALONE, interference
from dilabench.bench.rounds import Rounds
from dilabench.bench.station import Station
from dilabench.bench.workers import WorkerFailure
from dilabench.results import Failed, Note, PlannedCase, Row, Verification

GRAPH_ROUNDS = 10
MEMORY_CALLS = 6
SHARE_KEPT_FOR_TIMING = 0.25
THROTTLED_SHARE = 0.2
DIAGNOSING_SHARE = 0.25
CALLS_PER_TURN = 3
CALLS_BEFORE_TURNS = 12


class CellRun:
    """Takes the cases of one cell from planned to rows. A case that fails ends alone; the others go on."""

    def __init__(self, station: Station, planned: Sequence[PlannedCase]) -> None:
        self._station = station
        self._random = random.Random(f"{station.seed}:{planned[0].case.cell_id}")
        self.contenders = [
            Contender(
                planned=one,
                spec=case_spec(one.case, station.catalogue, station.seed),
                key=worker_key(one.case, station.catalogue),
            )
            for one in planned
        ]

    def rows(self) -> Iterator[Row]:
        """The rows of the cell, each as soon as it is certain."""
        started, deadline = self._station.budget.clock(), self._deadline(self.contenders)
        last_call = started + (1 - SHARE_KEPT_FOR_TIMING) * (deadline - started)
        ready: list[Contender] = []
        for contender in sorted(self.contenders, key=self._compiles):
            if ready and self._compiles(contender) and self._station.budget.clock() > last_call:
                # Whoever compiles for minutes takes no time from those that are ready.
                contender.outcome = self._station.budget_skip("before its turn")
                yield self._row(contender)
            elif self._qualify(contender):
                ready.append(contender)
            elif not self._crowded(contender):
                yield self._row(contender)
        yield from self._measured(ready, deadline)
        for contender in [one for one in self.contenders if self._crowded(one)]:
            yield from self._alone(contender)

    def _compiles(self, contender: Contender) -> bool:
        """Its first call may take tens of seconds."""
        case, catalogue = contender.case, self._station.catalogue
        kernel = case.backend is not None and catalogue.backends.get(case.backend).compiles
        return case.optimizations.compile or kernel or catalogue.implementations.get(case.implementation).compiles

    def _crowded(self, contender: Contender) -> bool:
        """Memory ran out while other cases of the cell were there, too: it deserves a try alone."""
        return contender.out_of_memory and not contender.alone and len(self.contenders) > 1

    def _alone(self, contender: Contender) -> Iterator[Row]:
        """Another chance without the rest of the cell in memory: only what does not fit alone has failed."""
        self._station.pool.close()
        contender.home, contender.outcome, contender.out_of_memory, contender.alone = None, None, False, True
        contender.runs.clear()
        message = "measured alone: beside the other cases of its cell it does not fit into memory, so it has no pairs"
        contender.notes.append(Note(code="not_interleaved", message=message))
        if contender.verification is None and not self._qualify(contender):
            yield self._row(contender)
        else:
            yield from self._measured([contender], self._deadline([contender]))

    def _qualify(self, contender: Contender) -> bool:
        """Build and verify it, and see which kernels run; False when that ended the case."""
        station = self._station
        station.progress.stage_started(contender.case, "build")
        if not station.prepare(contender):
            return False
        station.progress.stage_started(contender.case, "verify")
        reply = station.ask(contender, "verify", "verify")
        if reply is None or reply.verification is None:
            return False
        contender.verification = reply.verification
        station.progress.case_verified(contender.case, reply.verification)
        if not reply.verification.passed:
            self._reject(contender, reply.why, reply.verification)
            return False
        return self._check_kernels(contender)

    def _check_kernels(self, contender: Contender) -> bool:
        """Keep the kernel ledger; a row that claims a backend must show one of its kernels."""
        folder = self._station.trace_folder
        arguments = {"trace": str(folder / f"{contender.spec.handle}.trace.json")} if folder else {}
        reply = self._station.ask(contender, "verify", "kernels", **arguments)
        if reply is None:
            return False
        contender.kernels = reply.kernels
        if contender.case.backend is None or contender.verification is None:
            return True
        if not reply.kernels:
            message = "the profiler saw no kernel at all, so that the row's backend is claimed, not shown"
            hint = "CUPTI is missing, not permitted, or in use by another profiler"
            contender.notes.append(Note(code="no_ledger", message=message, hint=hint))
            return True
        why = unproven_backend(self._station.catalogue.backends.get(contender.case.backend), reply.kernels)
        if why is not None:
            self._reject(contender, why, contender.verification)
        return why is None

    def _reject(self, contender: Contender, why: str, verification: Verification) -> None:
        contender.outcome = Failed(stage="verify", why=why, verification=verification)
        self._station.release(contender)

    def _deadline(self, contenders: Sequence[Contender]) -> float:
        """When the fair share of the contenders is over, everything included."""
        budget = self._station.budget
        return budget.clock() + budget.share_s([one.case for one in contenders])

    def _measured(self, contenders: Sequence[Contender], deadline: float) -> Iterator[Row]:
        """Time the contenders, free them, and weigh each: on a CPU in a process of its own."""
        station = self._station
        over_ranks = self.contenders[0].case.world_size > 1 and station.method.max_turns > 0
        diagnosing_share = DIAGNOSING_SHARE if over_ranks else 0.0
        later_calls = MEMORY_CALLS + over_ranks * (CALLS_BEFORE_TURNS + CALLS_PER_TURN * MIN_TURNS)
        on_cuda = station.pool.settings.device == "cuda"
        later_s = sum(later_calls * one.call_ns * 1e-9 + (not on_cuda) * one.fresh_s for one in contenders)
        share_s = max(0.0, deadline - station.budget.clock() - later_s)
        Rounds(station, contenders, self._random).take(station.method.timer, share_s * (1 - diagnosing_share))
        for contender in contenders:
            self._check_samples(contender)
        left = list(contenders)
        try:
            self._recheck([one for one in contenders if one.running])
            self._graph([one for one in contenders if one.running], share_s)
            for contender in contenders:
                if on_cuda and contender.running:
                    self._weigh_here(contender)
            # Last of all: should a part fail and take the ranks along, every row has what it needs.
            if over_ranks:
                self._diagnose([one for one in contenders if one.running], share_s * diagnosing_share)
            for contender in contenders:
                station.release(contender)
            for contender in contenders:
                if contender.running and not on_cuda:
                    self._weigh(contender)
                left.remove(contender)
                if not self._crowded(contender):
                    yield self._row(contender)
        except KeyboardInterrupt:
            # Every row that is left has its samples; a resumed run would only take them again.
            for contender in [one for one in left if one.running]:
                contender.notes.append(_interrupted(contender))
                yield self._row(contender)
            raise

    def _recheck(self, contenders: Sequence[Contender]) -> None:
        """Measure one of them alone."""
        station, timer = self._station, self._station.method.timer
        if not station.method.recheck or len(contenders) < 2 or station.budget.exhausted:
            return
        chosen = self._random.choice(contenders)
        count = max(1, chosen.run_of(timer).samples // max(1, len(chosen.run_of(timer).slots)))
        if not chosen.run_of(timer).slots or not self._affordable(chosen, SLOTS_ALONE * count):
            return
        alone = []
        for _ in range(SLOTS_ALONE):
            reply = station.ask(chosen, "time", "slot", timer=timer.name, count=count)
            if reply is None or reply.slot is None:
                return
            alone.append(reply.slot)
        note = interference(chosen.run_of(timer).locations_ns, alone)
        if note is not None:
            chosen.notes.append(note)

    def _graph(self, contenders: Sequence[Contender], share_s: float) -> None:
        """Time launch-bound calls as CUDA graphs as well."""
        timer = self._station.method.graph_timer
        bound = [
            one
            for one in contenders
            if any(note.code == LAUNCH_BOUND for run in one.runs.values() for note in run.notes)
        ]
        if timer is not None and bound:
            Rounds(self._station, bound, self._random).take(timer, share_s / 4, GRAPH_ROUNDS)

    def _diagnose(self, contenders: Sequence[Contender], share_s: float) -> None:
        """Time the parts of calls over ranks. What goes wrong here is a note: the row was measured before."""
        station = self._station
        for contender in contenders:
            seconds = min(share_s / len(contenders), station.method.sampling_s)
            affordable = seconds * 1e9 / (CALLS_PER_TURN * contender.call_ns)
            turns = int(min(station.method.max_turns, max(MIN_TURNS, affordable)))
            if not self._affordable(contender, CALLS_BEFORE_TURNS + CALLS_PER_TURN * turns):
                contender.notes.append(_undiagnosed("the budget left no time for it"))
                continue
            station.progress.stage_started(contender.case, "time")
            try:
                contender.diagnostics = station.diagnostics(contender, turns)
            except WorkerFailure as failure:
                contender.notes.append(_undiagnosed(failure.why))

    def _check_samples(self, contender: Contender) -> None:
        """A case without samples has no time; one with few says so, and so does one measured on a throttled GPU."""
        if not contender.running:
            return
        run = contender.runs.get(self._station.method.timer.name)
        if run is None or not run.slots:
            unusable = [note.message for note in contender.notes if note.code.endswith("_unusable")]
            skip = self._station.budget_skip("before its first sample")
            contender.outcome = Failed(stage="time", why=unusable[0]) if unusable else skip
            return
        floor = self._station.method.min_samples
        if run.samples < floor:
            message = f"n<{floor}, no CI: the budget ended after {run.samples} samples"
            contender.notes.append(Note(code="few_samples", message=message, observed=run.samples, threshold=floor))
        heated = sum(bool(COOL_DOWN_REASONS.intersection(slot.throttle)) for slot in run.slots) / len(run.slots)
        if heated > THROTTLED_SHARE:
            message = f"the GPU was slowed down by heat or power delivery in {heated:.0%} of the slots"
            hint = "improve cooling or lower the power limit, then repeat"
            contender.notes.append(
                Note(code="throttled", message=message, observed=heated, threshold=THROTTLED_SHARE, hint=hint)
            )

    def _weigh_here(self, contender: Contender) -> None:
        """Peak memory of one call on a GPU: the allocator's count knows what was there before, in any process."""
        if not self._affordable(contender, MEMORY_CALLS):
            contender.notes.append(_unweighed())
            return
        self._station.progress.stage_started(contender.case, "memory")
        reply = self._station.ask(contender, "memory", "memory")
        if reply is not None:
            contender.memory = reply.memory

    def _weigh(self, contender: Contender) -> None:
        """Peak memory of one call in a process where nothing else ran: on a CPU the process is all that is counted."""
        station = self._station
        if not self._affordable(contender, MEMORY_CALLS):
            contender.notes.append(_unweighed())
            return
        station.progress.stage_started(contender.case, "memory")
        contender.alone = True
        try:
            with station.pool.fresh(contender.key) as worker:
                if station.prepare_in(worker, contender, "memory") is None:
                    return
                reply = station.ask_worker(worker, contender, "memory", "memory")
        except WorkerFailure as failure:
            contender.outcome = Failed(stage="memory", why=failure.why, traceback=failure.traceback)
            return
        if reply is not None:
            contender.memory = reply.memory

    def _affordable(self, contender: Contender, calls: int) -> bool:
        return calls * contender.call_ns * 1e-9 < self._station.budget.remaining_s

    def _row(self, contender: Contender) -> Row:
        self._station.budget.done(contender.case)
        return contender.row()


def _interrupted(contender: Contender) -> Note:
    missing = "after its timing" if contender.memory else "before its memory was measured"
    return Note(code="interrupted", message=f"the run was interrupted {missing}")


def _unweighed() -> Note:
    return Note(code="no_memory_pass", message="the budget left no time to measure memory")


def _undiagnosed(why: str) -> Note:
    message = f"communication and computation were not timed alone: {why}"
    return Note(code="undiagnosed", message=message)
