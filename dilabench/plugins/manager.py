"""Finds plug-ins and builds the catalogue from them.

One broken plug-in never breaks the tool: it is loaded inside its own guard, and kept as a problem that `list` shows.
"""

import importlib.metadata
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pluggy

from dilabench.errors import DilabenchError, PluginError
from dilabench.plugins import NAME, builtin, hookspecs
from dilabench.registry import Catalogue
from dilabench.results import PluginInfo

SHELVES = ("implementations", "backends", "workloads", "suites", "reporters", "timers")
DISABLE_VARIABLE = "DILABENCH_DISABLE_PLUGINS"


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

    With `strict`, the first problem raises PluginError. DILABENCH_DISABLE_PLUGINS=1 leaves third parties out.
    """
    found = Found(Catalogue())
    _admit(found, "builtin", builtin, PluginInfo(name="builtin", distribution=NAME))
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
        first = found.problems[0]
        raise PluginError(f"plug-in {first.plugin!r}: {first.why}")
    return found


def _guarded(found: Found, name: str, source: Any, info: PluginInfo) -> None:
    try:
        module = source.load() if isinstance(source, importlib.metadata.EntryPoint) else source
        _admit(found, name, module, info)
    # The plug-in boundary: whatever a third party raises must not stop the tool.
    except Exception as error:  # noqa: BLE001
        why = str(error) if isinstance(error, DilabenchError) else f"{type(error).__name__}: {error}"
        found.problems.append(Problem(name, why))


def _admit(found: Found, name: str, module: Any, info: PluginInfo) -> None:
    """Check the plug-in in a manager of its own, then put its descriptors on the shelves, all or none."""
    manager = pluggy.PluginManager(NAME)
    manager.add_hookspecs(hookspecs)
    manager.register(module, name)
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        known = ", ".join(f"dilabench_register_{shelf}" for shelf in SHELVES)
        raise PluginError(f"{error}; known hooks: {known}") from None
    offered = {shelf: _offered(manager, shelf) for shelf in SHELVES}
    if not any(offered.values()):
        raise PluginError("it registers nothing; does a function carry @hookimpl and return descriptors?")
    trial = _copied(found.catalogue)
    for catalogue in (trial, found.catalogue):
        for shelf, descriptors in offered.items():
            for descriptor in descriptors:
                getattr(catalogue, shelf).add(descriptor, name)
    found.plugins.append(info)


def _copied(catalogue: Catalogue) -> Catalogue:
    """A copy of the shelves to try additions on, so that a clash leaves the real catalogue untouched."""
    trial = Catalogue()
    for shelf in SHELVES:
        source, target = getattr(catalogue, shelf), getattr(trial, shelf)
        for descriptor in source:
            target.add(descriptor, source.origin(descriptor.name))
    return trial


def _offered(manager: pluggy.PluginManager, shelf: str) -> list[Any]:
    hook = getattr(manager.hook, f"dilabench_register_{shelf}")
    descriptors = [descriptor for result in hook() for descriptor in result]
    for descriptor in descriptors:
        if not hasattr(descriptor, "name") or not hasattr(descriptor, "target" if shelf != "workloads" else "fields"):
            raise PluginError(f"dilabench_register_{shelf} returned {descriptor!r}, which is not a descriptor")
    return descriptors
