"""Finds plug-ins and builds the catalogue from them.

One broken plug-in never breaks the tool: it is loaded inside its own guard, and kept as a problem that `list` shows.
"""

import functools
import importlib.metadata
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, get_args, get_type_hints

import pluggy
from pydantic import TypeAdapter, ValidationError

from dilabench.choice.requirements import refuse_unreadable
from dilabench.errors import PluginError
from dilabench.impls.peers.paths import PEERS_VARIABLE, search_peer_paths
from dilabench.machine import WORDS as WORDS_OF_DEVICES
from dilabench.patterns.pattern import Pattern
from dilabench.patterns.registry import PatternKind, find_kinds_with, load, register
from dilabench.plugins import NAME, builtin, hookspecs
from dilabench.plugins.boundary import Problem, defined, shown
from dilabench.plugins.builtin import peers
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.descriptors import (
    Backend,
    Capabilities,
    Implementation,
    Reporter,
    Suite,
    Timer,
    WorkloadPreset,
)
from dilabench.plugins.pattern_guard import hold
from dilabench.record import PluginInfo
from dilabench.version import __version__
from dilabench.workload.spec import DType, Layout, Mode, WorkloadRequest

REGISTRIES = {
    "patterns": PatternKind,
    "implementations": Implementation,
    "backends": Backend,
    "workloads": WorkloadPreset,
    "suites": Suite,
    "reporters": Reporter,
    "timers": Timer,
}
HOOK_PREFIX = "dilabench_register_"
# Our own plug-ins, whose descriptors are checked by a test and not at each start.
OWN = (builtin, peers)
DISABLE_VARIABLE = "DILABENCH_DISABLE_PLUGINS"
# Fields that hold words of ours, and fields that have a least value.
WORDS: Mapping[str, frozenset[str]] = {
    "devices": WORDS_OF_DEVICES,
    "default_on": WORDS_OF_DEVICES,
    "dtypes": frozenset(get_args(DType)),
    "modes": frozenset(get_args(Mode)),
    "layouts": frozenset(get_args(Layout)),
    "merge_grads": frozenset({"exact", "detached"}),
}
LEAST = {"head_dim_multiple": 1, "max_head_dim": 1, "max_world_size": 1, "priority": 0, "budget_s": 0}
TARGETS = {
    "target",
    "backward_target",
    "packed_target",
    "merging_target",
    "sharding",
    "follow_up",
    "analysis",
    "projections",
}
# Words that stand for names on the command line. Suite `all` is ours.
RESERVED = frozenset({"all", "auto"})
_NAME = re.compile(r"\w[\w.-]*")
_TARGET = re.compile(r"\w+(\.\w+)*:\w+")


@dataclass(slots=True)
class Found:
    """The catalogue and the plug-ins it came from. `modules`: the module that holds the hooks of each, by its name."""

    catalogue: Catalogue
    plugins: list[PluginInfo] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)

    @property
    def problems(self) -> list[Problem]:
        """What could not be used."""
        return self.catalogue.problems


def discover(strict: bool = False, extra: Sequence[ModuleType | object] = ()) -> Found:
    """Build the catalogue from the built-ins, the installed entry points and `extra` modules.

    With `strict`, any problem raises PluginError, now or later. DILABENCH_DISABLE_PLUGINS=1 leaves third parties out.
    Raises ConfigError for folders in DILABENCH_PEERS that are none.
    """
    if os.environ.get(PEERS_VARIABLE):
        search_peer_paths()
    found = Found(Catalogue(strict))
    for name, ours in (("builtin", builtin), ("peers", peers)):
        _admit(found, name, ours, PluginInfo(name=name, distribution=NAME))
    for index, module in enumerate(extra):
        name = getattr(module, "__name__", f"extra-{index}")
        with found.catalogue.left_out(name, ""):
            _admit(found, name, module, PluginInfo(name=name))
    if not os.environ.get(DISABLE_VARIABLE):
        for entry_point in sorted(importlib.metadata.entry_points(group=NAME), key=lambda e: e.name):
            distribution = entry_point.dist
            info = PluginInfo(
                name=entry_point.name,
                distribution=distribution.name if distribution else None,
                version=distribution.version if distribution else None,
            )
            with found.catalogue.left_out(entry_point.name, ""):
                _refuse_other_version(distribution)
                _admit(found, entry_point.name, entry_point.load(), info)
    return found


def _refuse_other_version(distribution: importlib.metadata.Distribution | None) -> None:
    """Refuse a package that asks for another dilabench: what it would fail with later says nothing of that."""
    required = [text for text in (distribution and distribution.requires) or () if NAME in text]
    if distribution is None or not required:
        return
    from packaging.requirements import Requirement

    for one in map(Requirement, required):
        asked = one.name == NAME and (one.marker is None or one.marker.evaluate())
        if asked and not one.specifier.contains(__version__, prereleases=True):
            raise PluginError(
                f"{distribution.name} {distribution.version} was made for dilabench {one.specifier}, this is "
                f"{__version__}; install a version of one of the two that goes with the other"
            )


