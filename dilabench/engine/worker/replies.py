"""The answers of a worker, and how the answers of several ranks become one: times and memory the largest over ranks,
verification the first that failed, other fields rank 0's. No torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field

from dilabench.record import Diagnostic, KernelUse, Memory, Note, Slot, Verification
from dilabench.validation import Model

# The codes of `record.FailureCode` that a worker reports, or that its loss stands for, and one of `record.SkipCode`.
TroubleCode = Literal[
    "exception", "crash", "timeout", "out_of_memory", "peer_lost", "out_of_step", "unusable_optimization"
]


class RankState(Model):
    """The state that ranks compare after each command.

    shared: a hash of the calls and draws of the command's case. sent, received: (messages, bytes) to and from each rank
    since the ranks met.
    """

    shared: str = ""
    sent: tuple[tuple[int, int], ...] = ()
    received: tuple[tuple[int, int], ...] = ()


class Reply(Model):
    """The answer to a command. state: of a rank. notes: on the command's case.

    process_bytes: peak of the process during calls minus its bytes before them, if measured.
    """

    kind: str
    state: RankState | None = None
    notes: tuple[Note, ...] = ()
    process_bytes: int | None = None

    def merged(self, ranks: Sequence[Self]) -> Self:
        """The answer of all ranks, of which this is rank 0's."""
        return self.model_copy(update={"notes": _merged_notes([reply.notes for reply in ranks])})


class Hello(Reply):
    """A worker's first words: its process and what its torch is."""

    kind: Literal["hello"] = "hello"
    pid: int
    torch: dict[str, str] = Field(default_factory=dict)


class Trouble(Reply):
    """A command that raised inside the worker. `fatal`: the process is of no more use (a sticky CUDA error)."""

    kind: Literal["trouble"] = "trouble"
    code: TroubleCode = "exception"
    why: str
    traceback: str | None = None
    fatal: bool = False


class Prepared(Reply):
    """Set-up times of one case: import, build, first call (ns), and what the call takes now."""

    kind: Literal["prepared"] = "prepared"
    setup_ns: dict[str, int]
    call_ns: int

    def merged(self, ranks: Sequence[Self]) -> Self:
        """As of any reply."""
        slowest = max(reply.call_ns for reply in ranks)
        times = {"setup_ns": _largest([reply.setup_ns for reply in ranks]), "call_ns": slowest}
        return super().merged(ranks).model_copy(update=times)


class Verified(Reply):
    """The checks of one call, and why they failed."""

    kind: Literal["verified"] = "verified"
    verification: Verification
    why: str = ""

    def merged(self, ranks: Sequence[Self]) -> Self:
        """As of any reply."""
        return super().merged(ranks).model_copy(update=_first_wrong((reply.verification, reply.why) for reply in ranks))


class Profiled(Reply):
    """The kernels of one call, and its memory, if a profile shows it."""

    kind: Literal["profiled"] = "profiled"
    kernels: tuple[KernelUse, ...] = ()
    memory: Memory | None = None

    def merged(self, ranks: Sequence[Self]) -> Self:
        """As of any reply."""
        return super().merged(ranks).model_copy(update={"memory": _most([reply.memory for reply in ranks])})


class WarmedUp(Reply):
    """Warm-up samples of a timer, whether they settled, and why the timer cannot be used."""

    kind: Literal["warmed_up"] = "warmed_up"
    samples_ns: tuple[int, ...]
    settled: bool
    unusable: str | None = None

    def merged(self, ranks: Sequence[Self]) -> Self:
        """As of any reply. A timer that one rank cannot use is used by none."""
        return next((reply for reply in ranks if reply.unusable), super().merged(ranks))


class Sampled(Reply):
    """The samples of a slot; after the last one also the checks of timed calls."""

    kind: Literal["sampled"] = "sampled"
    slot: Slot
    counters: dict[str, int] = Field(default_factory=dict)
    verification: Verification | None = None
    why: str = ""

    def merged(self, ranks: Sequence[Self]) -> Self:
        """As of any reply."""
        changes = {
            "slot": _slowest([reply.slot for reply in ranks]),
            "counters": _largest([reply.counters for reply in ranks]),
            **_first_wrong((reply.verification, reply.why) for reply in ranks),
        }
        return super().merged(ranks).model_copy(update=changes)


class Diagnosed(Reply):
    """The parts of a call over ranks."""

    kind: Literal["diagnosed"] = "diagnosed"
    diagnostics: tuple[Diagnostic, ...]

    def merged(self, ranks: Sequence[Self]) -> Self:
        """As of any reply."""
        parts = zip(*(reply.diagnostics for reply in ranks), strict=True)
        slowest = tuple(part[0].model_copy(update=_times([rank.samples_ns for rank in part])) for part in parts)
        return super().merged(ranks).model_copy(update={"diagnostics": slowest})


