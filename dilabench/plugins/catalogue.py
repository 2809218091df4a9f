"""The catalogue: all registered descriptors, by kind and name."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

from dilabench.choice.descriptors import Backend, Capabilities, Implementation
from dilabench.choice.ways import OverBackend, Registry, Ways
from dilabench.distributed.model import Launches, Sharding
from dilabench.errors import PluginError
from dilabench.patterns.registry import PatternKind
from dilabench.plugins.boundary import Problem, answered, guarded
from dilabench.plugins.descriptors import Reporter, Suite, Timer, WorkloadPreset
from dilabench.workload.spec import Workload

BUILTIN = "builtin"
# The names of dilabench's plug-ins.
OWN = frozenset({BUILTIN, "peers"})


class Catalogue(Ways):
    """All registered descriptors, one registry per kind.

    `problems`: failures of plug-ins, at loading or later; with `strict` they are errors instead.
    `sources`: the package that each plug-in comes from, by the plug-in's name; its name itself if there is none.
    """

    starts_ranks = True

    def __init__(self, strict: bool = False) -> None:
        super().__init__(self._left_out)
        self.strict = strict
        self.problems: list[Problem] = []
        self.sources: dict[str, str] = {}
        self.patterns: Registry[PatternKind] = Registry("pattern", self._left_out)
        self.workloads: Registry[WorkloadPreset] = Registry("workload", self._left_out)
        self.suites: Registry[Suite] = Registry("suite", self._left_out)
        self.reporters: Registry[Reporter] = Registry("reporter", self._left_out)
        self.timers: Registry[Timer] = Registry("timer", self._left_out)
        self._modules: dict[str, ModuleSpec | None] = {}

    def source_of(self, case: OverBackend) -> str | None:
        """The third-party packages of its implementation and backend; None if both are dilabench's."""
        plugins = []
        if case.implementation in self.implementations:
            plugins.append(self.implementations.origin(case.implementation))
        if case.backend is not None and case.backend in self.backends:
            plugins.append(self.backends.origin(case.backend))
        sources = dict.fromkeys(self.sources.get(plugin, plugin) for plugin in plugins if plugin not in OWN)
        return ", ".join(sources) or None

    def _left_out(self) -> Iterable[str]:
        return (problem.plugin for problem in self.problems)

    @contextlib.contextmanager
    def left_out(self, plugin: str, what: str, *, refuses: bool = True) -> Iterator[None]:
        """Run optional code of a plug-in: its PluginError becomes a problem (not if strict)."""
        try:
            with guarded(plugin, what, refuses=refuses):
                yield
        except PluginError as error:
            self.blame(error)

    def blame(self, error: PluginError) -> None:
        """Add a plug-in's error to the problems, once; raise it if strict."""
        if self.strict:
            raise error
        problem = Problem(error.plugin or "?", error.why)
        if problem not in self.problems:
            self.problems.append(problem)

    def find_module(self, name: str) -> ModuleSpec | None:
        """Like `Ways.find_module`, looked for once; exceptions of the module's parents become a PluginError."""
        if name not in self._modules:
            with guarded(name, refuses=False):
                self._modules[name] = find_spec(name)
        return self._modules[name]

    def unsupported(
        self,
        descriptor: Implementation | Backend,
        workload: Workload,
        device: str,
        world_size: int = 1,
        limits: Capabilities | None = None,
    ) -> tuple[str, ...]:
        """Like `Ways.unsupported`; a failing rule of a plug-in is a reason."""
        registry: Registry[Any] = self.backends if isinstance(descriptor, Backend) else self.implementations
        try:
            with guarded(registry.origin(descriptor.name), f"what {descriptor.name!r} supports", refuses=False):
                return super().unsupported(descriptor, workload, device, world_size, limits)
        except PluginError as error:
            if self.strict:
                raise
            return (str(error),)

    def sharding_of(self, implementation: str) -> Sharding | None:
        """Like `Ways.sharding_of`, also None if it cannot be loaded; its formulas are guarded."""
        if implementation not in self.implementations:
            return None
        plugin, what = self.implementations.origin(implementation), f"sharding of {implementation!r}"
        with self.left_out(plugin, what, refuses=False):
            sharding = super().sharding_of(implementation)
            return None if sharding is None else HeldSharding(sharding, plugin, what, self)
        return None


@dataclass(frozen=True, slots=True)
class HeldSharding:
    """A `Sharding` of a plug-in; methods that fail or do not return a number give None."""

    own: Any
    plugin: str
    what: str
    catalogue: Catalogue

    def load_balance(self, workload: Workload, ranks: int) -> float | None:
        """As `Sharding.load_balance`."""
        share: float | None = self._asked("load_balance", workload, ranks)
        return share

    def overlapping_share(self, workload: Workload, ranks: int) -> float | None:
        """As `Sharding.overlapping_share`."""
        share: float | None = self._asked("overlapping_share", workload, ranks)
        return share

    def received_bytes(self, workload: Workload, ranks: int) -> int | None:
        """As `Sharding.received_bytes`."""
        count = self._asked("received_bytes", workload, ranks)
        return None if count is None else int(count)

    def order(self, _workload: Workload) -> None:
        """None: `sequence_shards` cuts for dilabench's own algorithms."""

    def launches(self, workload: Workload, ranks: int) -> Launches:
        """Like `Sharding.launches`; none for a sharding without that method."""
        found = self._asked("launches", workload, ranks, Launches) if hasattr(self.own, "launches") else None
        return found if isinstance(found, Launches) else Launches(0, 0, 0)

    def sums_hops(self, workload: Workload, ranks: int) -> bool:
        """Like `Sharding.sums_hops`; False for an older sharding without that method."""
        return hasattr(self.own, "sums_hops") and self._asked("sums_hops", workload, ranks, bool) is True

    def _asked(self, question: str, workload: Workload, ranks: int, *kinds: type) -> Any:
        with self.catalogue.left_out(self.plugin, self.what, refuses=False):
            wanted = kinds or (float, int, type(None))
            return answered(self.plugin, self.what, getattr(self.own, question), workload, ranks, kind=wanted)
        return None
