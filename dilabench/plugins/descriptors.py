"""Descriptors of everything that can be found, and the catalogue that holds them.

A descriptor names its target as 'package.module:attribute', so that listing imports nothing heavy.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from dilabench.errors import PluginError, unknown_name
from dilabench.machine import Machine
from dilabench.record import Case
from dilabench.workload.cuts import why_not_apart
from dilabench.workload.spec import Workload

ALL_DTYPES = frozenset({"float64", "float32", "float16", "bfloat16"})
ALL_MODES = frozenset({"forward", "backward", "both"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an implementation or backend computes; `reasons` says what a workload asks beyond that.

    `check` may add a rule of its own: it takes the workload and returns the reason against it, or None. `check_ranks`
    is one for so many ranks. `parts_apart`: the part of each must need nothing of the others (`cuts.cut_apart`).
    `on_cuda` holds instead of all of this on CUDA, for a kernel that differs between the two kinds of device.
    """

    patterns: frozenset[str] = frozenset({"dilated"})
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    dtypes: frozenset[str] = ALL_DTYPES
    modes: frozenset[str] = ALL_MODES
    layouts: frozenset[str] = frozenset({"padded"})
    merge_grads: frozenset[str] = frozenset({"exact"})
    causal: frozenset[bool] = frozenset({True, False})
    window: bool = True
    gqa: bool = True
    grouped_heads: bool = True
    head_dim_multiple: int = 1
    max_head_dim: int | None = None
    max_world_size: int | None = 1
    parts_apart: bool = False
    check: Callable[[Workload], str | None] | None = None
    check_ranks: Callable[[Workload, int], str | None] | None = None
    on_cuda: "Capabilities | None" = None

    def reasons(self, workload: Workload, device: str, world_size: int = 1) -> tuple[str, ...]:
        """Why this workload cannot be computed on this kind of device ('cpu' or 'cuda'); empty when it can."""
        holding = self.on_cuda if device == "cuda" and self.on_cuda is not None else self
        return tuple(holding._reasons(workload, device, world_size))

    def _reasons(self, workload: Workload, device: str, world_size: int) -> Iterator[str]:
        asked_and_offered: tuple[tuple[str, Any, frozenset[Any]], ...] = (
            ("pattern", workload.pattern.kind, self.patterns),
            ("device", device, self.devices),
            ("dtype", workload.dtype, self.dtypes),
            ("mode", workload.mode, self.modes),
            ("layout", workload.layout, self.layouts),
            ("causal", workload.causal, self.causal),
        )
        for name, asked, offered in asked_and_offered:
            if asked not in offered:
                yield f"{name} {asked} is not supported (has {', '.join(sorted(map(str, offered)))})"
        if not self.window and workload.window != (-1, -1):
            yield f"window {workload.window} is not supported"
        if not self.gqa and workload.num_kv_heads != workload.num_heads:
            yield f"num_kv_heads {workload.num_kv_heads} below num_heads {workload.num_heads} is not supported"
        if workload.head_dim % self.head_dim_multiple:
            yield f"head_dim {workload.head_dim} is not a multiple of {self.head_dim_multiple}"
        if self.max_head_dim is not None and workload.head_dim > self.max_head_dim:
            yield f"head_dim {workload.head_dim} is above {self.max_head_dim}"
        if self.max_world_size is not None and world_size > self.max_world_size:
            yield f"runs on {self.max_world_size} device, not on {world_size}"
        if self.parts_apart and world_size > 1 and (reason := why_not_apart(workload, world_size)):
            yield reason
        if (dilated := workload.dilated) is not None:
            if dilated.heads == "grouped" and not self.grouped_heads:
                yield "grouped heads are not supported"
            if dilated.merge_grad not in self.merge_grads and workload.mode != "forward":
                yield f"merge_grad {dilated.merge_grad} is not supported"
        if self.check is not None and (reason := self.check(workload)):
            yield reason
        if self.check_ranks is not None and (reason := self.check_ranks(workload, world_size)):
            yield reason


# What a dense attention kernel can be asked for, unless it says otherwise.
DENSE_KERNEL = Capabilities(patterns=frozenset({"dense"}))


