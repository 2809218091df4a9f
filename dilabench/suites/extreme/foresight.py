"""The next length of a search for the longest sequence, from predictions of memory and time.

On a GPU traces are right within a few percent, so that two real runs, at the longest length that should fit and
one step above it, replace a bisection. A trace that a run has contradicted is no longer used.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isqrt

from dilabench.machine import Machine
from dilabench.plugins.catalogue import Catalogue
from dilabench.predict.memory import plan_memory
from dilabench.predict.time import plan_time
from dilabench.record import Case

# Calls that take longer than this are not tried only because they would fit: lengths are doubled as usual.
MAX_CALL_S = 5.0


def between(low: int, high: int, step: int) -> int | None:
    """The next length of a bisection, a multiple of the step; None if there is none between.

    The middle; in a wide gap (after a leap that was too long) the geometric middle.
    """
    middle = (isqrt(low * high) if high > 4 * low else (low + high) // 2) // step * step
    return middle if low < middle < high and high - low > step else None


@dataclass(frozen=True, slots=True)
class Foresight:
    """cases_at: the cases at a length. available: bytes that a case may use. step: of the search, at a length."""

    cases_at: Callable[[int], Sequence[Case]]
    machine: Machine
    catalogue: Catalogue
    available: int
    step: Callable[[int], int]

    def fits(self, length: int) -> bool:
        """Return True if the length should fit; False without a trace."""
        plans = [plan_memory(case, self.machine.device, self.catalogue) for case in self.cases_at(length)]
        return bool(plans) and all(plan is not None and plan.peak_bytes <= self.available for plan in plans)

    def agrees(self, fitting: Iterable[int], too_long: Iterable[int]) -> bool:
        """Return True if the predictions agree with the outcomes at these lengths."""
        return all(self.fits(length) for length in fitting) and not any(self.fits(length) for length in too_long)

    def leap(self, length: int, longest: int) -> int:
        """Double `length` while it should fit, up to the longest requested one."""
        while length < longest and self._possible(min(2 * length, longest)):
            length = min(2 * length, longest)
        return length

    def better(self, low: int, too_long: int | None, longest: int, length: int) -> int:
        """The length to try instead of `length`: above `low`, which ran, below `too_long`, at most `longest`."""
        high = longest if too_long is None else min(too_long, longest)
        if too_long is None and self._possible(longest):
            return longest
        possible = self._longest_possible(low, high)
        if possible > low:
            return possible
        above = low + self.step(low)
        return above if above < high and not self.fits(above) else length

    def _longest_possible(self, low: int, high: int) -> int:
        """The longest length from `low` on and below `high`, to a step."""
        while 2 * low < high and self._possible(2 * low):
            low *= 2
        high = min(2 * low, high)
        while (middle := between(low, high, self.step(low))) is not None:
            low, high = (middle, high) if self._possible(middle) else (low, middle)
        return low

    def _possible(self, length: int) -> bool:
        cores = os.cpu_count() or 1
        return self.fits(length) and all(
            plan_time(case, self.machine, cores).seconds <= MAX_CALL_S for case in self.cases_at(length)
        )
