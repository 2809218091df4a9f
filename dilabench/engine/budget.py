"""Distributes a run's time limit among its cases. No torch."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import inf

from dilabench.record import Case
from dilabench.workload.spec import flops

Clock = Callable[[], float]
# Share of the limit by which the first rows of all lengths together may exceed it, because a busy machine takes longer.
LEAST_ROWS_OVERRUN = 1.0


def steady(clock: Clock = time.monotonic) -> Clock:
    """A clock in seconds that never runs backwards, even if the given one does."""
    latest = -inf

    def read() -> float:
        nonlocal latest
        latest = max(latest, clock())
        return latest

    return read


class Budget:
    """A total in seconds (None: no limit), from `start` on. Time that a case leaves unused goes to the remaining cases.

    Half of the time is shared equally, half in proportion to the work, so that long sequences get more. The least rows
    of lengths may exceed the limit (`for_least_rows`), by LEAST_ROWS_OVERRUN of it.
    """

    def __init__(self, total_s: float | None, cases: Iterable[Case], clock: Clock) -> None:
        self.total_s = total_s
        self.clock = clock
        self._work: dict[str, float] = {}
        self._overrun = 0.0
        self.add(cases)
        self.start()

    def start(self) -> None:
        """Restart the time from now."""
        self._started = self.clock()

    def add(self, cases: Iterable[Case]) -> None:
        """Add cases that share the time."""
        self._work.update({case.case_id: flops(case.workload) for case in cases})

    def done(self, case: Case) -> None:
        """Remove an ended case, which needs no further share."""
        self._work.pop(case.case_id, None)

    @property
    def remaining_s(self) -> float:
        """Seconds left; infinite without a limit, never negative."""
        if self.total_s is None:
            return inf
        return max(0.0, self.total_s * (1 + self._overrun) - (self.clock() - self._started))

    @property
    def exceeded_s(self) -> float:
        """Seconds by which the limit is exceeded; 0 without one."""
        return 0.0 if self.total_s is None else max(0.0, self.clock() - self._started - self.total_s)

    @contextmanager
    def for_least_rows(self) -> Iterator[None]:
        """Inside, time is left until the limit is exceeded by LEAST_ROWS_OVERRUN of it."""
        self._overrun = LEAST_ROWS_OVERRUN
        try:
            yield
        finally:
            self._overrun = 0.0

    @property
    def waiting(self) -> int:
        """The number of cases that have not ended."""
        return len(self._work)

    @property
    def exhausted(self) -> bool:
        """Return True if no time is left."""
        return self.remaining_s <= 0

    def share_s(self, cases: Sequence[Case]) -> float:
        """The fair share of the remaining time for these cases together."""
        remaining = self.remaining_s
        total_work = sum(self._work.values())
        if remaining == inf or not self._work:
            return remaining
        mine = [case.case_id for case in cases if case.case_id in self._work]
        by_number = len(mine) / len(self._work)
        by_work = sum(self._work[case_id] for case_id in mine) / total_work if total_work else by_number
        return remaining * (by_number + by_work) / 2
