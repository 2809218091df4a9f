"""Descriptors of implementations and backends: capabilities, requirements and targets.

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
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from typing import Annotated, Any, Literal, get_args

import pydantic.dataclasses
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator

from dilabench.errors import PluginError
from dilabench.kernels.cpu.compiled import why_unavailable
from dilabench.machine import CPU, CUDA, CXX_COMPILERS, WORDS, DeviceClass, Machine, cxx_compiler, device_named
from dilabench.patterns.dense import DENSE
from dilabench.validation import CHECKED, Count, Name, Priority, Target, among, defined, readable, refused, shown
from dilabench.workload.cuts import why_not_apart
from dilabench.workload.spec import DEFAULT_PATTERN, DType, Layout, Mode, Workload

# The role of a row among the others of its workload; explained at `Implementation`.
Role = Literal["oracle", "plain", "method", "yardstick"]
# Inputs of a call: q, k, v of heads, or embeddings of a module, or of the workload's model.
Takes = Literal["heads", "embeddings", "model"]

# The patterns of implementations that work from `Pattern.counts` alone.
ANY_PATTERN = frozenset({"*"})
ALL_DTYPES = frozenset(get_args(DType))
ALL_MODES = frozenset(get_args(Mode))

FindModule = Callable[[str], ModuleSpec | None]
_REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9_.+-]+?)\s*(?:>=\s*(?P<version>[A-Za-z0-9.]+))?$")
# Version fields that are not versions may have these forms.
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


# FlashAttention 4 imports CUTLASS's DSL, a distribution that an installation without dependencies lacks.
FLASH_4 = ("flash-attn-4", "cutlass")

Requirement = Annotated[str, AfterValidator(_is_requirement)]
Expression = Annotated[str, AfterValidator(_is_expression)]
Devices = Annotated[frozenset[str], among(WORDS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The workloads that an implementation or backend computes; `reasons` says what of a workload exceeds it."""

    patterns: frozenset[str] = frozenset({DEFAULT_PATTERN})
    """Kinds of pattern. `ANY_PATTERN`: any, but sums of several attentions only with `sums`."""
    devices: Devices = frozenset({"cpu", "cuda"})
    """'cpu', 'cuda', and 'accelerator' for any other that `torch.accelerator` knows."""
    dtypes: Annotated[frozenset[str], among(ALL_DTYPES)] = ALL_DTYPES
    """Dtypes of q, k and v."""
    modes: Annotated[frozenset[str], among(ALL_MODES)] = ALL_MODES
    """Forward, backward, or both in one call."""
    layouts: Annotated[frozenset[str], among(frozenset(get_args(Layout)))] = frozenset({"padded"})
    """Padded, or packed sequences."""
    merge_grads: Annotated[frozenset[str], among(frozenset({"exact", "detached"}))] = frozenset({"exact"})
    """Which gradient of a merge of branches it computes (semantics.md §2)."""
    causal: frozenset[bool] = frozenset({True, False})
    """With a causal mask, without one."""
    window: bool = True
    """Whether it takes a window."""
    gqa: bool = True
    """Whether it takes fewer key/value heads than query heads."""
    grouped_heads: bool = True
    """Whether heads may take part in different branches."""
    zero_keys: bool = False
    """Whether it computes attended zero keys."""
    last_rows: bool = False
    """Whether it takes fewer queries than keys, the last rows of the square."""
    square: bool = True
    """Whether it takes a query at every position; without, suites include it over fewer queries only."""
    value_dim: bool = False
    """Whether it takes values of another width than keys."""
    softcap: bool = False
    """Whether it caps scores."""
    sums: bool = False
    """Whether it computes sums of several attentions, each with its own softmax."""
    head_dim_multiple: Count = 1
    """Head dims that it takes are multiples of this."""
    max_head_dim: Count | None = None
    """The largest head dim; None for no limit."""
    max_world_size: Count | None = 1
    """The most ranks; None for no limit."""
    parts_apart: bool = False
    """The part of each rank must need no keys of another (`cuts.cut_apart`)."""
    check: Callable[[Workload], str | None] | None = None
    """A further rule: takes a workload of these patterns and returns the reason against it, or None."""
    check_ranks: Callable[[Workload, int], str | None] | None = None
    """A rule that also takes the number of ranks."""
    on_cuda: "Capabilities | None" = None
    """Replaces all of these on CUDA, for a kernel that differs between the two kinds of device."""

    def computes(self, pattern: str) -> bool:
        """Return True if the kind of pattern is supported."""
        return bool(self.patterns & {pattern, *ANY_PATTERN})

    @property
    def only_dense(self) -> bool:
        """Return True if only dense attention is supported."""
        return self.patterns == {DENSE.kind}

    def reasons(self, workload: Workload, device: str, world_size: int = 1) -> tuple[str, ...]:
        """Return why this workload cannot be computed on this kind of device ('cpu', 'cuda', 'mps'); empty if it can.

        Exceptions of its rules pass through. Raises PluginError for a rule that returns anything but a text or None.
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
        if workload.query_len is not None and not self.last_rows:
            yield f"query_len {workload.query_len} below seq_len {workload.seq_len} is not supported"
        if workload.query_len is None and not self.square:
            yield "a query at every position is not supported"
        if not self.gqa and workload.num_kv_heads != workload.num_heads:
            yield f"num_kv_heads {workload.num_kv_heads} below num_heads {workload.num_heads} is not supported"
        if workload.value_dim is not None and not self.value_dim:
            yield f"value_dim {workload.value_dim} beside head_dim {workload.head_dim} is not supported"
        if workload.softcap is not None and not self.softcap:
            yield f"softcap {workload.softcap:g} is not supported"
        if workload.head_dim % self.head_dim_multiple:
            yield f"head_dim {workload.head_dim} is not a multiple of {self.head_dim_multiple}"
        if self.max_head_dim is not None and workload.head_dim > self.max_head_dim:
            yield f"head_dim {workload.head_dim} is above {self.max_head_dim}"
        elif workload.value_width > (self.max_head_dim or workload.value_width):
            yield f"value_dim {workload.value_dim} is above {self.max_head_dim}"
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
            yield "a sum of several attentions, each with its own softmax, is not supported"
        merge_grad = "detached" if workload.pattern.is_detached else "exact"
        if merge_grad not in self.merge_grads and workload.mode != "forward":
            yield f"merge_grad {merge_grad} is not supported"
        # A rule may read fields that only these patterns have.
        rules = ((self.check, (workload,)), (self.check_ranks, (workload, world_size)))
        for rule, arguments in rules if self.computes(workload.pattern.kind) else ():
            reason = None if rule is None else rule(*arguments)
            if not isinstance(reason, str | None):
                raise PluginError(f"{defined(rule)} returned {shown(reason)}; it must return a reason against, or None")
            if reason:
                yield reason


# The default capabilities of a dense attention kernel.
DENSE_KERNEL = Capabilities(patterns=frozenset({DENSE.kind}))


@readable
@pydantic.dataclasses.dataclass(frozen=True, slots=True, config=CHECKED)
class Implementation:
    """A way to compute a workload."""

    name: Name
    """As `-i` takes it."""
    summary: str
    """One line for lists."""
    target: Target
    """`build(workload, context) -> AttentionFn`."""
    supports: Capabilities = field(default_factory=Capabilities)
    """The workloads that it computes."""
    requires: tuple[Requirement, ...] = ()
    """Its requirements: 'cuda>=sm80', 'module>=1.2', alternatives separated by '|'."""
    aliases: tuple[Name, ...] = ()
    """Other names."""
    uses_backend: bool = False
    """It calls a dense kernel given by the context, so that suites measure one row per backend."""
    backends: tuple[str, ...] = ()
    """The only backends that it can call; empty for any."""
    calls_window: bool = False
    """It calls its backend under a window, for any window of the workload."""
    calls_ahead: bool = False
    """As `calls_window`, over ranks under windows that look ahead, for keys of other ranks."""
    takes: Takes = "heads"
    """The inputs of a call: 'heads' is q, k, v of [B, N, H, D]; 'embeddings' is [B, N, E], for a module with
    projections around the attention, 'model' for the workload's model. Rows with different inputs are never ranked
    together."""
    deterministic: bool = False
    """Two identical calls agree bitwise, which verification checks."""
    compiles: bool = False
    """The first call at each shape takes tens of seconds. Its cases are built last in their group, and a suite over
    many lengths includes it only if named."""
    quirks: tuple[str, ...] = ()
    """Remarks that reports show with its rows."""
    role: Role = "method"
    """The oracle defines correct results; speed-ups refer to a plain method, a built-in one if it has a time; a
    yardstick is an unranked reference, measured in the same run."""
    priority: Priority = 0
    """Without measurements, `-i auto` takes the usable implementation with the highest; 0 is never taken. Over ranks,
    if that one has a `sharding`, `auto` takes the one that its sharding predicts to be fastest
    (`dilabench.choice.over_ranks`). Suites over ranks list higher ones first."""
    sharding: Target | None = None
    """Over ranks, which rank owns and receives which keys: an object like `dilabench.distributed.model.Sharding`,
    without torch. λ and the predicted bytes come from it. Suites over ranks include an implementation without one only
    if named."""
    preferred_for: Capabilities | None = None
    """The workloads for which suites over ranks and `-i auto` include it by default, if fewer than it supports."""
    tried_for: Capabilities | None = None
    """The workloads for which a choice by measurement includes it, if it is known to be far slower in others."""
    every_call: tuple[str, ...] = ("attend",)
    """The steps of a call (select, plan, attend), if others do some of them before the call."""
    steps_of: str | None = None
    """The implementation that performs only the last step of its call (`every_call`), if that is another one."""
    project: str | None = None
    """The public project whose code it calls. Suites include such a peer only if named; `field` measures all of
    them."""
    install: str | None = None
    """The command that installs a peer, which `field` names if it is missing."""
    chooses: bool = False
    """It selects another implementation; suite `choice` compares it with the others. Other suites include it only if
    named, and `auto` never selects it."""


@readable
@pydantic.dataclasses.dataclass(frozen=True, slots=True, config=CHECKED)
class Backend:
    """A dense attention kernel."""

    name: Name
    """As `-b` takes it."""
    summary: str
    """One line for lists."""
    target: Target
    """Its `attend`, which returns out and lse."""
    backward_target: Target | None = None
    """Its `attend_backward`, for a given out and lse."""
    packed_target: Target | None = None
    """Its `contracts.PackedKernel`, which computes packed sequences in one launch. Without one, dilabench's tiles
    replace it on CUDA and the row has the note `own_tiles`; on a CPU sequences are called one by one."""
    merging_target: Target | None = None
    """Its `contracts.MergingKernel`, which merges results of several calls."""
    supports: Capabilities = DENSE_KERNEL
    """The workloads of a dense kernel that it computes."""
    requires: tuple[Requirement, ...] = ()
    """As for an implementation."""
    aliases: tuple[Name, ...] = ()
    """Other names."""
    kernels: tuple[Expression, ...] = ()
    """Regular expressions, one of which must match a kernel in the profile of a row that claims this backend on CUDA.
    """
    compiles: bool = False
    """As for an implementation."""
    aligns_ends: bool = False
    """As in `contracts.LoadedBackend`."""
    places_results: bool = False
    """As in `contracts.LoadedBackend`."""
    priority: Mapping[DeviceClass, int] = field(default_factory=dict)
    """By class of device (`Machine.device_class`): `auto` takes the usable backend with the highest, and no backend
    without a priority there."""
    tried_for: Capabilities | None = None
    """As for an implementation."""
    library: bool = False
    """It loads its own library, which runs in a separate process."""
    install: str | None = None
    """The command that installs it."""
    family: str | None = None
    """The shared name of generations of one kernel, which the suite `backends` compares."""


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
    """Return the requirements that this machine does not meet, each with what the machine has instead.

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
    version_spec = _name_and_version(alternative)
    if version_spec is None:
        return f"requirement {alternative!r} {UNREADABLE}"
    name, version = version_spec
    if name == "cuda":
        least = int(version.removeprefix("sm")) if version else 0
        if machine.device != "cuda":
            return f"needs a CUDA GPU ({machine.no_cuda or f'the device is {machine.device}'})"
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
    # Only code that runs on the CPU justifies seconds of compilation.
    return why_unavailable() if machine.device == CPU.name else None