def _admit(found: Found, name: str, module: Any, info: PluginInfo) -> None:
    """Check the plug-in in a manager of its own, then add its descriptors to the catalogue, all or none."""
    manager = pluggy.PluginManager(NAME)
    manager.add_hookspecs(hookspecs)
    manager.register(module, name)
    _refuse_misspelt_hooks(manager, module)
    # By identity: a plug-in's own comparison would be its code.
    checked = not any(module is ours for ours in OWN)
    offered = {shelf: _offered(manager, shelf, checked=checked) for shelf in REGISTRIES}
    if not any(offered.values()):
        raise PluginError("it registers nothing; does a function carry @hookimpl and return descriptors?")
    # Patterns are light, and requests and records ask all of them: one that cannot be loaded is not let in.
    patterns = [(kind, load(kind)) for kind in offered["patterns"]]
    for kind, pattern in patterns if checked else ():
        hold(name, pattern)
        _refuse_shadowing(kind, pattern)
    trial = _copied(found.catalogue)
    for catalogue in (trial, found.catalogue):
        for shelf, descriptors in offered.items():
            for descriptor in descriptors:
                getattr(catalogue, shelf).add(descriptor, name)
    for kind, pattern in patterns:
        register(kind, pattern)
    found.plugins.append(info)
    found.modules[name] = getattr(module, "__name__", type(module).__module__)


def _refuse_misspelt_hooks(manager: pluggy.PluginManager, module: Any) -> None:
    """A hook that nobody calls is an error, and so is a function that looks like one but is not marked."""
    known = ", ".join(HOOK_PREFIX + shelf for shelf in REGISTRIES)
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(f"{error}; known hooks: {known}") from None
    called = {caller.name for caller in manager.get_hookcallers(module) or ()}
    for attribute in dir(module):
        if attribute.startswith(HOOK_PREFIX) and attribute not in called:
            raise PluginError(f"{attribute} is not marked with @hookimpl; known hooks: {known}")


def _refuse_shadowing(kind: PatternKind, pattern: type[Pattern]) -> None:
    """A request is flat: the fields of a pattern stand beside those of the shape."""
    shared = (pattern.request_model().model_fields.keys() & WorkloadRequest.model_fields.keys()) - {"kind"}
    if shared:
        raise PluginError(f"pattern {kind.name!r}: {', '.join(sorted(shared))} is a field of every workload; rename it")


def _copied(catalogue: Catalogue) -> Catalogue:
    """A copy of the registries to try additions on, so that a clash leaves the real catalogue untouched."""
    trial = Catalogue()
    for shelf in REGISTRIES:
        source, target = getattr(catalogue, shelf), getattr(trial, shelf)
        for descriptor in source:
            target.add(descriptor, source.origin(descriptor.name))
    return trial


def _offered(manager: pluggy.PluginManager, shelf: str, *, checked: bool) -> list[Any]:
    hook, kind = HOOK_PREFIX + shelf, REGISTRIES[shelf]
    caller = getattr(manager.hook, hook)
    descriptors: list[Any] = []
    for result in caller():
        try:
            if not isinstance(result, Sequence):
                raise PluginError(f"{hook} returned {shown(result)}; it must return a list of {kind.__name__}")
            for descriptor in result:
                # Not a subclass either: its attributes would be code of the plug-in's that runs anywhere.
                if type(descriptor) is not kind:
                    raise PluginError(f"{hook} returned {shown(descriptor)}, which is no {kind.__name__}")
                if checked:
                    _refuse_impossible(hook, descriptor)
        except PluginError as error:
            raise PluginError(f"{error}; see {defined(caller.get_hookimpls()[0].function)}") from None
        descriptors += result
    return descriptors


def _refuse_impossible(hook: str, descriptor: Any, reserved: frozenset[str] = RESERVED) -> None:
    """Hold every field to its annotation, names and targets to their form; Python itself checks neither."""
    where = f"{hook}: {type(descriptor).__name__} {shown(descriptor.name)}"
    _refuse_wrong_types(where, descriptor)
    for name in (descriptor.name, *descriptor.aliases):
        if not _NAME.fullmatch(name):
            raise PluginError(f"{hook}: {name!r} is not a name; write letters, digits, '-', '_' and '.' only")
        if name in reserved:
            raise PluginError(f"{where}: {name!r} stands for several names on the command line; choose another name")
    for requirement in getattr(descriptor, "requires", ()):
        refuse_unreadable(where, requirement)
    for pattern in getattr(descriptor, "kernels", ()):
        try:
            re.compile(pattern)
        except re.error as error:
            raise PluginError(f"{where}: kernels {pattern!r} is no regular expression: {error}") from None
    for field_name in TARGETS & set(type(descriptor).__slots__):
        target = getattr(descriptor, field_name)
        if target is not None and not _TARGET.fullmatch(target):
            raise PluginError(f"{where}: {field_name} {target!r} must be a text like 'package.module:name'")


def _refuse_wrong_types(where: str, descriptor: Any) -> None:
    kind: Any = type(descriptor)
    for name, annotation in _annotations(kind).items():
        value = getattr(descriptor, name)
        try:
            _adapter(annotation).validate_python(value, strict=True)
        except ValidationError:
            wanted = annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
            raise PluginError(f"{where}: {name} {shown(value)} must be {wanted}") from None
        if name in WORDS and not value <= WORDS[name]:
            wrong, known = sorted(value - WORDS[name]), ", ".join(sorted(WORDS[name]))
            raise PluginError(f"{where}: {name} {', '.join(wrong)} is not known; it may hold {known}")
        if isinstance(value, int | float) and value < LEAST.get(name, value):
            raise PluginError(f"{where}: {name} {value} must be at least {LEAST[name]}")
        if isinstance(value, Capabilities):
            _refuse_wrong_types(f"{where}: {name}", value)


@functools.cache
def _annotations(descriptor: type) -> dict[str, Any]:
    return get_type_hints(descriptor)


@functools.cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation)


find_kinds_with(discover)
