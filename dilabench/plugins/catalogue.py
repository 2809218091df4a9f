"""The catalogue: every descriptor that was found, by kind and name."""

import contextlib
import importlib
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from dilabench.errors import PluginError
from dilabench.machine import Machine
from dilabench.patterns.registry import PatternKind
from dilabench.plugins.boundary import Problem, guarded
from dilabench.plugins.descriptors import (
    Backend,
    Capabilities,
    Implementation,
    Named,
    Reporter,
    Suite,
    Timer,
    WorkloadPreset,
)
from dilabench.plugins.requirements import unmet
from dilabench.plugins.retired import no_such_name
from dilabench.record import Case
from dilabench.workload.spec import Workload

DescriptorT = TypeVar("DescriptorT", bound=Named)


class Registry(Generic[DescriptorT]):
    """The descriptors of one kind, by name and alias. A name that is taken is an error."""

    def __init__(self, kind: str, problems: Iterable[Problem] = ()) -> None:
        self.kind = kind
        self._problems = problems
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
        """The descriptor of a name or alias; raises ConfigError (`no_such_name`) for others."""
        found = self._by_name.get(self._aliases.get(name, name))
        if found is None:
            left_out = (problem.plugin for problem in self._problems)
            raise no_such_name(self.kind, name, [*self._by_name, *self._aliases], left_out=left_out)
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
    """Everything that was found, one registry per kind.

    `problems`: what of plug-ins could not be used, from the start or since; with `strict` it is an error instead.
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.problems: list[Problem] = []
        self.patterns: Registry[PatternKind] = Registry("pattern", self.problems)
        self.implementations: Registry[Implementation] = Registry("implementation", self.problems)
        self.backends: Registry[Backend] = Registry("backend", self.problems)
        self.workloads: Registry[WorkloadPreset] = Registry("workload", self.problems)
        self.suites: Registry[Suite] = Registry("suite", self.problems)
        self.reporters: Registry[Reporter] = Registry("reporter", self.problems)
        self.timers: Registry[Timer] = Registry("timer", self.problems)

    @contextlib.contextmanager
    def left_out(self, plugin: str, what: str) -> Iterator[None]:
        """Run code of a plug-in that the rest can go on without: its PluginError becomes a problem (not if strict)."""
        try:
            with guarded(plugin, what):
                yield
        except PluginError as error:
            self.blame(error)

    def blame(self, error: PluginError) -> None:
        """Keep what a plug-in did wrong among the problems, once; raises the error if strict."""
        if self.strict:
            raise error
        problem = Problem(error.plugin or "?", error.why)
        if problem not in self.problems:
            self.problems.append(problem)

    def reasons_against(self, case: Case, machine: Machine) -> tuple[str, ...]:
        """Why a case cannot run on this machine; empty when nothing known speaks against it."""
        implementation = self.implementations.get(case.implementation)
        device = machine.device
        reasons = self._reasons_here(implementation, case.workload, machine, case.world_size)
        if device == "cuda" and case.world_size > len(machine.gpus):
            reasons.append(f"{case.world_size} ranks need as many GPUs, have {len(machine.gpus)}")
        if case.backend is not None:
            reasons += [f"backend {case.backend}: {why}" for why in self.reasons_against_backend(case, machine)]
        return tuple(reasons)

    def reasons_against_backend(self, case: Case, machine: Machine) -> tuple[str, ...]:
        """Why the case's backend cannot serve it here: what it lacks, and what the workload asks of a dense kernel."""
        assert case.backend is not None
        backend = self.backends.get(case.backend)
        dense = _of_a_kernel(case.workload)
        only: tuple[str, ...] = ()
        if case.implementation in self.implementations:
            implementation = self.implementations.get(case.implementation)
            only = implementation.backends
            if implementation.calls_window:
                dense = dense.model_copy(update={"window": (dense.seq_len, 0 if dense.causal else dense.seq_len)})
        reasons = self._reasons_here(backend, dense, machine)
        if only and backend.name not in only:
            reasons.append(f"{case.implementation} calls only {' or '.join(only)}")
        if case.workload.mode != "forward" and backend.backward_target is None:
            reasons.append(f"mode {case.workload.mode} needs a backward pass, which it lacks")
        return tuple(reasons)

    def _reasons_here(
        self, one: Implementation | Backend, workload: Workload, machine: Machine, world_size: int = 1
    ) -> list[str]:
        """What it requires and this machine lacks, and what the workload asks beyond what it computes.

        Where a missing device has been named already, the workload is held to what it computes on that device: the
        same cause would otherwise be given once more for the device, and again for its dtypes there.
        """
        lacking = unmet(one.requires, machine)
        device: str = machine.device
        if lacking and device not in one.supports.devices:
            device = min(one.supports.devices)
        return [*lacking, *self.unsupported(one, workload, device, world_size)]

    def unsupported(
        self, one: Implementation | Backend, workload: Workload, device: str, world_size: int = 1
    ) -> tuple[str, ...]:
        """Why it cannot compute a workload (`Capabilities.reasons`); a rule of its own that fails is a reason."""
        return self._reasons(one, one.supports, workload, device, world_size)

    def reasons_unasked(self, case: Case, machine: Machine) -> tuple[str, ...]:
        """Why an implementation is not taken unasked for a workload (`Implementation.preferred_for`)."""
        one = self.implementations.get(case.implementation)
        return self._reasons_beyond(one, one.preferred_for, case, machine) or self.reasons_untried(case, machine)

    def reasons_untried(self, case: Case, machine: Machine) -> tuple[str, ...]:
        """Why an implementation, over the backend that is named, is not measured to choose one for a workload
        (`tried_for` of both).
        """
        one = self.implementations.get(case.implementation)
        reasons = self._reasons_beyond(one, one.tried_for, case, machine)
        if reasons or case.backend is None:
            return reasons
        return self.reasons_untried_backend(case, machine)

    def reasons_untried_backend(self, case: Case, machine: Machine) -> tuple[str, ...]:
        """Why the case's backend is not taken unasked for its workload."""
        assert case.backend is not None
        backend = self.backends.get(case.backend)
        called = case.model_copy(update={"workload": _of_a_kernel(case.workload)})
        return self._reasons_beyond(backend, backend.tried_for, called, machine)

    def _reasons_beyond(
        self, one: Implementation | Backend, limits: Capabilities | None, case: Case, machine: Machine
    ) -> tuple[str, ...]:
        if limits is None:
            return ()
        return self._reasons(one, limits, case.workload, machine.device, case.world_size)

    def _reasons(
        self, one: Implementation | Backend, limits: Capabilities, workload: Workload, device: str, world_size: int
    ) -> tuple[str, ...]:
        registry: Registry[Any] = self.backends if isinstance(one, Backend) else self.implementations
        try:
            with guarded(registry.origin(one.name), f"what {one.name!r} supports"):
                return limits.reasons(workload, device, world_size)
        except PluginError as error:
            if self.strict:
                raise
            return (str(error),)

    def preferred_backends(self, machine: Machine) -> tuple[str, ...]:
        """What `auto` may take on this class of device, by falling priority; the first registered before its equals."""
        here = machine.device_class
        stated = [one for one in self.backends if here in one.priority]
        return tuple(one.name for one in sorted(stated, key=lambda one: -one.priority[here]))


def _of_a_kernel(workload: Workload) -> Workload:
    """What a dense kernel is asked for below the workload."""
    return workload.as_dense().model_copy(update={"layout": "padded", "cu_seqlens": None})


def load_target(target: str) -> Any:
    """Import 'package.module:attribute'. Raises PluginError when the text or the attribute is wrong.

    In the main process the caller guards it (`dilabench.plugins.boundary`): importing runs code of the plug-in.
    """
    module_name, _, attribute = target.partition(":")
    if not attribute:
        raise PluginError(f"target {target!r} has no attribute; write 'package.module:name'")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except AttributeError:
        raise PluginError(f"module {module_name!r} has no {attribute!r} (target {target!r})") from None
