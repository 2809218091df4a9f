"""Descriptors of implementations and backends: what is known about each, and what it requires of a machine.

A descriptor names its target as 'package.module:attribute', so that listing imports nothing heavy. It checks its own
fields when it is made and raises PluginError with its name and the field's. `unmet` says which requirements a machine
does not meet, and imports nothing to find out.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from typing import Annotated, Any, Literal, Protocol, get_args

import pydantic.dataclasses
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator

from dilabench.errors import PluginError
from dilabench.kernels.cpu.compiled import why_unavailable
from dilabench.machine import CPU, CUDA, CXX_COMPILERS, WORDS, DeviceClass, Machine, cxx_compiler, device_named
from dilabench.patterns.dense import DENSE
from dilabench.validation import (
    CHECKED,
    Count,
    Name,
    Priority,
    Target,
    among,
    defined,
    readable,
    refused,
    shown,
)
from dilabench.workload.cuts import why_not_apart
from dilabench.workload.spec import DEFAULT_PATTERN, DType, Layout, Mode, Workload

# What a row is among the rows next to it; `Implementation` says what each means.
Role = Literal["oracle", "plain", "method", "yardstick"]
# What a call receives: q, k, v of heads, or embeddings.
Takes = Literal["heads", "embeddings"]

# The patterns of what works from `Pattern.counts` alone.
ANY_PATTERN = frozenset({"*"})
ALL_DTYPES = frozenset(get_args(DType))
ALL_MODES = frozenset(get_args(Mode))

FindModule = Callable[[str], ModuleSpec | None]
_REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9_.+-]+?)\s*(?:>=\s*(?P<version>[A-Za-z0-9.]+))?$")
# The forms that a version may have where it is none.
_VERSIONS = {"cuda": r"(sm\d{2,3})?", "gpus": r"\d{0,4}", "c++": ""}
NOT_PACKAGES = frozenset({*_VERSIONS, "cpu"})
UNREADABLE = "cannot be read; write 'cuda>=sm80' or 'module>=1.2'"


def _name_and_version(alternative: str) -> tuple[str, str | None] | None:
    """Split 'module>=1.2' into the name and the version; None if it is in none of the forms of `unmet`."""
    match = _REQUIREMENT.match(alternative)
    if match is None:
        return None
    name, version = match["name"], match["version"]
    try:
        form = _VERSIONS.get(name)
        readable = re.fullmatch(form, version or "") if form is not None else version is None or Version(version)
    except InvalidVersion:
        return None
    return (name, version) if readable else None


def _is_requirement(value: str) -> str:
    if None in map(_name_and_version, value.split("|")):
        raise refused(f"{value!r} {UNREADABLE}")
    return value


def _is_expression(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise refused(f"{value!r} is no regular expression: {error}") from None
    return value


Requirement = Annotated[str, AfterValidator(_is_requirement)]
Expression = Annotated[str, AfterValidator(_is_expression)]
Devices = Annotated[frozenset[str], among(WORDS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an implementation or backend computes; `reasons` says what a workload asks beyond that.

    `check` may add a rule of its own: it takes the workload and returns the reason against it, or None. `check_ranks`
    is one for so many ranks. `parts_apart`: the part of each must need nothing of the others (`cuts.cut_apart`).
    `patterns=ANY_PATTERN`: whatever pattern it is, but sums of several attentions only with `sums`. `on_cuda` holds
    instead of all of this on CUDA, for a kernel that differs between the two kinds of device. `devices`: 'cpu', 'cuda',
    and 'accelerator' for any other that `torch.accelerator` knows. Fields are checked by the descriptor that has them.
    """

    patterns: frozenset[str] = frozenset({DEFAULT_PATTERN})
    devices: Devices = frozenset({"cpu", "cuda"})
    dtypes: Annotated[frozenset[str], among(ALL_DTYPES)] = ALL_DTYPES
    modes: Annotated[frozenset[str], among(ALL_MODES)] = ALL_MODES
    layouts: Annotated[frozenset[str], among(frozenset(get_args(Layout)))] = frozenset({"padded"})
    merge_grads: Annotated[frozenset[str], among(frozenset({"exact", "detached"}))] = frozenset({"exact"})
    causal: frozenset[bool] = frozenset({True, False})
    window: bool = True
    gqa: bool = True
    grouped_heads: bool = True
    zero_keys: bool = False
    sums: bool = False
    head_dim_multiple: Count = 1
    max_head_dim: Count | None = None
    max_world_size: Count | None = 1
    parts_apart: bool = False
    check: Callable[[Workload], str | None] | None = None
    check_ranks: Callable[[Workload, int], str | None] | None = None
    on_cuda: "Capabilities | None" = None

    def computes(self, pattern: str) -> bool:
        """Whether a kind of pattern is among those supported."""
        return bool(self.patterns & {pattern, *ANY_PATTERN})

    @property
    def only_dense(self) -> bool:
        """Whether nothing but dense attention is."""
        return self.patterns == {DENSE.kind}

    def reasons(self, workload: Workload, device: str, world_size: int = 1) -> tuple[str, ...]:
        """Why this workload cannot be computed on this kind of device ('cpu', 'cuda', 'mps'); empty when it can.

        Raises what the rules of its own raise, and PluginError for one that returns anything but a text or None.
        """
        holding = self.on_cuda if device == CUDA.name and self.on_cuda is not None else self
        return tuple(holding._reasons(workload, device, world_size))

    def _reasons(self, workload: Workload, device: str, world_size: int) -> Iterator[str]:
        facts = device_named(device)
        asked_and_offered: tuple[tuple[str, Any, frozenset[Any]], ...] = (
            ("pattern", workload.pattern.kind, self.patterns),
            ("device", facts.word if facts.word in self.devices else facts.name, self.devices),
            ("dtype", workload.dtype, self.dtypes),
            ("mode", workload.mode, self.modes),
            ("layout", workload.layout, self.layouts),
            ("causal", workload.causal, self.causal),
        )
        for name, asked, offered in asked_and_offered:
            if asked not in offered and "*" not in offered:
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
        if workload.pattern.has_grouped_heads and not self.grouped_heads:
            yield "grouped heads are not supported"
        if workload.pattern.has_zero_keys and not self.zero_keys:
            yield "attended zero keys are not supported"
        named = workload.pattern.kind in self.patterns
        if not named and not self.sums and workload.pattern.summands(workload.shapes[0]):
            yield "a sum of several attentions, each with a softmax of its own, is not supported"
        merge_grad = "detached" if workload.pattern.is_detached else "exact"
        if merge_grad not in self.merge_grads and workload.mode != "forward":
            yield f"merge_grad {merge_grad} is not supported"
        for rule, arguments in ((self.check, (workload,)), (self.check_ranks, (workload, world_size))):
            reason = None if rule is None else rule(*arguments)
            if not isinstance(reason, str | None):
                raise PluginError(f"{defined(rule)} returned {shown(reason)}; it must return a reason against, or None")
            if reason:
                yield reason


