"""Reasons to doubt a measured row: other kernels ran, its time is impossible, neighbours changed it. No torch."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from dilabench.engine.worker.warmup import lower_quartile
from dilabench.machine import device_named
from dilabench.metadata import (
    ABOVE_PEAK_BANDWIDTH,
    ABOVE_PEAK_FLOPS,
    INTERFERENCE,
    NOTES,
    SLOW_RANK,
    WORK_KEPT,
    peak_bandwidth,
    peak_flops,
)
from dilabench.plugins.descriptors import Backend
from dilabench.record import Case, KernelUse, Measured, Note, Row, Slot, Timing
from dilabench.units import format_latency
from dilabench.workload.lower_bounds import least_bytes, least_flops

SHOWN = 5
LEAST_CHANGE = 0.03
ISOLATED_SLOTS = 3
SPREADS = 3.0
# Samples on wholly new inputs may take this many times as long, because caches are cold. The second value: the
# probability that chance makes as many of them longer.
KEPT_FACTOR, KEPT_CHANCE = 1.5, 1e-5
# How many times the median of the others' time the slowest rank may take.
SLOW_RANK_FACTOR = 2.0


def suspicions(row: Row, ceilings: Mapping[str, float], device: str) -> tuple[Note, ...]:
    """Notes on a measured row, from the ceilings measured on this device.

    Other lengths of the same implementation give no tighter bound. If the device is busy in a share b of a shorter
    call, W times the work takes at least W b times as long, which is the ceiling again.
    """
    if not isinstance(row.outcome, Measured) or not row.outcome.timings:
        return ()
    seconds = typical_seconds(row.outcome)
    kept = (note for timing in row.outcome.timings for note in _work_kept(timing))
    return (*_above_peak(row.case, seconds, ceilings, device), *kept, *_slow_rank(row.outcome.timings[0]))


def typical_seconds(measured: Measured) -> float:
    """The median of the first timing."""
    return median(measured.timings[0].samples_ns) * 1e-9


def _above_peak(case: Case, seconds: float, ceilings: Mapping[str, float], device: str) -> Iterable[Note]:
    facts, workload = device_named(device), case.workload
    margin = facts.above_peak
    # Ranks have a GPU each, and share one processor.
    seconds *= case.world_size if facts.own_memory else 1
    hint = "part of the work was not done, was cached, or ran elsewhere; do not quote this time"
    limits = [(ABOVE_PEAK_FLOPS, least_flops(workload), peak_flops(ceilings, workload.dtype))]
    if facts.own_memory:
        limits.append((ABOVE_PEAK_BANDWIDTH, float(least_bytes(workload)), peak_bandwidth(ceilings)))
    for kind, work, ceiling in limits:
        if ceiling and work / seconds > margin * ceiling:
            yield kind.note(
                f"{work / seconds:.3g} {kind.unit} is more than this device can do ({ceiling:.3g} measured)",
                observed=work / seconds,
                threshold=margin * ceiling,
                hint=hint,
            )


def _slow_rank(timing: Timing) -> Iterator[Note]:
    """A note if the slowest rank takes `SLOW_RANK_FACTOR` times the median of the other ranks."""
    medians_ns = timing.rank_medians_ns
    if len(medians_ns) < 2:
        return
    slowest = max(range(len(medians_ns)), key=medians_ns.__getitem__)
    usual_ns = median(time_ns for rank, time_ns in enumerate(medians_ns) if rank != slowest)
    factor = medians_ns[slowest] / usual_ns
    if factor >= SLOW_RANK_FACTOR:
        yield SLOW_RANK.note(
            f"rank {slowest} takes {format_latency(medians_ns[slowest])}, the others {format_latency(usual_ns)}",
            observed=factor,
            threshold=SLOW_RANK_FACTOR,
            hint="λ shows whether its work is larger; else its host launches more slowly or its device is busy",
        )


def _work_kept(timing: Timing) -> Iterator[Note]:
    """A note if samples on wholly new inputs, or after a row of each has changed, take longer than their neighbours.

    A neighbour of the first kind has at most one new row, one of the second kind none. A sample is compared with the
    longer of its neighbours in the slot, because the load varies. If all three are alike, the middle one is the longest
    in a third of cases.
    """
    renewed = [(slot.samples_ns, slot.renewed, {*slot.renewed}) for slot in timing.slots]
    changed = [(slot.samples_ns, slot.changed, {*slot.renewed, *slot.changed}) for slot in timing.slots]
    for what, slots in (("on new inputs", renewed), ("on inputs of which a row has changed", changed)):
        factors = [
            samples[at] / max(samples[at - 1], samples[at + 1])
            for samples, places, new in slots
            for at in places
            if 0 < at < len(samples) - 1 and not {at - 1, at + 1}.intersection(new)
        ]
        longer = sum(factor > KEPT_FACTOR for factor in factors)
        number = len(factors)
        chance = sum(math.comb(number, k) * 2 ** (number - k) for k in range(longer, number + 1)) / 3**number
        if longer and chance < KEPT_CHANCE and median(factors) > KEPT_FACTOR:
            yield WORK_KEPT.note(
                f"calls {what} take {median(factors):.2g} times as long as those before and after them",
                observed=median(factors),
                threshold=KEPT_FACTOR,
                hint="results or parts of them were kept from earlier calls; do not quote this time",
            )
            return


def unproven_backend(backend: Backend, kernels: Iterable[KernelUse], notes: Iterable[Note] = ()) -> str | None:
    """Why the kernels that ran do not show this backend at work; None when one does, or when it names no kernels.

    If a note of the row says that other kernels compute in its place, these must show.
    """
    names = [use.name for use in kernels]
    instead = [kind for note in notes if (kind := NOTES.get(note.code)) is not None and kind.kernels]
    patterns = instead[0].kernels if instead else backend.kernels
    if not patterns or any(re.search(pattern, name) for pattern in patterns for name in names):
        return None
    wanted, ran = " or ".join(patterns), ", ".join(names[:SHOWN]) or "none"
    claimed = instead[0].key if instead else backend.name
    return f"claims {claimed} but no such kernel ran: expected a match of {wanted}; ran: {ran}"


def interference(together_ns: Sequence[float], isolated: Sequence[Slot]) -> Note | None:
    """A note when its own lower quartiles differ from those in the rounds by over 3 % and three times their spread.

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
        f"alone it is {abs(change):.1%} {direction} than interleaved with its group",
        observed=change,
        threshold=threshold,
        hint="neighbours share caches, clocks or threads; compare runs of this implementation alone (-i NAME)",
    )