class MemoryMeasured(Reply):
    """The memory of one call, if the device shows it."""

    kind: Literal["memory_measured"] = "memory_measured"
    memory: Memory | None

    def merged(self, ranks: Sequence[Self]) -> Self:
        """As of any reply."""
        return super().merged(ranks).model_copy(update={"memory": _most([reply.memory for reply in ranks])})


class Ceilings(Reply):
    """The highest rates of the device, by name."""

    kind: Literal["ceilings"] = "ceilings"
    ceilings: dict[str, float]


class Isolated(Reply):
    """The result of a case in a process of its own."""

    kind: Literal["isolated"] = "isolated"
    verification: Verification
    why: str = ""
    memory: Memory | None = None
    slot: Slot
    setup_ns: dict[str, int] = Field(default_factory=dict)
    counters: dict[str, int] = Field(default_factory=dict)

    def merged(self, ranks: Sequence[Self]) -> Self:
        """As of any reply."""
        changes = {
            "setup_ns": _largest([reply.setup_ns for reply in ranks]),
            "counters": _largest([reply.counters for reply in ranks]),
            "slot": _slowest([reply.slot for reply in ranks]),
            "memory": _most([reply.memory for reply in ranks]),
            **_first_wrong((reply.verification, reply.why) for reply in ranks),
        }
        return super().merged(ranks).model_copy(update=changes)


class Released(Reply):
    """The memory of a case is free."""

    kind: Literal["released"] = "released"


AnyReply = (
    Hello
    | Trouble
    | Prepared
    | Verified
    | Profiled
    | WarmedUp
    | Sampled
    | Diagnosed
    | MemoryMeasured
    | Ceilings
    | Isolated
    | Released
)


def out_of_step(states: Sequence[RankState | None]) -> str:
    """The disagreement of ranks on draws and calls, or on the messages of a pair; empty if none.

    Ranks that have not met have no state, and so have those that died.
    """
    known = {rank: state for rank, state in enumerate(states) if state is not None}
    if len({state.shared for state in known.values()}) > 1:
        return "ranks have made other calls or drawn other numbers than each other"
    for sender, its in known.items():
        for receiver, theirs in known.items():
            if sender == receiver or not its.sent or not theirs.received:
                continue
            sent, received = its.sent[receiver], theirs.received[sender]
            if sent != received:
                return (
                    f"rank {sender} has sent {sent[0]} messages of {sent[1]} bytes to rank {receiver}, which has "
                    f"received {received[0]} of {received[1]} bytes"
                )
    return ""


def _merged_notes(ranks: Sequence[tuple[Note, ...]]) -> tuple[Note, ...]:
    """One note of each code: the one that observed most, with its rank unless all ranks say the same."""
    by_code: dict[str, dict[int, Note]] = {}
    for rank, notes in enumerate(ranks):
        for note in notes:
            by_code.setdefault(note.code, {}).setdefault(rank, note)
    merged = []
    for noted in by_code.values():
        rank, note = max(noted.items(), key=lambda item: (item[1].observed or 0.0, -item[0]))
        same = len(noted) == len(ranks) and len({rank_note.message for rank_note in noted.values()}) == 1
        merged.append(note if same else note.model_copy(update={"message": f"rank {rank}: {note.message}"}))
    return tuple(merged)


def _first_wrong(ranks: Iterable[tuple[Verification | None, str]]) -> Mapping[str, object]:
    """`verification` and `why` of the first rank whose checks failed; empty if none did."""
    for rank, (verification, why) in enumerate(ranks):
        if verification is not None and not verification.passed:
            return {"verification": verification, "why": f"rank {rank}: {why}" if rank else why}
    return {}


def _most(ranks: Sequence[Memory | None]) -> Memory | None:
    return max((memory for memory in ranks if memory is not None), key=lambda memory: memory.peak_bytes, default=None)


def _slowest(slots: Sequence[Slot]) -> Slot:
    throttle = tuple(dict.fromkeys(reason for slot in slots for reason in slot.throttle))
    times = _times([slot.samples_ns for slot in slots])
    enqueue = _longest([slot.enqueue_ns for slot in slots])
    return slots[0].model_copy(update={**times, "enqueue_ns": enqueue, "throttle": throttle})


def _times(ranks: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """Sample by sample the slowest rank, because ranks start each one together; and the samples of each rank."""
    return {"samples_ns": _longest(ranks), "rank_samples_ns": tuple(ranks)}


def _longest(ranks: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(max(column) for column in zip(*ranks, strict=True))


def _largest(several: Sequence[dict[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(name for counts in several for name in counts)
    return {name: max(counts.get(name, 0) for counts in several) for name in names}
