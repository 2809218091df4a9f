"""One state measured alone, to see whether its neighbours in the rounds changed its time. No torch."""

from collections.abc import Sequence
from statistics import median

from dilabench.engine.warmup import lower_quartile
from dilabench.record import Note, Slot

INTERFERENCE = 0.03
SLOTS_ALONE = 3
SPREADS = 3.0


def interference(together_ns: Sequence[float], alone: Sequence[Slot]) -> Note | None:
    """A note when lower quartiles alone differ from those in the rounds by over 3 % and three times their spread.

    `together_ns` are the slot locations of the rounds. The spread is their median absolute deviation, relative.
    """
    usual = median(together_ns)
    spread = median(abs(location - usual) for location in together_ns) / usual
    threshold = max(INTERFERENCE, SPREADS * spread)
    change = median(lower_quartile(slot.samples_ns) for slot in alone) / usual - 1
    if abs(change) <= threshold:
        return None
    direction = "slower" if change > 0 else "faster"
    return Note(
        code="interference",
        message=f"alone it is {abs(change):.1%} {direction} than in turn with the others of its group",
        observed=change,
        threshold=threshold,
        hint="neighbours share caches, clocks or threads; compare runs of this implementation alone (-i NAME)",
    )