# What a dense attention kernel can be asked for, unless it says otherwise.
DENSE_KERNEL = Capabilities(patterns=frozenset({DENSE.kind}))


class Named(Protocol):
    """What every descriptor has."""

    @property
    def name(self) -> str: ...
    @property
    def summary(self) -> str: ...
    @property
    def aliases(self) -> tuple[str, ...]: ...


@readable
@pydantic.dataclasses.dataclass(frozen=True, slots=True, config=CHECKED)
class Implementation:
    """A way to compute a workload. `target` is its `build(workload, context) -> AttentionFn`.

    `role`: the oracle is there to be right, not fast; speed-ups refer to a plain method, a built-in if one has a time; a
    yardstick is measured beside the others and never ranked.
    `priority`: where nothing was measured, `-i auto` takes the usable implementation with the highest; over ranks, where
    that one has a `sharding`, the one that should be the fastest by theirs (`dilabench.predict.over_ranks`). 0 is never
    taken. Suites over ranks show higher ones first.
    `uses_backend`: it calls a dense kernel given by the context (and then one row per backend makes sense); `backends`
    names the only ones that it can call, where it cannot call any; `calls_window`: it calls them under a window,
    whatever the workload's.
    `takes` says what a call receives: 'heads' is q, k, v of [B, N, H, D]; 'embeddings' is [B, N, E], a module
    with projections around the attention. Rows that take different things are never ranked together.
    `compiles`: the first call at each shape takes tens of seconds. Its cases are built last in their group, and a suite
    over many lengths has it only by name.
    `steps_of`: the implementation that does the last step of its call (`every_call`) alone, where that is another one.
    `sharding`: over ranks, who holds and is sent what: an object like `dilabench.distributed.model.Sharding`, light
    (no torch). λ and the bytes by formula come from it; suites over ranks have an implementation without one only by
    name. `preferred_for`: the workloads for which they, and `-i auto`, have it unasked, where that is less than it
    supports; `tried_for`: those for which it is measured where a choice is made by measuring, where it is known to be
    far slower in others. `every_call`: the steps of a call, where others of its pattern have some of them behind them
    when a call begins: select, plan, attend. `project`: whose code it calls where that is a public project, a peer of
    ours. Suites have a peer only by name; `field` sets all of them beside ours, and tells those that are missing by
    `install`, how to get it. `chooses`: it takes one of the others by itself, and is no way of its own: suites have it
    only by name, `choice` holds it against the others, and `auto` never means it. `tiles`: a function of (head_dim,
    itemsize, backward) that gives the shapes of its kernels for suite `tiles` to try, each a text that `context.tiles`
    then is.
    """

    name: Name
    summary: str
    target: Target
    supports: Capabilities = field(default_factory=Capabilities)
    requires: tuple[Requirement, ...] = ()
    aliases: tuple[Name, ...] = ()
    uses_backend: bool = False
    backends: tuple[str, ...] = ()
    calls_window: bool = False
    takes: Takes = "heads"
    deterministic: bool = False
    compiles: bool = False
    quirks: tuple[str, ...] = ()
    role: Role = "method"
    priority: Priority = 0
    sharding: Target | None = None
    preferred_for: Capabilities | None = None
    tried_for: Capabilities | None = None
    every_call: tuple[str, ...] = ("attend",)
    steps_of: str | None = None
    project: str | None = None
    install: str | None = None
    chooses: bool = False
    tiles: str | None = None


