"""The longest sequence whose memory plan fits: the same answer from any start, with few traces."""

from collections.abc import Callable

from dilabench.plugins.catalogue import Catalogue
from dilabench.predict.memory.plan import plan_memory, why_no_plan
from dilabench.record import Case
from dilabench.workload.cuts import uncut_step
from dilabench.workload.last_length import last_length
from dilabench.workload.spec import MAX_SEQ_LEN

# Significant bits of a length that is tried, counted in units. A step is one unit, or at most 1 in 256 of the length.
BITS = 9
# If fewer lengths fit at which no segment is cut, lengths between them are tried, too.
SEVERAL = 4

_Point = tuple[int, int]


class _NoPlanError(Exception):
    """A length has no plan; the message says why."""


def longest_that_fits(case: Case, device: str, capacity_bytes: int, catalogue: Catalogue) -> int | str:
    """Return the largest sequence length whose plan fits into `capacity_bytes`, 0 if none fits, or why it is unknown.

    The batch size, heads and branches stay. Packed sequences and a mask from a file have a fixed length. A pattern that
    refuses long sequences may end the search at its longest. The length in `case` is only where the search starts.

    Lengths that cut segments need more memory. If at least four lengths fit at which no rank cuts a segment, the result
    is the longest of them; else it may cut segments. It fits, and a step more does not. A step is at most 1 in 256 of
    the length, or the distance between two lengths without a cut. It is a prediction: `extreme` finds the length by
    real runs.
    """
    workload = case.workload
    if workload.has_given_length:
        return "its sequences have a fixed length"

    def needed(length: int) -> int:
        longer = case.model_copy(update={"workload": workload.replace(seq_len=length)})
        plan = plan_memory(longer, device, catalogue)
        if plan is None:
            raise _NoPlanError(why_no_plan(longer, device, catalogue))
        return plan.peak_bytes

    search = _Search(needed, capacity_bytes, min(last_length(workload), MAX_SEQ_LEN // 2))
    try:
        return search.longest(workload.seq_len, uncut_step(workload, case.world_size))
    except _NoPlanError as error:
        return str(error)


class _Search:
    """Bisection by interpolation: memory is almost proportional to the length. Lengths in tokens, sizes in bytes."""

    def __init__(self, needed: Callable[[int], int], capacity: int, last: int) -> None:
        self._needed, self._capacity, self._last = needed, capacity, last

    def longest(self, start: int, uncut: int) -> int:
        """Return the longest length that fits, preferably a multiple of `uncut`. `start` only gives a first guess."""
        seed = (start, self._needed(start))
        if start * self._capacity // max(1, seed[1]) < uncut:
            (low, _), _ = self._narrowed(1, seed, (0, 0), (MAX_SEQ_LEN, MAX_SEQ_LEN))
            if low < uncut:
                return low
        fits, too_long = self._narrowed(uncut, seed, (0, 0), (MAX_SEQ_LEN, MAX_SEQ_LEN))
        if fits[0] < SEVERAL * uncut:
            fits, _ = self._narrowed(1, seed, fits, too_long)
        return fits[0]

    def _narrowed(self, unit: int, seed: _Point, fits: _Point, too_long: _Point) -> tuple[_Point, _Point]:
        """Narrow two lengths down to neighbours: the first fits, the second does not.

        Only multiples of the unit with few significant bits are tried, which do not depend on earlier ones.
        """
        before = seed
        while True:
            low, high = fits[0], too_long[0]
            following = min(self._last, _rounded(low, unit) + _step(low, unit))
            if low >= self._last or following >= high:
                return fits, too_long
            guess = min(self._guess(before, fits, too_long, _step(low, unit)), high - 1)
            length = self._last if guess >= self._last else max(_rounded(guess, unit), following)
            size = self._needed(length)
            if size <= self._capacity:
                fits = (length, size)
            else:
                before = too_long if too_long[0] < MAX_SEQ_LEN else seed
                too_long = (length, size)

    def _guess(self, before: _Point, fits: _Point, too_long: _Point, step: int) -> int:
        """Return about the length that reaches the capacity."""
        if too_long[0] < MAX_SEQ_LEN:
            near = fits if fits[0] else before
            if (too_long[0] - near[0]) * (too_long[1] - near[1]) <= 0:
                near = fits
            tokens, size = too_long[0] - near[0], too_long[1] - near[1]
            return near[0] + (self._capacity - near[1]) * tokens // size
        if not fits[0]:
            return before[0] * self._capacity // max(1, before[1])
        # One step more, so that the next one may end the search.
        return fits[0] * self._capacity // max(1, fits[1]) + step


def _step(length: int, unit: int) -> int:
    """Return the distance from a length to the next one that may be tried."""
    return unit << max(0, (length // unit).bit_length() - BITS)


def _rounded(length: int, unit: int) -> int:
    """Return the last length up to this one that may be tried."""
    return length // _step(length, unit) * _step(length, unit)
