"""The fastest implementation and backend of a workload, as `-i auto` chooses it.

Measurements decide (`choice.measured`); without any, the priorities of the descriptors do.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dilabench.choice.measured import TunedCell, alike, measured_near, read_tune_file, shipped_path, tune_path
from dilabench.choice.ways import Way, Ways
from dilabench.errors import ConfigError
from dilabench.machine import Machine
from dilabench.units import format_seconds
from dilabench.workload.spec import Workload


@dataclass(frozen=True, slots=True)
class Choice:
    """An implementation and backend, and the source of the choice: 'first use', 'tuned', 'shipped', 'rule', 'another
    rank', or over ranks the expected times. `times`: the measured times behind it as text, if there are any.
    """

    implementation: str
    backend: str | None
    source: str
    times: str = field(default="", compare=False)


def choose(ways: Ways, machine: Machine, workload: Workload, ranks: int = 1) -> Choice:
    """Return the fastest known choice that can run here; on one device, that of the nearest similar cell.

    If none is preferred for the workload, the first by priority that computes it. Raises ConfigError if nothing can
    compute the workload on this machine.
    """
    near = measured_near(ways, machine, workload) if ranks == 1 else None
    return choose_after(near, ways, machine, workload, ranks)


def choose_after(near: TunedCell | None, ways: Ways, machine: Machine, workload: Workload, ranks: int = 1) -> Choice:
    """Choose like `choose`, given the result of `measured_near`."""
    if near and usable(ways, machine, _way(near, workload, ranks), measured=True):
        return Choice(near.implementation, near.backend, "tuned", near.times)
    for source, path in (("tuned", tune_path(machine)), ("shipped", shipped_path(machine))):
        for cell in alike(read_tune_file(path), workload):
            # A measurement of exactly this workload overrides the rules.
            if usable(ways, machine, _way(cell, workload, ranks), measured=cell.workload == workload):
                return Choice(cell.implementation, cell.backend, source, cell.times)
    names = by_priority(ways, workload, ranks)
    candidates = [Way(name, None, workload, ranks) for name in names]
    preferred = (way for way in candidates if usable(ways, machine, way))
    best = _expected(ways, machine, tuple(preferred)) if ranks > 1 else _first(preferred)
    best = best or _first(way for way in candidates if usable(ways, machine, way, measured=True))
    if best is not None:
        return best
    raise nothing_computes(ways, machine, workload, ranks)


def nothing_computes(ways: Ways, machine: Machine, workload: Workload, ranks: int = 1) -> ConfigError:
    """The error that says why no implementation computes a workload here, and which of another device does."""
    against = []
    for name in by_priority(ways, workload, ranks):
        way = Way(name, None, workload, ranks)
        reasons = ways.reasons_against(way, machine) or ways.reasons_unasked(way, machine)
        against.append(f"{name}: {', '.join(reasons)}")
    elsewhere = [
        f"{implementation.name} on {device}"
        for implementation in ways.implementations
        for device in sorted(implementation.supports.devices - {machine.device})
        if ranks == 1 and implementation.role != "oracle" and not implementation.chooses
        if implementation.takes == "heads" and not ways.unsupported(implementation, workload, device)
    ]
    why = "; ".join(against) or f"no implementation has pattern {workload.pattern.kind}"
    able = f"; {', '.join(elsewhere)} can" if elsewhere else ""
    return ConfigError(f"nothing here can compute {workload.label()}: {why}{able}")


def _first(able: Iterable[Way]) -> Choice | None:
    return next((Choice(way.implementation, None, "rule") for way in able), None)


def _expected(ways: Ways, machine: Machine, usable: Sequence[Way]) -> Choice | None:
    """Return the choice over ranks with the smallest expected time, and name that time and the runner-up's."""
    from dilabench.choice.over_ranks import fastest_expected

    expected = fastest_expected(usable, machine.device, ways)
    if not expected or expected[0][1] is None:
        return _first(usable)
    (best, seconds), *others = [(way.implementation, time) for way, time in expected if time is not None]
    next_best = "".join(f", {name} {format_seconds(time)}" for name, time in others[:1])
    return Choice(best, None, f"{format_seconds(seconds)} expected{next_best}")


def _way(cell: TunedCell, workload: Workload, ranks: int) -> Way:
    return Way(cell.implementation, cell.backend, workload, ranks)


def by_priority(ways: Ways, workload: Workload, ranks: int = 1) -> tuple[str, ...]:
    """Return the implementations that `auto` may take without a measurement for a kind of pattern, best first."""
    able = [
        implementation
        for implementation in ways.implementations
        if implementation.priority
        and implementation.supports.computes(workload.pattern.kind)
        # On one rank an implementation over ranks computes the same as its form for one device.
        and (implementation.supports.max_world_size == 1) == (ranks == 1)
    ]
    return tuple(
        implementation.name for implementation in sorted(able, key=lambda implementation: -implementation.priority)
    )


def usable(ways: Ways, machine: Machine, way: Way, measured: bool = False) -> bool:
    """Return True if it can run here and, unless it was `measured`, is preferred for such a workload."""
    there = way.implementation in ways.implementations
    if not there or (way.backend is not None and way.backend not in ways.backends):
        return False
    if ways.implementations.get(way.implementation).chooses:
        return False
    if not measured and ways.reasons_unasked(way, machine):
        return False
    return not ways.reasons_against(way, machine)
