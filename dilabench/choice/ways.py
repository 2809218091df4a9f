"""Implementations over backends ("ways"), by name, and the reasons why one cannot compute a workload here.

`own_ways()` returns dilabench's, from which the library chooses. The benchmark's catalogue adds the ways of plug-ins
(`dilabench.plugins.catalogue`).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from dilabench.choice.backends import BACKENDS
from dilabench.choice.descriptors import Backend, Capabilities, Implementation, load_target, unmet
from dilabench.choice.implementations import IMPLEMENTATIONS
from dilabench.errors import PluginError
from dilabench.machine import Machine
from dilabench.patterns.dense import DENSE
from dilabench.retired import no_such_name
from dilabench.workload.spec import UNBOUNDED, Workload

if TYPE_CHECKING:
    from dilabench.distributed.model import Sharding

OWNER = "dilabench"


class Named(Protocol):
    """Fields of every descriptor."""

    @property
    def name(self) -> str: ...
    @property
    def summary(self) -> str: ...
    @property
    def aliases(self) -> tuple[str, ...]: ...


DescriptorT = TypeVar("DescriptorT", bound=Named)


class OverBackend(Protocol):
    """An implementation, over a backend if it calls one."""

    @property
    def implementation(self) -> str: ...
    @property
    def backend(self) -> str | None: ...


class Candidate(OverBackend, Protocol):
    """An implementation, over a backend if it calls one, for a workload on a number of ranks."""

    @property
    def workload(self) -> Workload: ...
    @property
    def world_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Way:
    """A `Candidate` of the library."""

    implementation: str
    backend: str | None
    workload: Workload
    world_size: int = 1


def way_name(of: OverBackend) -> str:
    """'strided:math', or 'fused', which takes no backend."""
    return f"{of.implementation}:{of.backend}" if of.backend else of.implementation


class Registry(Generic[DescriptorT]):
    """The descriptors of one kind, by name and alias. A name that is taken is an error.

    `left_out` returns the names of plug-ins that could not be loaded: an unknown name may belong to one of them.
    """

    def __init__(self, kind: str, left_out: Callable[[], Iterable[str]] = tuple) -> None:
        self.kind = kind
        self._left_out = left_out
        self._by_name: dict[str, DescriptorT] = {}
        self._aliases: dict[str, str] = {}
        self._origin: dict[str, str] = {}

    def add(self, descriptor: DescriptorT, origin: str) -> None:
        """Register a descriptor; raises PluginError when its name or an alias is taken."""
        self.refuse_taken((descriptor,), origin)
        self._by_name[descriptor.name] = descriptor
        self._origin[descriptor.name] = origin
        self._aliases.update(dict.fromkeys(descriptor.aliases, descriptor.name))

    def refuse_taken(self, descriptors: Iterable[DescriptorT], origin: str) -> None:
        """Raise PluginError when a name or an alias of these is taken, by another plug-in or by one of them."""
        theirs: set[str] = set()
        for descriptor in descriptors:
            names = (descriptor.name, *descriptor.aliases)
            for name in names:
                owner = origin if name in theirs else self._origin.get(self._aliases.get(name, name))
                if owner is not None:
                    raise PluginError(
                        f"{self.kind} {name!r} of plug-in {origin!r} is already registered by {owner!r}; "
                        "rename it or uninstall one of the two"
                    )
            theirs.update(names)

    def get(self, name: str) -> DescriptorT:
        """The descriptor of a name or alias; raises ConfigError (`no_such_name`) for others."""
        descriptor = self._by_name.get(self._aliases.get(name, name))
        if descriptor is None:
            raise no_such_name(self.kind, name, [*self._by_name, *self._aliases], left_out=self._left_out())
        return descriptor

    def origin(self, name: str) -> str:
        """The plug-in that registered it."""
        return self._origin[self.get(name).name]

    def __iter__(self) -> Iterator[DescriptorT]:
        return iter(self._by_name.values())

    def __contains__(self, name: str) -> bool:
        return name in self._by_name or name in self._aliases

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def names(self) -> tuple[str, ...]:
        """All names in the order of registration, without aliases."""
        return tuple(self._by_name)


NO_STEPS = "it computes attention, not a step of a model"
ONLY_STEPS = "it computes a step of a model, and the workload has none: `dilabench run model`"


class Ways:
    """Implementations and backends, and why one of them cannot, or should not, compute a workload on a machine.

    `starts_ranks`: ranks are started on this machine, each on a GPU. Otherwise they run already, and this process may
    not see their GPUs: each may see only its own, or run on another node.
    """

    starts_ranks = False

    def __init__(self, left_out: Callable[[], Iterable[str]] = tuple) -> None:
        self.implementations: Registry[Implementation] = Registry("implementation", left_out)
        self.backends: Registry[Backend] = Registry("backend", left_out)

    def reasons_against(self, way: Candidate, machine: Machine) -> tuple[str, ...]:
        """Return why it cannot run on this machine; empty if no reason is known."""
        implementation = self.implementations.get(way.implementation)
        reasons = self._reasons_here(implementation, way.workload, machine, way.world_size)
        if self.starts_ranks and machine.device == "cuda" and way.world_size > len(machine.gpus):
            reasons.append(f"{way.world_size} ranks need as many GPUs, have {len(machine.gpus)}")
        if way.backend is not None:
            reasons += [f"backend {way.backend}: {why}" for why in self.reasons_against_backend(way, machine)]
        return tuple(reasons)

    def reasons_against_backend(self, way: Candidate, machine: Machine, name: str | None = None) -> tuple[str, ...]:
        """Return why a backend (by default the way's) cannot serve it here: unmet requirements, and what the workload
        needs of a dense kernel.
        """
        backend = self.backends.get(name or way.backend or "")
        dense = of_a_kernel(way.workload)
        only: tuple[str, ...] = ()
        if way.implementation in self.implementations:
            implementation = self.implementations.get(way.implementation)
            only = implementation.backends
            if implementation.calls_window:
                dense = dense.model_copy(update={"window": (dense.seq_len, 0 if dense.causal else dense.seq_len)})
            if implementation.calls_ahead and way.world_size > 1 and dense.window != UNBOUNDED:
                dense = dense.replace(window=(dense.window[0], dense.seq_len), causal=False)
        reasons = self._reasons_here(backend, dense, machine)
        if only and backend.name not in only:
            reasons.append(f"{way.implementation} calls only {' or '.join(only)}")
        if way.workload.mode != "forward" and backend.backward_target is None:
            reasons.append(f"mode {way.workload.mode} needs a backward pass, which it lacks")
        return tuple(reasons)

    def _reasons_here(
        self, descriptor: Implementation | Backend, workload: Workload, machine: Machine, world_size: int = 1
    ) -> list[str]:
        """Return unmet requirements of the machine, and needs of the workload that exceed the capabilities.

        If a missing device is among them, the workload is checked for that device, so that the same cause is not
        repeated for the device and for its dtypes.
        """
        lacking = unmet(descriptor.requires, machine, self.find_module)
        device: str = machine.device
        if lacking and machine.facts.word not in descriptor.supports.devices:
            device = min(descriptor.supports.devices)
        return [*lacking, *self.unsupported(descriptor, workload, device, world_size)]

    def find_module(self, name: str) -> ModuleSpec | None:
        """The spec of a module, None if it is not installed. Importing its parents may raise anything."""
        return find_spec(name)

    def unsupported(
        self,
        descriptor: Implementation | Backend,
        workload: Workload,
        device: str,
        world_size: int = 1,
        limits: Capabilities | None = None,
    ) -> tuple[str, ...]:
        """Return why it cannot compute a workload, or why the workload exceeds `limits` (`Capabilities.reasons`)."""
        if isinstance(descriptor, Implementation) and (descriptor.takes == "model") != (workload.model is not None):
            return (NO_STEPS if workload.model else ONLY_STEPS,)
        return (limits or descriptor.supports).reasons(workload, device, world_size)

    def reasons_unasked(self, way: Candidate, machine: Machine) -> tuple[str, ...]:
        """Return why `auto` does not take an implementation for a workload (`Implementation.preferred_for`)."""
        implementation = self.implementations.get(way.implementation)
        return self._reasons_beyond(implementation, implementation.preferred_for, way, machine) or self.reasons_untried(
            way, machine
        )

    def reasons_untried(self, way: Candidate, machine: Machine) -> tuple[str, ...]:
        """Return why a choice by measurement skips an implementation over the named backend (`tried_for` of both)."""
        implementation = self.implementations.get(way.implementation)
        reasons = self._reasons_beyond(implementation, implementation.tried_for, way, machine)
        if reasons or way.backend is None:
            return reasons
        return self.reasons_untried_backend(way, machine)

    def reasons_untried_backend(self, way: Candidate, machine: Machine, name: str | None = None) -> tuple[str, ...]:
        """Return why `auto` does not take a backend (by default the way's) for the workload."""
        backend = self.backends.get(name or way.backend or "")
        of_kernel = of_a_kernel(way.workload).model_copy(update={"query_len": way.workload.query_len})
        called = Way(way.implementation, backend.name, of_kernel, way.world_size)
        return self._reasons_beyond(backend, backend.tried_for, called, machine)

    def _reasons_beyond(
        self, descriptor: Implementation | Backend, limits: Capabilities | None, way: Candidate, machine: Machine
    ) -> tuple[str, ...]:
        if limits is None:
            return ()
        return self.unsupported(descriptor, way.workload, machine.device, way.world_size, limits)

    def preferred_backends(self, machine: Machine) -> tuple[str, ...]:
        """Return the backends that `auto` may take on this class of device, by falling priority, then registration."""
        here = machine.device_class
        stated = [backend for backend in self.backends if here in backend.priority]
        return tuple(backend.name for backend in sorted(stated, key=lambda backend: -backend.priority[here]))

    def choose_backend(self, way: Candidate, machine: Machine) -> tuple[str | None, str]:
        """Resolve backend `auto` for a way here: the one of highest priority that supports it and is tried for it.

        If none is tried for it, the first that supports it. The second value gives the reasons against the preceding
        ones.
        """
        against: list[str] = []
        able: str | None = None
        for name in self.preferred_backends(machine):
            reasons = self.reasons_against_backend(way, machine, name)
            if not reasons:
                able = able or name
                reasons = self.reasons_untried_backend(way, machine, name)
            if not reasons:
                return name, "; ".join(against)
            against.append(f"{name}: {', '.join(reasons)}")
        return able, "; ".join(against) or "none has a priority on this class of device"

    def sharding_of(self, implementation: str) -> "Sharding | None":
        """Return the implementation's sharding; None if it has none or is unknown."""
        if implementation not in self.implementations:
            return None
        target = self.implementations.get(implementation).sharding
        sharding: Sharding | None = load_target(target) if target else None
        return sharding


def of_a_kernel(workload: Workload) -> Workload:
    """Return the workload of the dense kernel that computes a part of this workload.

    Implementations give a kernel no mask over fewer queries than keys that it does not align.
    """
    return workload.model_copy(update={"pattern": DENSE, "layout": "padded", "cu_seqlens": None, "query_len": None})


@cache
def own_ways(over_ranks: bool = False) -> Ways:
    """Return dilabench's backends and implementations on one device; with `over_ranks` those over ranks, too."""
    ways = Ways()
    implementations: tuple[Implementation, ...] = IMPLEMENTATIONS
    if over_ranks:
        from dilabench.choice.rings import RINGS

        implementations += RINGS
    for implementation in implementations:
        ways.implementations.add(implementation, OWNER)
    for backend in BACKENDS:
        ways.backends.add(backend, OWNER)
    return ways
