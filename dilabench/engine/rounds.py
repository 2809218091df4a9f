"""Rounds: every case is sampled once per round, in random order, until the times are known well enough. No torch."""

import random
from collections.abc import Mapping, Sequence
from statistics import median

from dilabench.engine.call.specs import TimerSpec
from dilabench.engine.case_executor import CaseExecutor
from dilabench.engine.case_state import CaseState, TimerRun
from dilabench.engine.device.clocks import COOL_DOWN_REASONS
from dilabench.engine.worker.protocol import TakeSlot
from dilabench.record import Failed, Slot
from dilabench.stats.decisions.paired import MIN_ROUNDS
from dilabench.stats.samples.location import relative_half_width

MIN_SLOT_SAMPLES = 5
# Required precision of ratios: 1 % on a CPU (measurement.md 5.1), below the margin of a verdict, 2 %. At a distance of
# six standard errors, which equal rows do not reach, no more rounds are needed.
SHARE_OF_PRECISION, SHARE_OF_DISTANCE = 0.5, 1 / 3
COOL_DOWN_S = 1.0
# Largest difference between the clocks of a device and of the host.
CLOCKS_APART = 1.02
MAX_COOL_DOWN_S = 10.0


class Rounds:
    """The interleaved measurement of some cases with one timer, so that drift affects all of them alike."""

    def __init__(self, executor: CaseExecutor, states: Sequence[CaseState], order: random.Random) -> None:
        self._executor = executor
        self._states = list(states)
        self._order = order
        self._cooled_s = 0.0

    def take(self, timer: TimerSpec, share_s: float, max_rounds: int | None = None) -> None:
        """Rounds until medians and ratios are known to the method's precision, or the share of time is used up.

        At least `min_samples` are taken of each case, and of several cases the rounds that an interval of their ratios
        needs, unless the budget of the whole run ends. The last call of each case in the last round is checked.
        """
        method, clock = self._executor.method, self._executor.budget.clock
        deadline = clock() + share_s
        running = [state for state in self._states if self._executor.warm_up(state, timer)]
        started = clock()
        share_s = min(max(0.0, deadline - started), method.sampling_s * len(running))
        sizes = self._sizes(running, share_s)
        most, taken = max_rounds or method.max_rounds, 0
        is_last = most == 1
        while running:
            began = clock()
            for position, state in enumerate(self._order.sample(running, len(running))):
                self._turn(state, timer, sizes[id(state)], position, is_last)
            self._executor.next_round += 1
            running = [state for state in running if state.running]
            if is_last or not running:
                break
            taken += 1
            if taken == 1:
                # A first estimate may come from a call in a process that has just started, and be many times too long.
                sizes = self._sizes(running, share_s)
            after_next_s = clock() - started + (clock() - began)
            is_last = taken + 1 == most or self._enough(running, timer, sizes, taken + 1, after_next_s, share_s)

    def _sizes(self, running: Sequence[CaseState], share_s: float) -> dict[int, int]:
        """Samples per slot of each case, which share the time."""
        return {id(state): self.slot_samples(state, share_s / len(running)) for state in running}

    def slot_samples(self, state: CaseState, share_s: float) -> int:
        """Samples per slot: about 10 ms, 5 to 20 samples; fewer if `usual_rounds` of such slots exceed the share. Where
        launches take longer than calls, they are what a sample takes.
        """
        method = self._executor.method
        if method.max_rounds == 1:
            return method.min_samples
        sample_ns = max(state.call_ns, state.launch_ns)
        wanted = min(method.max_slot_samples, max(MIN_SLOT_SAMPLES, method.slot_ns // sample_ns))
        affordable = share_s * 1e9 / (method.usual_rounds * sample_ns)
        return max(1, int(min(wanted, affordable)))

    def _turn(self, state: CaseState, timer: TimerSpec, count: int, position: int, is_last: bool) -> None:
        executor, round_index = self._executor, self._executor.next_round
        run = state.run_of(timer)
        if executor.budget.exhausted and not (is_last and run.slots and executor.is_ready(state, timer)):
            # The budget is used up: a case with samples still gets its last check, but no new worker starts for it.
            return
        # Another case in the same worker may have crashed it.
        if not state.running or not executor.warm_up(state, timer):
            return
        executor.progress.stage_started(state.case, "time")
        started = executor.budget.clock()
        reply = executor.ask(state, "time", TakeSlot(timer=timer.name, count=count, last=is_last))
        took_s = executor.budget.clock() - started
        if reply is None:
            return
        samples_s = sum(reply.slot.samples_ns) * 1e-9
        # A clock that did not advance (`steady` stops one that runs backwards) gives no time.
        if 0 < took_s * CLOCKS_APART < samples_s and not timer.fresh_process:
            why = f"timer {timer.name!r} took samples of {samples_s:.3g} s in {took_s:.3g} s by the runner's clock"
            state.outcome = Failed(stage="time", code="exception", why=why, verification=state.verification)
            state.disturbed = True
            # Any case of this worker may have changed its clock: the others go on in a fresh one.
            assert state.home is not None
            state.home.kill()
            return
        place = {"session": state.session, "round": round_index, "position": position}
        run.slots.append(reply.slot.model_copy(update=place))
        state.call_ns = max(1, min(state.call_ns, *reply.slot.samples_ns))
        state.launch_ns = round(median(reply.slot.enqueue_ns or (0,)))
        run.notes, state.counters = reply.notes, reply.counters
        if reply.verification is not None:
            run.checked.add(state.session)
        executor.judge(state, reply)
        self._cool_down(reply.slot)

    def _enough(
        self,
        running: Sequence[CaseState],
        timer: TimerSpec,
        sizes: Mapping[int, int],
        rounds: int,
        spent_s: float,
        share_s: float,
    ) -> bool:
        """Return True if the rounds up to and including the next one, which would end after `spent_s`, are enough."""
        method, budget = self._executor.method, self._executor.budget
        if budget.exhausted:
            return True
        runs = [state.run_of(timer) for state in running]
        if min(run.samples + sizes[id(state)] for state, run in zip(running, runs, strict=True)) < method.min_samples:
            return False
        if len(running) > 1 and rounds < MIN_ROUNDS:
            # Fewer rounds give no interval of a ratio: a factor of 1.3 would be undecided.
            return False
        if spent_s >= share_s:
            return True
        return rounds >= method.min_rounds and are_precise(runs, method.precision)

    def _cool_down(self, slot: Slot) -> None:
        """Pause after a slot in which heat slowed the GPU down, a bounded number of times."""
        heated = COOL_DOWN_REASONS.intersection(slot.throttle)
        if heated and self._cooled_s < MAX_COOL_DOWN_S and self._executor.budget.remaining_s > COOL_DOWN_S:
            why = f"the GPU slows down ({', '.join(sorted(heated))}); it may cool for a moment"
            self._executor.progress.waiting(why)
            self._executor.sleep(COOL_DOWN_S)
            self._cooled_s += COOL_DOWN_S


def are_precise(runs: Sequence[TimerRun], target: float) -> bool:
    """Return True if the medians of the slot locations are known to a relative half width of `target`. The ratios to
    the fastest must be known to half of it, or to a third of their distance from 1.
    """
    fastest = min(runs, key=lambda run: median(run.locations_ns))
    its_own = fastest.by_round
    if not all(_is_known(run.locations_ns, target) for run in runs):
        return False
    for run in runs:
        ratios = [location / its_own[at] for at, location in run.by_round.items() if at in its_own]
        if run is not fastest and ratios:
            apart = abs(median(ratios) - 1) * SHARE_OF_DISTANCE
            if not _is_known(ratios, max(target * SHARE_OF_PRECISION, apart)):
                return False
    return True


def _is_known(values: Sequence[float], target: float) -> bool:
    width = relative_half_width(values)
    return width is not None and width <= target