class Named(Protocol):
    """What every descriptor has."""

    @property
    def name(self) -> str: ...
    @property
    def summary(self) -> str: ...
    @property
    def aliases(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class Implementation:
    """A way to compute a workload. `target` is its `build(workload, context) -> AttentionFn`.

    `uses_backend`: it calls a dense kernel given by the context (and then one row per backend makes sense); `backends`
    names the only ones that it can call, where it cannot call any.
    `takes` says what a call receives: 'heads' is q, k, v of [B, N, H, D]; 'embeddings' is [B, N, E], a module
    with projections around the attention. Rows that take different things are never ranked together.
    `compiles`: the first call at each shape takes tens of seconds. Its cases are built last in their group, and a suite
    over many lengths has it only by name.
    """

    name: str
    summary: str
    target: str
    supports: Capabilities = field(default_factory=Capabilities)
    requires: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    uses_backend: bool = False
    backends: tuple[str, ...] = ()
    takes: str = "heads"
    deterministic: bool = False
    compiles: bool = False
    quirks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Backend:
    """A dense attention kernel. `target` is its `attend`, `backward_target` its `attend_backward`.

    `kernels`: regular expressions, one of which must match a kernel in the profile of a row that claims this backend on
    CUDA. `compiles`: as for an implementation. `aligns_ends`, `places_results`: as in `contracts.LoadedBackend`.
    """

    name: str
    summary: str
    target: str
    backward_target: str | None = None
    supports: Capabilities = DENSE_KERNEL
    requires: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    compiles: bool = False
    aligns_ends: bool = False
    places_results: bool = False


@dataclass(frozen=True, slots=True)
class WorkloadPreset:
    """A named workload: fields of WorkloadRequest. `members` names other presets instead, for a set."""

    name: str
    summary: str
    fields: dict[str, Any] = field(default_factory=dict)
    members: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Suite:
    """A question. `target` is `expand(request, planner) -> Sequence[PlannedCase]`; see docs/reference/hooks.md.

    `follow_up` (optional) is `follow_up(rows, request, planner) -> Sequence[PlannedCase]`: called when all cases have
    ended, it may ask for more, as a bisection does; an empty answer ends the run.
    `budget_s` is the time that a run takes at most when the user sets no budget; None sets no limit. `timing` is how
    cases are timed when the user does not say.
    `analysis` (optional) is `analyse(record) -> Sequence[Section]` (`dilabench.report.findings`): what the reporters
    print beside the table, derived from the raw samples whenever the record is looked at.
    `projections` (optional) is `project(record) -> Sequence[dict]`: what would be beyond what was measured. It is kept
    in the record apart from the rows, and no table of measurements shows it.
    """

    name: str
    summary: str
    target: str
    follow_up: str | None = None
    analysis: str | None = None
    projections: str | None = None
    budget_s: float | None = None
    timing: str = "warmup"
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reporter:
    """A rendering of a RunRecord. `target` is `render(record, folder) -> str | None`.

    It returns the text to print; it may also write `filename` (and what belongs to it) into `folder` when not None.
    With `shows_sections` it is called as `render(record, folder, sections)`, with what the suite's analysis found. One
    with `prints=False` has files only: `report` gives it the run's own folder when none is named.
    """

    name: str
    summary: str
    target: str
    filename: str | None = None
    shows_sections: bool = False
    prints: bool = True
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Timer:
    """A way to take samples. `target` is a class as described in `dilabench.engine.timers`; `proves` is its claim."""

    name: str
    summary: str
    target: str
    proves: str
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    aliases: tuple[str, ...] = ()


DescriptorT = TypeVar("DescriptorT", bound=Named)


class Registry(Generic[DescriptorT]):
    """The descriptors of one kind, by name and alias. A name that is taken is an error."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._by_name: dict[str, DescriptorT] = {}
        self._aliases: dict[str, str] = {}
        self._origin: dict[str, str] = {}

    def add(self, descriptor: DescriptorT, origin: str) -> None:
        """Add a descriptor; raises PluginError when its name or an alias is taken."""
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
        dense = case.workload.replace(pattern={"kind": "dense"}, layout="padded", cu_seqlens=None)
        reasons = [*unmet(backend.requires, machine), *backend.supports.reasons(dense, machine.device)]
        if case.implementation in self.implementations:
            only = self.implementations.get(case.implementation).backends
            if only and backend.name not in only:
                reasons.append(f"{case.implementation} calls only {' or '.join(only)}")
        if case.workload.mode != "forward" and backend.backward_target is None:
            reasons.append(f"mode {case.workload.mode} needs a backward pass, which it lacks")
        return tuple(reasons)


_REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9_.-]+?)\s*(?:>=\s*(?P<version>[A-Za-z0-9.]+))?$")


def unmet(requires: Iterable[str], machine: Machine) -> tuple[str, ...]:
    """Requirements that this machine does not meet, each with what is there instead.

    Forms: 'cuda', 'cuda>=sm80', 'cpu', 'gpus>=2', 'module' or 'module>=1.2' (an importable module and the version of
    its distribution), 'some-distribution>=1.2' (a name with a dash is an installed distribution, for modules that
    several distributions share), and alternatives as in 'cuda>=sm80|cpu'.
    """
    return tuple(reason for requirement in requires if (reason := _unmet_alternatives(requirement, machine)))


def _unmet_alternatives(requirement: str, machine: Machine) -> str | None:
    reasons = [_unmet(alternative, machine) for alternative in requirement.split("|")]
    return None if None in reasons else " or ".join(str(reason) for reason in reasons)


def _unmet(requirement: str, machine: Machine) -> str | None:
    match = _REQUIREMENT.match(requirement)
    if match is None:
        return f"requirement {requirement!r} cannot be read; write 'cuda>=sm80' or 'module>=1.2'"
    name, version = match["name"], match["version"]
    if name == "cuda":
        return _unmet_cuda(version, machine)
    if name == "cpu":
        return None if machine.device == "cpu" else f"needs cpu, have {machine.device}"
    if name == "gpus":
        needed = int(version or 1)
        return None if len(machine.gpus) >= needed else f"needs {needed} GPUs, have {len(machine.gpus)}"
    return _unmet_distribution(name, version) if "-" in name else _unmet_module(name, version)


def _unmet_cuda(version: str | None, machine: Machine) -> str | None:
    if machine.device != "cuda":
        return f"needs cuda, have {machine.device}" + (f" ({machine.no_cuda})" if machine.no_cuda else "")
    if version:
        needed = int(version.removeprefix("sm"))
        if machine.compute_capability < needed:
            return f"needs cuda sm{needed} or newer, have sm{machine.compute_capability}"
    return None


def _unmet_distribution(name: str, version: str | None) -> str | None:
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"distribution {name} is not installed"
    if version is not None and _version_key(installed) < _version_key(version):
        return f"needs {name} {version} or newer, have {installed}"
    return None


def _unmet_module(name: str, version: str | None) -> str | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        return f"module {name} is broken: {error}"
    if spec is None:
        return f"module {name} is not installed"
    if version is None:
        return None
    top = name.partition(".")[0]
    distributions = _distributions_by_module().get(top, [top])
    try:
        installed = importlib.metadata.version(distributions[0])
    except importlib.metadata.PackageNotFoundError:
        return f"module {name} has no version, {version} or newer is needed"
    if _version_key(installed) < _version_key(version):
        return f"needs {name} {version} or newer, have {installed}"
    return None


@functools.cache
def _distributions_by_module() -> Mapping[str, list[str]]:
    # Reads what every installed distribution lists: a tenth of a second, and asked for by every case of a plan.
    return importlib.metadata.packages_distributions()


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def load_target(target: str) -> Any:
    """Import 'package.module:attribute'. Raises PluginError when the text or the attribute is wrong."""
    module_name, _, attribute = target.partition(":")
    if not attribute:
        raise PluginError(f"target {target!r} has no attribute; write 'package.module:name'")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except AttributeError:
        raise PluginError(f"module {module_name!r} has no {attribute!r} (target {target!r})") from None
