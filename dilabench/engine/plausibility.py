"""Times that cannot be: faster than the device's own ceilings, or growing more slowly than the work. No torch."""

from collections.abc import Iterable, Mapping
from statistics import median

from dilabench.engine.device.peak_names import COPY_KEY, matmul_key
from dilabench.engine.lower_bounds import least_bytes, least_flops
from dilabench.metadata import ABOVE_PEAK_BANDWIDTH, ABOVE_PEAK_FLOPS, GROWS_TOO_SLOWLY
from dilabench.record import Case, Measured, Note, Row
from dilabench.workload.work import flops

ABOVE_PEAK = {"cpu": 1.5, "cuda": 1.1}
SATURATED = 0.5
SLOWER_GROWTH = 1.5
SAME_EXCEPT = {"seq_len", "batch_size", "cu_seqlens"}


def suspicions(row: Row, earlier: Iterable[Row], ceilings: Mapping[str, float], device: str) -> tuple[Note, ...]:
    """Notes on a measured row, from the ceilings measured on this device and the rows before it."""
    if not isinstance(row.outcome, Measured) or not row.outcome.timings:
        return ()
    seconds = typical_seconds(row.outcome)
    notes = [*_above_peak(row.case, seconds, ceilings, device)]
    notes += _too_flat(row, seconds, earlier, ceilings)
    return tuple(notes)


def typical_seconds(measured: Measured) -> float:
    """The median of the first timing."""
    return median(measured.timings[0].samples_ns) * 1e-9


def _above_peak(case: Case, seconds: float, ceilings: Mapping[str, float], device: str) -> Iterable[Note]:
    on_cuda = device.startswith("cuda")
    margin, workload = ABOVE_PEAK["cuda" if on_cuda else "cpu"], case.workload
    # Ranks have a GPU each, and share one processor.
    seconds *= case.world_size if on_cuda else 1
    hint = "part of the work was not done, was cached, or ran elsewhere; do not quote this time"
    limits = [(ABOVE_PEAK_FLOPS, least_flops(workload), ceilings.get(matmul_key(workload.dtype)))]
    if on_cuda:
        limits.append((ABOVE_PEAK_BANDWIDTH, float(least_bytes(workload)), ceilings.get(COPY_KEY)))
    for kind, work, ceiling in limits:
        if ceiling and work / seconds > margin * ceiling:
            yield kind.note(
                f"{work / seconds:.3g} {kind.unit} is more than this device can do ({ceiling:.3g} measured)",
                observed=work / seconds,
                threshold=margin * ceiling,
                hint=hint,
            )


def _too_flat(row: Row, seconds: float, earlier: Iterable[Row], ceilings: Mapping[str, float]) -> Iterable[Note]:
    """Against shorter runs of the same implementation that already kept the device busy."""
    ceiling = ceilings.get(matmul_key(row.case.workload.dtype))
    if not ceiling:
        return
    work = flops(row.case.workload)
    for other in earlier:
        if (
            not isinstance(other.outcome, Measured)
            or not other.outcome.timings
            or not same_but_length(row.case, other.case)
        ):
            continue
        other_work, other_seconds = flops(other.case.workload), typical_seconds(other.outcome)
        busy = other_work / other_seconds / ceiling
        if work <= other_work or busy < SATURATED:
            continue
        growth, wanted = seconds / other_seconds, work / other_work
        if growth * SLOWER_GROWTH < wanted:
            yield GROWS_TOO_SLOWLY.note(
                (
                    f"{wanted:.3g} times the work of {other.case.workload.label()} takes {growth:.3g} times as long, "
                    f"though that kept the device {busy:.0%} busy"
                ),
                observed=growth,
                threshold=wanted / SLOWER_GROWTH,
                hint="part of the longer sequence may not be computed; do not quote this time",
            )
            return


def same_but_length(one: Case, other: Case) -> bool:
    """Two cases that differ in sequence length and batch size alone."""
    if one.model_copy(update={"workload": other.workload}) != other:
        return False
    return one.workload.model_dump(exclude=SAME_EXCEPT) == other.workload.model_dump(exclude=SAME_EXCEPT)
