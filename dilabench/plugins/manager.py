"""Finds plug-ins and builds the catalogue from them.

One broken plug-in never breaks the tool: it is loaded inside its own guard, and kept as a problem that `list` shows.
"""

import importlib.metadata
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pluggy

from dilabench.errors import DilabenchError, PluginError
from dilabench.plugins import NAME, hookspecs
from dilabench.plugins.builtin import implementations as builtin
from dilabench.plugins.builtin import peers
from dilabench.plugins.descriptors import Backend, Catalogue, Implementation, Reporter, Suite, Timer, WorkloadPreset
from dilabench.record import PluginInfo

REGISTRIES = {
    "implementations": Implementation,
    "backends": Backend,
    "workloads": WorkloadPreset,
    "suites": Suite,
    "reporters": Reporter,
    "timers": Timer,
}
HOOK_PREFIX = "dilabench_register_"
DISABLE_VARIABLE = "DILABENCH_DISABLE_PLUGINS"
_NAME = re.compile(r"\w[\w.-]*")
_TARGET = re.compile(r"\w+(\.\w+)*:\w+")


@dataclass(frozen=True, slots=True)
class Problem:
    """A plug-in that could not be used, and why."""

    plugin: str
    why: str


@dataclass(slots=True)
class Found:
    """The catalogue, the plug-ins it came from, and the plug-ins that could not be used."""

    catalogue: Catalogue
    plugins: list[PluginInfo] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def discover(strict: bool = False, extra: Sequence[ModuleType | object] = ()) -> Found:
    """Build the catalogue from the built-ins, the installed entry points and `extra` modules.

    With `strict`, any problem raises PluginError. DILABENCH_DISABLE_PLUGINS=1 leaves third parties out.
    """
    found = Found(Catalogue())
    for name, ours in (("builtin", builtin), ("peers", peers)):
        _admit(found, name, ours, PluginInfo(name=name, distribution=NAME))
    for index, module in enumerate(extra):
        name = getattr(module, "__name__", f"extra-{index}")
        _guarded(found, name, module, PluginInfo(name=name))
    if not os.environ.get(DISABLE_VARIABLE):
        for entry_point in sorted(importlib.metadata.entry_points(group=NAME), key=lambda e: e.name):
            distribution = entry_point.dist
            info = PluginInfo(
                name=entry_point.name,
                distribution=distribution.name if distribution else None,
                version=distribution.version if distribution else None,
            )
            _guarded(found, entry_point.name, entry_point, info)
    if strict and found.problems:
        raise PluginError("; ".join(f"plug-in {problem.plugin!r}: {problem.why}" for problem in found.problems))
    return found


def _guarded(found: Found, name: str, source: Any, info: PluginInfo) -> None:
    try:
        module = source.load() if isinstance(source, importlib.metadata.EntryPoint) else source
        _admit(found, name, module, info)
    # The plug-in boundary: whatever a third party raises, sys.exit() at import included, must not stop the tool.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        why = str(error) if isinstance(error, DilabenchError) else f"{type(error).__name__}: {error}"
        found.problems.append(Problem(name, why))


def _admit(found: Found, name: str, module: Any, info: PluginInfo) -> None:
    """Check the plug-in in a manager of its own, then add its descriptors to the catalogue, all or none."""
    manager = pluggy.PluginManager(NAME)
    manager.add_hookspecs(hookspecs)
    manager.register(module, name)
    _refuse_misspelt_hooks(manager, module)
    offered = {shelf: _offered(manager, shelf) for shelf in REGISTRIES}
    if not any(offered.values()):
        raise PluginError("it registers nothing; does a function carry @hookimpl and return descriptors?")
    trial = _copied(found.catalogue)
    for catalogue in (trial, found.catalogue):
        for shelf, descriptors in offered.items():
            for descriptor in descriptors:
                getattr(catalogue, shelf).add(descriptor, name)
    found.plugins.append(info)


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


def _copied(catalogue: Catalogue) -> Catalogue:
    """A copy of the registries to try additions on, so that a clash leaves the real catalogue untouched."""
    trial = Catalogue()
    for shelf in REGISTRIES:
        source, target = getattr(catalogue, shelf), getattr(trial, shelf)
        for descriptor in source:
            target.add(descriptor, source.origin(descriptor.name))
    return trial


def _offered(manager: pluggy.PluginManager, shelf: str) -> list[Any]:
    hook, kind = HOOK_PREFIX + shelf, REGISTRIES[shelf]
    descriptors: list[Any] = []
    for result in getattr(manager.hook, hook)():
        if not isinstance(result, Sequence):
            raise PluginError(f"{hook} returned {result!r}; it must return a list of {kind.__name__}")
        descriptors += result
    for descriptor in descriptors:
        if not isinstance(descriptor, kind):
            raise PluginError(f"{hook} returned {descriptor!r}, which is no {kind.__name__}")
        _refuse_impossible(hook, descriptor)
    return descriptors


def _refuse_impossible(hook: str, descriptor: Any) -> None:
    """What a dataclass does not check by itself but every user of the descriptor relies on."""
    if not isinstance(descriptor.aliases, tuple):
        raise PluginError(f"{hook}: aliases {descriptor.aliases!r} must be a tuple of names, as in ('other-name',)")
    for name in (descriptor.name, *descriptor.aliases):
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise PluginError(f"{hook}: {name!r} is not a name; write letters, digits, '-', '_' and '.' only")
    target = getattr(descriptor, "target", None)
    if target is not None and (not isinstance(target, str) or not _TARGET.fullmatch(target)):
        raise PluginError(f"{hook}: target {target!r} of {descriptor.name!r} must be a text like 'package.module:name'")