def _unmet_package(name: str, version: str | None, find_module: FindModule) -> str | None:
    if "-" in name:
        installed = installed_version(name)
        if installed is None:
            return f"distribution {name} is not installed"
        older = version is not None and is_older(installed, version)
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
    if spec is None or version is None:
        return None if spec else f"module {name} is not installed"
    installed = installed_version(name.partition(".")[0])
    if installed is None:
        return f"module {name} has no version, {version} or newer is needed"
    return f"needs {name} {version} or newer, have {installed}" if is_older(installed, version) else None


def wrong_device(devices: frozenset[str], machine: Machine) -> tuple[str, ...]:
    """Return why this machine has none of these kinds of device; empty if it has one."""
    if machine.facts.word in devices:
        return ()
    why = f" ({machine.no_cuda})" if machine.no_cuda and CUDA.name in devices else ""
    return (f"runs on {', '.join(sorted(devices))}, have {machine.device}{why}",)


@functools.cache
def installed_version(name: str) -> str | None:
    """The version of a module's distribution, or of the distribution of this name; None if neither is installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    if name in sys.modules or (name.isidentifier() and importlib.util.find_spec(name) is not None):
        for distribution in _distributions_by_module().get(name, ()):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                return importlib.metadata.version(distribution)
    return None


@functools.cache
def _distributions_by_module() -> Mapping[str, list[str]]:
    # Reads what every installed distribution lists: up to a third of a second.
    return importlib.metadata.packages_distributions()


def is_older(installed: str, needed: str) -> bool:
    """Return True if a version is below another by PEP 440: 2.10rc1 is below 2.10, 2.10+cu128 is not.

    An installed version that PEP 440 does not know counts as older.
    """
    try:
        return Version(installed) < Version(needed)
    except InvalidVersion:
        return True
