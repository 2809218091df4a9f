"""The catalogue: every descriptor that was found, by kind and name."""

import importlib
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from dilabench.errors import PluginError, unknown_name
from dilabench.machine import Machine
from dilabench.patterns.registry import PatternKind
from dilabench.plugins.descriptors import Backend, Implementation, Named, Reporter, Suite, Timer, WorkloadPreset
from dilabench.plugins.requirements import unmet
from dilabench.record import Case

DescriptorT = TypeVar("DescriptorT", bound=Named)


class Registry(Generic[DescriptorT]):
    """The descriptors of one kind, by name and alias. A name that is taken is an error."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._by_name: dict[str, DescriptorT] = {}
        self._aliases: dict[str, str] = {}
        self._origin: dict[str, str] = {}

    def add(self, descriptor: DescriptorT, origin: str) -> None:
        """Put a descriptor on the shelf; raises PluginError when its name or an alias is taken."""
        for name in (descriptor.name, *descriptor.aliases):
            if name in self._by_name or name in self._aliases:
                owner = self._origin[self._aliases.get(name, name)]
                raise PluginError(
                    f"{self.kind} {name!r} of plug-in {origin!r} is already registered by {owner!r}; "
                    "rename it or uninstall one of the two"
                )
        self._by_name[descriptor.name] = descriptor
        self._origin[descriptor.name] = origin
        self._aliases.update(dict.fromkeys(descriptor.aliases, descriptor.name))

    def get(self, name: str) -> DescriptorT:
        """The descriptor of a name or alias; raises ConfigError with the nearest names when there is none."""
        found = self._by_name.get(self._aliases.get(name, name))
        if found is None:
            raise unknown_name(self.kind, name, [*self._by_name, *self._aliases])
        return found

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


class Catalogue:
    """Everything that was found, one registry per kind."""

    def __init__(self) -> None:
        self.patterns: Registry[PatternKind] = Registry("pattern")
        self.implementations: Registry[Implementation] = Registry("implementation")
        self.backends: Registry[Backend] = Registry("backend")
        self.workloads: Registry[WorkloadPreset] = Registry("workload")
        self.suites: Registry[Suite] = Registry("suite")
        self.reporters: Registry[Reporter] = Registry("reporter")
        self.timers: Registry[Timer] = Registry("timer")

    def reasons_against(self, case: Case, machine: Machine) -> tuple[str, ...]:
        """Why a case cannot run on this machine; empty when nothing known speaks against it."""
        implementation = self.implementations.get(case.implementation)
        device = machine.device
        reasons = [*unmet(implementation.requires, machine)]
        reasons += implementation.supports.reasons(case.workload, device, case.world_size)
        if device == "cuda" and case.world_size > len(machine.gpus):
            reasons.append(f"{case.world_size} ranks need as many GPUs, have {len(machine.gpus)}")
        if case.backend is not None:
            reasons += [f"backend {case.backend}: {why}" for why in self.reasons_against_backend(case, machine)]
        return tuple(reasons)

    def reasons_against_backend(self, case: Case, machine: Machine) -> tuple[str, ...]:
        """Why the case's backend cannot serve it here: what it lacks, and what the workload asks of a dense kernel."""
        assert case.backend is not None
        backend = self.backends.get(case.backend)
        dense = case.workload.as_dense().model_copy(update={"layout": "padded", "cu_seqlens": None})
        reasons = [*unmet(backend.requires, machine), *backend.supports.reasons(dense, machine.device)]
        if case.implementation in self.implementations:
            only = self.implementations.get(case.implementation).backends
            if only and backend.name not in only:
                reasons.append(f"{case.implementation} calls only {' or '.join(only)}")
        if case.workload.mode != "forward" and backend.backward_target is None:
            reasons.append(f"mode {case.workload.mode} needs a backward pass, which it lacks")
        return tuple(reasons)

    def preferred_backends(self, machine: Machine) -> tuple[str, ...]:
        """What `auto` may take on this class of device, by falling priority; the first registered before its equals."""
        here = machine.device_class
        stated = [one for one in self.backends if here in one.priority]
        return tuple(one.name for one in sorted(stated, key=lambda one: -one.priority[here]))


def load_target(target: str) -> Any:
    """Import 'package.module:attribute'. Raises PluginError when the text or the attribute is wrong."""
    module_name, _, attribute = target.partition(":")
    if not attribute:
        raise PluginError(f"target {target!r} has no attribute; write 'package.module:name'")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except AttributeError:
        raise PluginError(f"module {module_name!r} has no {attribute!r} (target {target!r})") from None