@readable
@pydantic.dataclasses.dataclass(frozen=True, slots=True, config=CHECKED)
class Backend:
    """A dense attention kernel. `target` is its `attend`, `backward_target` its `attend_backward`.

    `kernels`: regular expressions, one of which must match a kernel in the profile of a row that claims this backend on
    CUDA. `compiles`: as for an implementation. `aligns_ends`, `places_results`: as in `contracts.LoadedBackend`.
    `packed_target`: its `contracts.PackedKernel`, which computes packed sequences in one launch; where it has none, our
    own tiles take its place on CUDA and the row says so (note `own_tiles`), and a CPU calls sequences one by one.
    `merging_target`: its `contracts.MergingKernel`, which writes results where those of other keys are already.
    `priority`: by class of device (`Machine.device_class`); `auto` takes the usable backend with the highest, and none
    that names no priority there. `tried_for`: as for an implementation. `library`: it brings a library of its own,
    which gets a process of its own. `install`: the command that installs it. `family`: the name that generations of one
    kernel share; the suite `backends` sets them against each other.
    """

    name: Name
    summary: str
    target: Target
    backward_target: Target | None = None
    packed_target: Target | None = None
    merging_target: Target | None = None
    supports: Capabilities = DENSE_KERNEL
    requires: tuple[Requirement, ...] = ()
    aliases: tuple[Name, ...] = ()
    kernels: tuple[Expression, ...] = ()
    compiles: bool = False
    aligns_ends: bool = False
    places_results: bool = False
    priority: Mapping[DeviceClass, int] = field(default_factory=dict)
    tried_for: Capabilities | None = None
    library: bool = False
    install: str | None = None
    family: str | None = None


def load_target(target: str) -> Any:
    """Import 'package.module:attribute'. Raises PluginError when the text or the attribute is wrong.

    Importing runs the module's code; a caller that loads a plug-in's guards it (`dilabench.plugins.boundary`).
    """
    module_name, _, attribute = target.partition(":")
    if not attribute:
        raise PluginError(f"target {target!r} has no attribute; write 'package.module:name'")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except AttributeError:
        raise PluginError(f"module {module_name!r} has no {attribute!r} (target {target!r})") from None


