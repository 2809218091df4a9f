"""`plan --check`: the traced peak of each case beside the one that the engine measures."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from dilabench.cli.terminal import Lines, say
from dilabench.engine.worker.outcomes import memory_in
from dilabench.errors import ExitCode
from dilabench.predict.memory import WITHIN, plan_memory
from dilabench.record import Failed, Memory, PlannedCase, Skipped
from dilabench.suites.planner import Planner
from dilabench.units import format_bytes

COLUMNS = ("traced", "measured", "traced/measured", "")


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes of a case as traced (None: no trace) and as measured, or why they were not measured."""

    planned: PlannedCase
    traced: int | None
    outcome: Memory | Skipped | Failed

    @property
    def measured(self) -> int | None:
        """Bytes on the device at the fullest moment of a call; over ranks, of the rank that needed most."""
        return self.outcome.peak_bytes if isinstance(self.outcome, Memory) else None

    @property
    def ratio(self) -> float | None:
        """Traced over measured; None without one of them."""
        return self.traced / self.measured if self.traced is not None and self.measured else None

    @property
    def is_off(self) -> bool:
        """Whether the trace lies too far from the measurement."""
        return self.ratio is not None and abs(self.ratio - 1) > WITHIN

    def as_data(self) -> dict[str, Any]:
        """What the check adds to the plan of the case."""
        why = None if isinstance(self.outcome, Memory) else self.outcome.why
        return {"measured_peak_bytes": self.measured, "traced_over_measured": self.ratio, "why_not_measured": why}


def peaks_of(
    planned: Sequence[PlannedCase], planner: Planner, capacity: int | None, budget_s: float | None
) -> Iterator[Peak]:
    """Each case with its measured peak, one after another; none is begun that does not fit or after the budget."""
    from dilabench.engine.worker.client import WorkerPool
    from dilabench.engine.worker.protocol import WorkerSettings
    from dilabench.engine.worker.rank_group import start_worker

    started = monotonic()
    pool = WorkerPool(WorkerSettings(device=planner.machine.device), start_worker)
    try:
        for one in planned:
            plan = plan_memory(one.case, planner.machine.device, planner.catalogue)
            traced = None if plan is None else plan.peak_bytes
            skip = one.skip or _shortage(traced, capacity)
            if skip is None and budget_s is not None and monotonic() - started > budget_s:
                skip = Skipped(code="budget", why="no time left; allow more with --budget")
            outcome = skip or memory_in(pool, one.case, planner.catalogue, planner.request.seed)
            if isinstance(outcome, Failed):
                # What it left on the device is not the next one's.
                pool.close()
            yield Peak(one, traced, outcome)
    finally:
        pool.close()


def _shortage(traced: int | None, capacity: int | None) -> Skipped | None:
    if traced is None or capacity is None or traced <= capacity:
        return None
    return Skipped(code="does_not_fit", why=f"does not fit into {format_bytes(capacity)}")


def show_peaks(
    peaks: Iterable[Peak], columns: Sequence[str], heads: Sequence[Sequence[str]], no_trace: str
) -> list[Peak]:
    """A line per case, as soon as it is known, and what it comes to. `heads` name the cases."""
    lines, shown = Lines((*columns, *COLUMNS), heads), []
    for head, one in zip(heads, peaks, strict=True):
        shown.append(one)
        traced = no_trace if one.traced is None else format_bytes(one.traced)
        if isinstance(one.outcome, Memory):
            ratio = "-" if one.ratio is None else f"{one.ratio:.3f}"
            lines.print((*head, traced, format_bytes(one.outcome.peak_bytes), ratio, "OFF" if one.is_off else ""))
        else:
            lines.print((*head, traced, "-", "-", f"{one.outcome.status}: {one.outcome.why}"))
    ratios = [one.ratio for one in shown if one.ratio is not None]
    counts = Counter(type(one.outcome) for one in shown)
    say(
        f"{len(ratios)} peaks traced and measured, {sum(one.is_off for one in shown)} of them off by more than "
        f"{WITHIN:.0%}, largest deviation {max((abs(ratio - 1) for ratio in ratios), default=0.0):.1%}; "
        f"{counts[Failed]} failed, {counts[Skipped]} skipped"
    )
    return shown


def verdict(peaks: Iterable[Peak]) -> ExitCode:
    """5 when a trace is off, 4 when a case failed, 8 when nothing could be compared."""
    peaks = tuple(peaks)
    if any(one.is_off for one in peaks):
        return ExitCode.WRONG_OUTPUT
    if any(isinstance(one.outcome, Failed) for one in peaks):
        return ExitCode.CASE_FAILED
    return ExitCode.OK if any(one.ratio is not None for one in peaks) else ExitCode.NOTHING_MEASURED
