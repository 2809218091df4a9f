"""The messages between the runner and its workers: plain data, checked at both ends. No torch."""

from typing import Any, Literal

from pydantic import Field

from dilabench.record import Diagnostic, KernelUse, Memory, Note, Slot, Verification
from dilabench.validation import Model

CommandName = Literal[
    "prepare",
    "verify",
    "kernels",
    "warm_up",
    "slot",
    "last_slot",
    "diagnose",
    "memory",
    "ceilings",
    "release",
    "isolated",
]
# Codes of `record.FailureCode` that a worker or its absence tells of, and of `record.SkipCode` that one.
TroubleCode = Literal[
    "exception", "crash", "timeout", "out_of_memory", "peer_lost", "out_of_step", "unusable_optimization"
]


class WorkerSettings(Model):
    """How a worker sets its process up: alone, or as one of `world_size` ranks that meet at `store`.

    gpu: the visible GPU that it computes on. store: see `dilabench.distributed.launch.meeting_store`. num_workers: how
    many workers of this machine work at the same time, each on separate cases.
    """

    device: str
    gpu: int = 0
    rank: int = 0
    world_size: int = 1
    store: str = ""
    rank_timeout_s: float = 120.0
    num_workers: int = 1


class Hello(Model):
    """A worker's first words: its process and what its torch is."""

    pid: int
    torch: dict[str, str] = Field(default_factory=dict)


class Command(Model):
    """One request to a worker. timeout_s: limit of the wait for its answer, None for none."""

    name: CommandName
    handle: str = ""
    timeout_s: float | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)


class Trouble(Model):
    """A command that raised inside the worker. `fatal`: the process is of no more use (a sticky CUDA error)."""

    code: TroubleCode = "exception"
    why: str
    traceback: str | None = None
    fatal: bool = False


class Prepared(Model):
    """Set-up times of one case: import, build, first call (ns), and what the call takes now."""

    setup_ns: dict[str, int]
    call_ns: int


class WarmedUp(Model):
    """Warm-up samples of a timer, whether they settled, and what the timer has to say about itself."""

    samples_ns: tuple[int, ...]
    settled: bool
    notes: tuple[Note, ...] = ()
    unusable: str | None = None


class IsolatedResult(Model):
    """The result of an isolated case."""

    verification: Verification
    why: str = ""
    memory: Memory | None = None
    slot: Slot
    notes: tuple[Note, ...] = ()
    setup_ns: dict[str, int] = Field(default_factory=dict)
    counters: dict[str, int] = Field(default_factory=dict)


class RankState(Model):
    """The state that ranks compare after each command.

    shared: a hash of the calls and draws of the command's case. sent, received: (messages, bytes) to and from each rank
    since the ranks met.
    """

    shared: str = ""
    sent: tuple[tuple[int, int], ...] = ()
    received: tuple[tuple[int, int], ...] = ()


class Reply(Model):
    """The answer to a command: the field of the command is set, or `trouble`. state: of a rank.

    process_bytes: peak of the process during calls minus its bytes before them, if measured.
    """

    trouble: Trouble | None = None
    state: RankState | None = None
    hello: Hello | None = None
    prepared: Prepared | None = None
    verification: Verification | None = None
    why: str = ""
    kernels: tuple[KernelUse, ...] = ()
    warmed_up: WarmedUp | None = None
    slot: Slot | None = None
    memory: Memory | None = None
    process_bytes: int | None = None
    isolated: IsolatedResult | None = None
    ceilings: dict[str, float] = Field(default_factory=dict)
    counters: dict[str, int] = Field(default_factory=dict)
    diagnostics: tuple[Diagnostic, ...] = ()
    notes: tuple[Note, ...] = ()
