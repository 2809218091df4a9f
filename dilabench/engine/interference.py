"""One state measured by itself, to see whether its neighbours in the rounds changed its time. No torch."""

from collections.abc import Sequence
from statistics import median

from dilabench.engine.warmup import lower_quartile
from dilabench.metadata import INTERFERENCE
from dilabench.record import Note, Slot

LEAST_CHANGE = 0.03
ISOLATED_SLOTS = 3
SPREADS = 3.0


def interference(together_ns: Sequence[float], isolated: Sequence[Slot]) -> Note | None:
    """A note when its lower quartiles differ from those in the rounds by over 3 % and three times their spread.

    `together_ns` are the slot locations of the rounds. The spread is their median absolute deviation, relative.
    """
    usual = median(together_ns)
    spread = median(abs(location - usual) for location in together_ns) / usual
    threshold = max(LEAST_CHANGE, SPREADS * spread)
    change = median(lower_quartile(slot.samples_ns) for slot in isolated) / usual - 1
    if abs(change) <= threshold:
        return None
    direction = "slower" if change > 0 else "faster"
    return INTERFERENCE.note(
        f"alone it is {abs(change):.1%} {direction} than in turn with the others of its group",
        observed=change,
        threshold=threshold,
        hint="neighbours share caches, clocks or threads; compare runs of this implementation alone (-i NAME)",
    )