def unmet(
    requires: Iterable[str], machine: Machine, find_module: FindModule = importlib.util.find_spec
) -> tuple[str, ...]:
    """Requirements that this machine does not meet, each with what is there instead.

    Forms: 'cuda', 'cuda>=sm80', 'cpu', 'gpus>=2', 'c++' (a compiler; on a CPU dilabench's own C++ is built and loaded),
    'module' or 'module>=1.2' (an importable module and the version of its distribution), 'some-distribution>=1.2' (a
    name with a dash is an installed distribution, for modules that several distributions share), and alternatives as in
    'cuda>=sm80|cpu'. `find_module` is called for modules: a submodule is found by importing its package, whose code may
    raise anything.
    """
    against: list[str] = []
    for requirement in requires:
        reasons: list[str] = []
        for alternative in requirement.split("|"):
            reason = _unmet(alternative, machine, find_module)
            if reason is None:
                break
            reasons.append(reason)
        else:
            against.append(" or ".join(reasons))
    return tuple(against)


def _unmet(alternative: str, machine: Machine, find_module: FindModule) -> str | None:
    asked = _name_and_version(alternative)
    if asked is None:
        return f"requirement {alternative!r} {UNREADABLE}"
    name, version = asked
    if name == "cuda":
        least = int(version.removeprefix("sm")) if version else 0
        if machine.device != "cuda":
            return f"needs cuda, have {machine.device}" + (f" ({machine.no_cuda})" if machine.no_cuda else "")
        if machine.compute_capability < least:
            return f"needs cuda sm{least} or newer, have sm{machine.compute_capability}"
        return None
    if name == "cpu":
        return None if machine.device == "cpu" else f"needs cpu, have {machine.device}"
    if name == "gpus":
        needed = int(version or 1)
        return None if len(machine.gpus) >= needed else f"needs {needed} GPUs, have {len(machine.gpus)}"
    if name == "c++":
        return _unmet_compiler(machine)
    return _unmet_package(name, version, find_module)


def _unmet_compiler(machine: Machine) -> str | None:
    if cxx_compiler() is None:
        return f"needs a C++ compiler, none of {', '.join(CXX_COMPILERS)} works here"
    # Only what runs on the CPU is worth seconds of compilation.
    return why_unavailable() if machine.device == CPU.name else None


def _unmet_package(name: str, version: str | None, find_module: FindModule) -> str | None:
    if "-" in name:
        try:
            installed: str | None = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return f"distribution {name} is not installed"
        older = version is not None and is_older(str(installed), version)
        return f"needs {name} {version} or newer, have {installed}" if older else None
    try:
        spec = find_module(name)
    # Its package's code may raise anything.
    except Exception as error:  # noqa: BLE001
        cause = error.__cause__ if isinstance(error, PluginError) else error
        if isinstance(cause, ModuleNotFoundError) and cause.name and name.startswith(f"{cause.name}."):
            return f"module {cause.name} is not installed"
        why = error.why if isinstance(error, PluginError) and not isinstance(cause, ImportError) else cause
        return f"module {name} is broken: {why}"
    if spec is None:
        return f"module {name} is not installed"
    if version is None:
        return None
    installed = installed_version(name.partition(".")[0])
    if installed is None:
        return f"module {name} has no version, {version} or newer is needed"
    if is_older(installed, version):
        return f"needs {name} {version} or newer, have {installed}"
    return None


def wrong_device(devices: frozenset[str], machine: Machine) -> tuple[str, ...]:
    """Why what runs on such kinds of device has none here; empty when it has."""
    if machine.facts.word in devices:
        return ()
    why = f" ({machine.no_cuda})" if machine.no_cuda and CUDA.name in devices else ""
    return (f"runs on {', '.join(sorted(devices))}, have {machine.device}{why}",)


def installed_version(name: str) -> str | None:
    """The version of the distribution that a module comes from, nearly always one of the same name, or of the
    distribution of this name; None if neither is installed.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    for distribution in _distributions_by_module().get(name, ()):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return None


@functools.cache
def _distributions_by_module() -> Mapping[str, list[str]]:
    # Reads what every installed distribution lists: a tenth of a second.
    return importlib.metadata.packages_distributions()


def is_older(installed: str, needed: str) -> bool:
    """Return True if a version is below another by PEP 440: 2.10rc1 is below 2.10, 2.10+cu128 is not.

    An installed version that PEP 440 does not know counts as older.
    """
    try:
        return Version(installed) < Version(needed)
    except InvalidVersion:
        return True
