"""Everything that is asked of one thing, of whatever kind."""

from collections.abc import Callable, Mapping
from typing import Any

from dilabench.choice.ways import Registry
from dilabench.conformance.backend import check_backend
from dilabench.conformance.implementation import check_implementation
from dilabench.conformance.package import check_package
from dilabench.conformance.pattern import check_pattern
from dilabench.conformance.reporter import check_reporter
from dilabench.conformance.scorecard import Findings, Listener, Scorecard
from dilabench.conformance.suite import check_suite
from dilabench.conformance.timer import check_timer
from dilabench.conformance.workload import check_workload
from dilabench.machine import Machine
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.manager import REGISTRIES, Found
from dilabench.retired import ANY_KIND, no_such_name
from dilabench.version import __version__

# Of each kind of thing, what is asked of what it does: `check(descriptor, catalogue, machine, findings)`.
CHECKS: Mapping[str, Callable[[Any, Catalogue, Machine, Findings], None]] = {
    "patterns": check_pattern,
    "implementations": check_implementation,
    "backends": check_backend,
    "workloads": check_workload,
    "suites": check_suite,
    "reporters": check_reporter,
    "timers": check_timer,
}


def registries_with(name: str, catalogue: Catalogue, kind: str | None = None) -> list[str]:
    """The registries in which a name stands for something; of one kind only, where that is given.

    Raises ConfigError with the nearest names when there is none.
    """
    asked = [one for one in REGISTRIES if kind is None or getattr(catalogue, one).kind == kind]
    holding = [one for one in asked if name in getattr(catalogue, one)]
    if not holding:
        known = {other for one in asked for other in getattr(catalogue, one).names}
        left_out = [problem.plugin for problem in catalogue.problems]
        raise no_such_name(kind or ANY_KIND, name, known, left_out=left_out)
    return holding


def scorecard(
    registry_name: str, name: str, found: Found, machine: Machine, listener: Listener | None = None
) -> Scorecard:
    """Ask everything. `listener` hears of each finding as soon as it is made. Takes from seconds to minutes."""
    registry: Registry[Any] = getattr(found.catalogue, registry_name)
    descriptor, plugin = registry.get(name), registry.origin(name)
    package, behaviour = Findings(listener), Findings(listener)
    check_package(descriptor, plugin, found, package)
    with behaviour.tried(registry.kind):
        CHECKS[registry_name](descriptor, found.catalogue, machine, behaviour)
    return Scorecard(
        name=descriptor.name,
        kind=registry.kind,
        plugin=plugin,
        version=__version__,
        device=machine.device,
        package=tuple(package),
        behaviour=tuple(behaviour),
    )
