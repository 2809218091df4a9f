"""Finds plug-ins and builds the catalogue from them.

A broken plug-in never breaks the tool: it is loaded inside a guard, and becomes a problem that `list` shows.
"""

import importlib.metadata
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pluggy

from dilabench.errors import PluginError
from dilabench.impls.peers.paths import PEERS_VARIABLE, search_peer_paths
from dilabench.patterns.pattern import Pattern
from dilabench.patterns.registry import PatternKind, find_kinds_with, load, register
from dilabench.plugins import NAME, builtin, hookspecs
from dilabench.plugins.boundary import Problem, defined, shown, watch
from dilabench.plugins.builtin import peers
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.descriptors import (
    Backend,
    Implementation,
    Reporter,
    Suite,
    Timer,
    WorkloadPreset,
)
from dilabench.plugins.pattern_guard import checked_pattern
from dilabench.record import PluginInfo
from dilabench.version import __version__
from dilabench.workload.spec import WorkloadRequest

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
# dilabench's plug-ins, by name: their patterns are not guarded, and their names may be reserved words.
OWN = {"builtin": builtin, "peers": peers}
DISABLE_VARIABLE = "DILABENCH_DISABLE_PLUGINS"
# Reserved words of the command line. Suite `all` is dilabench's.
RESERVED = frozenset({"all", "auto"})


@dataclass(slots=True)
class Found:
    """The catalogue and the plug-ins it came from. `modules`: the module that holds the hooks of each, by its name."""

    catalogue: Catalogue
    plugins: list[PluginInfo] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)

    @property
    def problems(self) -> list[Problem]:
        """The failures of plug-ins."""
        return self.catalogue.problems


def discover(strict: bool = False, extra: Sequence[ModuleType | object] = ()) -> Found:
    """Build the catalogue from the built-ins, the installed entry points and `extra` modules.

    With `strict`, any problem raises PluginError, now or later. DILABENCH_DISABLE_PLUGINS=1 skips third parties. Raises
    ConfigError for entries of DILABENCH_PEERS that are no folders.
    """
    if os.environ.get(PEERS_VARIABLE):
        search_peer_paths()
    found = Found(Catalogue(strict))
    for name, module_ in OWN.items():
        _admit(found, name, module_, PluginInfo(name=name, distribution=NAME), third_party=False)
    for index, module in enumerate(extra):
        name = getattr(module, "__name__", f"extra-{index}")
        with found.catalogue.left_out(name, "", refuses=False):
            _admit(found, name, module, PluginInfo(name=name))
    if not os.environ.get(DISABLE_VARIABLE):
        for entry_point in sorted(importlib.metadata.entry_points(group=NAME), key=lambda e: e.name):
            distribution = entry_point.dist
            info = PluginInfo(
                name=entry_point.name,
                distribution=distribution.name if distribution else None,
                version=distribution.version if distribution else None,
            )
            watch()
            with found.catalogue.left_out(entry_point.name, "", refuses=False):
                _refuse_other_version(distribution)
                _admit(found, entry_point.name, entry_point.load(), info)
    return found


def _refuse_other_version(distribution: importlib.metadata.Distribution | None) -> None:
    """Refuse a package that requires another version of dilabench, because later errors would not show the cause."""
    required = [text for text in (distribution and distribution.requires) or () if NAME in text]
    if distribution is None or not required:
        return
    from packaging.requirements import Requirement

    for requirement in map(Requirement, required):
        applies = requirement.name == NAME and (requirement.marker is None or requirement.marker.evaluate())
        if applies and not requirement.specifier.contains(__version__, prereleases=True):
            raise PluginError(
                f"{distribution.name} {distribution.version} was made for dilabench {requirement.specifier}, this is "
                f"{__version__}; install a version of one of the two that goes with the other"
            )


def _admit(found: Found, name: str, module: Any, info: PluginInfo, *, third_party: bool = True) -> None:
    """Check the plug-in in a separate manager, then add its descriptors to the catalogue, all or none."""
    manager = pluggy.PluginManager(NAME)
    manager.add_hookspecs(hookspecs)
    manager.register(module, name)
    _refuse_misspelt_hooks(manager, module)
    offered = {kind: _offered(manager, kind, third_party=third_party) for kind in REGISTRIES}
    if not any(offered.values()):
        raise PluginError("it registers nothing; does a function carry @hookimpl and return descriptors?")
    # Requests and records use all patterns, so one that cannot be loaded is refused.
    patterns: list[tuple[PatternKind, type[Pattern]]] = []
    for pattern_kind in offered["patterns"] if third_party else ():
        pattern = checked_pattern(name, load(pattern_kind))
        _refuse_shadowing(pattern_kind, pattern)
        patterns.append((pattern_kind, pattern))
    for kind, descriptors in offered.items():
        getattr(found.catalogue, kind).refuse_taken(descriptors, name)
    for kind, descriptors in offered.items():
        for descriptor in descriptors:
            getattr(found.catalogue, kind).add(descriptor, name)
    register(patterns)
    found.catalogue.sources[name] = " ".join(filter(None, (info.distribution or name, info.version)))
    found.plugins.append(info)
    found.modules[name] = getattr(module, "__name__", type(module).__module__)


def _refuse_misspelt_hooks(manager: pluggy.PluginManager, module: Any) -> None:
    """Raise PluginError for an unknown hook, and for a function named like a hook without @hookimpl."""
    known = ", ".join(HOOK_PREFIX + kind for kind in REGISTRIES)
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(f"{error}; known hooks: {known}") from None
    called = {caller.name for caller in manager.get_hookcallers(module) or ()}
    for attribute in dir(module):
        if attribute.startswith(HOOK_PREFIX) and attribute not in called:
            raise PluginError(f"{attribute} is not marked with @hookimpl; known hooks: {known}")


def _refuse_shadowing(kind: PatternKind, pattern: type[Pattern]) -> None:
    """Raise PluginError for a pattern field that is also a field of the shape, because requests are flat."""
    shared = (pattern.request_model().model_fields.keys() & WorkloadRequest.model_fields.keys()) - {"kind"}
    if shared:
        raise PluginError(f"pattern {kind.name!r}: {', '.join(sorted(shared))} is a field of every workload; rename it")


def _offered(manager: pluggy.PluginManager, kind_of_thing: str, *, third_party: bool) -> list[Any]:
    hook = HOOK_PREFIX + kind_of_thing
    kind: Any = REGISTRIES[kind_of_thing]
    caller = getattr(manager.hook, hook)
    reserved = RESERVED if third_party else frozenset()
    descriptors: list[Any] = []
    try:
        for result in caller():
            if not isinstance(result, Sequence) or isinstance(result, str | bytes):
                raise PluginError(f"it returned {shown(result)}; it must return a list of {kind.__name__}")
            for descriptor in result:
                # Subclasses are refused, too: their attributes would run the plug-in's code anywhere.
                if type(descriptor) is not kind:
                    raise PluginError(f"it returned {shown(descriptor)}, which is no {kind.__name__}")
                if taken := sorted(reserved & {descriptor.name, *descriptor.aliases}):
                    where = f"{kind.__name__} {shown(descriptor.name)}"
                    text = f"{taken[0]!r} means several names on the command line; choose another name"
                    raise PluginError(f"{where}: {text}")
            descriptors += result
    except PluginError as error:
        function = caller.get_hookimpls()[0].function
        raise PluginError(f"{hook}: {error.why}; see {defined(function)}") from None
    return descriptors


find_kinds_with(discover)
