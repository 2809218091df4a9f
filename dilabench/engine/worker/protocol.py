"""The messages between the runner and its workers: plain data, checked at both ends. No torch."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from dilabench.engine.second_implementation import second_implementations
from dilabench.machine import Machine
from dilabench.patterns.registry import find_kinds_with
from dilabench.plugins.catalogue import Catalogue
from dilabench.record import Case, Diagnostic, KernelUse, Memory, Note, Slot, Verification
from dilabench.validation import Model, content_hash

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


class BackendSpec(Model):
    """The location of a backend's functions."""

    name: str
    target: str
    backward_target: str | None = None
    packed_target: str | None = None
    merging_target: str | None = None
    aligns_ends: bool = False
    places_results: bool = False


class SecondSpec(Model):
    """The location of an implementation that computes the same as a case by other means; `name`: as in the record."""

    name: str
    target: str
    backend: BackendSpec | None = None


class CaseSpec(Model):
    """The facts that a worker needs to build and call one case. Cases of one group have the same seed, so the same
    inputs.

    seconds: implementations that all its rows may be compared with, the first that the oracle confirms
    (engine/verify/confirmed.py).
    """

    case: Case
    target: str
    takes: str = "heads"
    deterministic: bool = False
    backend: BackendSpec | None = None
    seconds: tuple[SecondSpec, ...] = ()
    seed: int = 0

    @property
    def handle(self) -> str:
        """The name of the prepared case inside its worker."""
        return self.case.case_id


class TimerSpec(Model):
    """A timer by name, class and claim. fresh_process: it makes its calls in new processes."""

    name: str
    target: str
    proves: str
    fresh_process: bool = False


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


def case_spec(case: Case, catalogue: Catalogue, seed: int, machine: Machine | None = None) -> CaseSpec:
    """The spec of a case; inputs depend on the run's seed and the group only. Without a machine it has no seconds."""
    implementation = catalogue.implementations.get(case.implementation)
    backend = None
    if case.backend is not None:
        backend = BackendSpec.model_validate(catalogue.backends.get(case.backend), from_attributes=True)
    return CaseSpec(
        case=case,
        target=implementation.target,
        takes=implementation.takes,
        deterministic=implementation.deterministic,
        backend=backend,
        seconds=() if machine is None else tuple(_seconds(case, catalogue, machine)),
        seed=int(content_hash([seed, case.group_id]), 16) % 2**31,
    )


def _seconds(case: Case, catalogue: Catalogue, machine: Machine) -> Iterator[SecondSpec]:
    for implementation, backend in second_implementations(case, catalogue, machine):
        over = None if backend is None else BackendSpec.model_validate(backend, from_attributes=True)
        same = implementation.name == case.implementation and backend is not None
        name = f"{implementation.name} over {backend.name}" if backend and same else implementation.name
        yield SecondSpec(name=name, target=implementation.target, backend=over)


def worker_key(case: Case, catalogue: Catalogue) -> str:
    """The process that a case belongs to: one per plug-in, and one per backend that needs an extra library.

    Libraries that cannot live in one process (xformers and flash-attn 4, say) never meet; built-ins on torch's own
    kernels share a process, so that their samples alternate within milliseconds. '@4' at the end: four ranks.
    """
    origin = catalogue.implementations.origin(case.implementation)
    ranks = f"@{case.world_size}" if case.world_size > 1 else ""
    if case.backend is None:
        return origin + ranks
    backend = catalogue.backends.get(case.backend)
    foreign = catalogue.backends.origin(backend.name)
    parts = [origin, *([foreign] if foreign != origin else []), *([backend.name] if backend.library else [])]
    return "+".join(parts) + ranks


def _discover() -> None:
    # Only a process that meets a plug-in's pattern looks for plug-ins.
    from dilabench.plugins.manager import discover

    discover()


find_kinds_with(_discover)
