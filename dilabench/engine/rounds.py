"""Rounds: every case is sampled once per round, in random order, until the times are known well enough. No torch."""

import random
from collections.abc import Sequence

from dilabench.engine.case_state import CaseState, TimerRun
from dilabench.engine.device.clocks import COOL_DOWN_REASONS
from dilabench.engine.driver import Driver
from dilabench.engine.worker.protocol import TimerSpec
from dilabench.record import Slot
from dilabench.stats.samples.precision import relative_half_width

MIN_SLOT_SAMPLES = 5
COOL_DOWN_S = 1.0
MAX_COOL_DOWN_S = 10.0


class Rounds:
    """The interleaved measurement of some cases with one timer, so that drift affects all of them alike."""

    def __init__(self, driver: Driver, states: Sequence[CaseState], order: random.Random) -> None:
        self._driver = driver
        self._states = list(states)
        self._order = order
        self._cooled_s = 0.0

    def take(self, timer: TimerSpec, share_s: float, max_rounds: int | None = None) -> None:
        """Rounds until every median is known to the method's precision, or the share of time is used up.

        At least `min_samples` are taken of each case, whatever the share, unless the budget of the whole run ends.
        """
        method, clock = self._driver.method, self._driver.budget.clock
        deadline = clock() + share_s
        running = [one for one in self._states if self._driver.warm_up(one, timer)]
        started = clock()
        share_s = min(max(0.0, deadline - started), method.sampling_s * len(running))
        sizes = self._sizes(running, share_s)
        for taken in range(1, (max_rounds or method.max_rounds) + 1):
            for position, one in enumerate(self._order.sample(running, len(running))):
                self._turn(one, timer, sizes[id(one)], self._driver.next_round, position)
            self._driver.next_round += 1
            running = [one for one in running if one.running]
            if taken == 1:
                # A first estimate may be of a call in a process that had just begun, many times too long.
                sizes = self._sizes(running, share_s)
            if not running or self._enough(running, timer, taken, clock() - started, share_s):
                break
        for one in running:
            if one.run_of(timer).slots:
                self._driver.confirm(one, timer)

    def _sizes(self, running: Sequence[CaseState], share_s: float) -> dict[int, int]:
        """Samples per turn of each case, which share the time."""
        return {id(one): self.slot_samples(one, share_s / len(running)) for one in running}

    def slot_samples(self, state: CaseState, share_s: float) -> int:
        """Samples per turn: about 10 ms of them, 5 to 20; fewer where `min_rounds` of such turns exceed the share."""
        method = self._driver.method
        if method.max_rounds == 1:
            return method.min_samples
        wanted = min(method.max_slot_samples, max(MIN_SLOT_SAMPLES, method.slot_ns // state.call_ns))
        affordable = share_s * 1e9 / (method.min_rounds * state.call_ns)
        return max(1, int(min(wanted, affordable)))

    def _turn(self, state: CaseState, timer: TimerSpec, count: int, round_index: int, position: int) -> None:
        # Another case in the same worker may have crashed it.
        if self._driver.budget.exhausted or not state.running or not self._driver.warm_up(state, timer):
            return
        self._driver.progress.stage_started(state.case, "time")
        reply = self._driver.ask(state, "time", "slot", timer=timer.name, count=count)
        if reply is None or reply.slot is None:
            return
        run = state.run_of(timer)
        place = {"session": state.session, "round": round_index, "position": position}
        run.slots.append(reply.slot.model_copy(update=place))
        state.call_ns = max(1, min(state.call_ns, *reply.slot.samples_ns))
        run.notes, state.counters = reply.notes, reply.counters
        self._driver.progress.slot_done(state.case, round_index)
        self._driver.judge(state, reply)
        self._cool_down(reply.slot)

    def _enough(
        self, running: Sequence[CaseState], timer: TimerSpec, rounds: int, spent_s: float, share_s: float
    ) -> bool:
        method, budget = self._driver.method, self._driver.budget
        if budget.exhausted:
            return True
        runs = [one.run_of(timer) for one in running]
        if min(run.samples for run in runs) < method.min_samples:
            return False
        if spent_s >= share_s:
            return True
        return rounds >= method.min_rounds and all(is_precise(run, method.precision) for run in runs)

    def _cool_down(self, slot: Slot) -> None:
        """Pause after a slot in which heat slowed the GPU down, a bounded number of times."""
        heated = COOL_DOWN_REASONS.intersection(slot.throttle)
        if heated and self._cooled_s < MAX_COOL_DOWN_S and self._driver.budget.remaining_s > COOL_DOWN_S:
            self._driver.progress.waiting(f"the GPU slows down ({', '.join(sorted(heated))}); it may cool for a moment")
            self._driver.sleep(COOL_DOWN_S)
            self._cooled_s += COOL_DOWN_S


def is_precise(run: TimerRun, target: float) -> bool:
    """The median of the slot locations is known to a relative half width of `target`."""
    width = relative_half_width(run.locations_ns)
    return width is not None and width <= target
