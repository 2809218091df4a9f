"""The state of one case during a run: what has been measured so far, and the row made of it. No torch."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from dilabench.engine.call.specs import CaseSpec, TimerSpec
from dilabench.engine.worker.client import Worker
from dilabench.engine.worker.warmup import lower_quartile
from dilabench.metadata import UNCHECKED_SAMPLES
from dilabench.record import (
    Case,
    Diagnostic,
    Failed,
    KernelUse,
    Measured,
    Memory,
    Note,
    PlannedCase,
    Row,
    Skipped,
    Slot,
    Timing,
    Verification,
)

# The variation of a process's resident set: threads' heaps, pages of libraries, fragments.
WANDERS_BYTES, WANDERS_SHARE = 8 * 2**20, 0.25


@dataclass(slots=True)
class TimerRun:
    """The samples of one case by one timer. `checked`: sessions in which calls of this timing were checked."""

    timer: TimerSpec
    slots: list[Slot] = field(default_factory=list)
    warmup_ns: tuple[int, ...] = ()
    notes: tuple[Note, ...] = ()
    checked: set[int] = field(default_factory=set)

    @property
    def samples(self) -> int:
        """How many samples were taken."""
        return sum(len(slot.samples_ns) for slot in self.slots)

    @property
    def locations_ns(self) -> list[float]:
        """The lower quartile of each slot, in the order taken."""
        return [lower_quartile(slot.samples_ns) for slot in self.slots]

    @property
    def by_round(self) -> dict[int, float]:
        """The same by the number of the round."""
        return dict(zip((slot.round for slot in self.slots), self.locations_ns, strict=True))

    def timing(self) -> Timing:
        """The timing for the record."""
        return Timing(
            timer=self.timer.name, proves=self.timer.proves, slots=tuple(self.slots), warmup_ns=self.warmup_ns
        )


@dataclass(slots=True, eq=False)
class CaseState:
    """One case of a group. `outcome` is set as soon as it is known to end in no measurement.

    `launch_ns`: what the host took to launch a call of the latest slot. `home` is the worker that has it prepared,
    `warm` the timers that are warmed up there. When the worker dies with another case, this one is prepared again
    elsewhere and a new session begins. `least`: the samples that it got before the other cases of its length, which
    count if there is no time for more; `exceeded_s`: by how much they exceeded the budget. `timed`: its samples are
    complete. `dropped`: samples of processes that ended before their timed calls were checked. `disturbed`: the clock
    of its worker was wrong, which any case of that worker may have caused.
    """

    planned: PlannedCase
    spec: CaseSpec
    key: str
    home: Worker | None = None
    warm: set[str] = field(default_factory=set)
    session: int = 0
    call_ns: int = 1
    launch_ns: int = 0
    isolated: bool = False
    disturbed: bool = False
    setup_ns: dict[str, int] = field(default_factory=dict)
    wall_ns: Counter[str] = field(default_factory=Counter)
    verification: Verification | None = None
    kernels: tuple[KernelUse, ...] = ()
    runs: dict[str, TimerRun] = field(default_factory=dict)
    least: dict[str, TimerRun] = field(default_factory=dict)
    exceeded_s: float = 0.0
    timed: bool = False
    dropped: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    diagnostics: tuple[Diagnostic, ...] = ()
    memory: Memory | None = None
    process_bytes: int | None = None
    notes: list[Note] = field(default_factory=list)
    outcome: Skipped | Failed | None = None

    @property
    def case(self) -> Case:
        """The effective case."""
        return self.planned.case

    @property
    def running(self) -> bool:
        """Whether the case has no outcome yet."""
        return self.outcome is None

    def add_notes(self, notes: Iterable[Note]) -> None:
        """Keep notes that are not there yet."""
        self.notes += [note for note in notes if note not in self.notes]

    def run_of(self, timer: TimerSpec) -> TimerRun:
        """The record of a timer, empty at first."""
        return self.runs.setdefault(timer.name, TimerRun(timer))

    def drop_unchecked(self) -> None:
        """Drop the samples of each session in which no timed call was checked."""
        for run in self.runs.values():
            before = run.samples
            run.slots = [slot for slot in run.slots if slot.session in run.checked]
            self.dropped += before - run.samples

    def row(self) -> Row:
        """The row of the case, with samples only from processes whose timed calls were checked."""
        self.drop_unchecked()
        if self.outcome is not None:
            return Row(planned=self.planned, outcome=self.outcome)
        assert self.verification is not None
        timer_notes = [note for run in self.runs.values() for note in run.notes]
        if self.dropped:
            message = f"{self.dropped} samples were dropped: their worker ended before its timed calls were checked"
            timer_notes.append(UNCHECKED_SAMPLES.note(message, observed=self.dropped))
        measured = Measured(
            verification=self.verification,
            timings=tuple(run.timing() for run in self.runs.values() if run.slots),
            memory=self.memory and _beside_process(self.memory, self.process_bytes),
            kernels=self.kernels,
            setup_ns=self.setup_ns,
            wall_ns=dict(self.wall_ns),
            counters=self.counters,
            diagnostics=self.diagnostics,
            notes=tuple(dict.fromkeys([*timer_notes, *self.notes])),
        )
        return Row(planned=self.planned, outcome=measured)


def _beside_process(memory: Memory, process_bytes: int | None) -> Memory:
    """With the high-water mark of the process, and in the peak what other allocators than torch's gave."""
    if process_bytes is None:
        return memory
    held = sum(part or 0 for part in (memory.inputs_bytes, memory.parameters_bytes, memory.kept_bytes))
    seen = memory.peak_bytes - held
    unseen = process_bytes - seen
    if unseen <= max(WANDERS_BYTES, WANDERS_SHARE * seen):
        unseen = 0
    changes = {
        "process_bytes": process_bytes,
        "peak_bytes": memory.peak_bytes + unseen,
        "workspace_bytes": (memory.workspace_bytes or 0) + unseen,
    }
    return memory.model_copy(update=changes)
