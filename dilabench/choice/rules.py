"""Which implementation and backend is fastest for a workload: what `-i auto` means.

What was measured decides (`choice.measured`); without any, the priorities on the descriptors do.
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
    """An implementation and backend, and what the choice rests on: 'first use', 'tuned', 'shipped', 'rule', 'another
    rank', or over ranks what is expected of it and of the next. `told`: the times that it rests on, if there are any.
    """

    implementation: str
    backend: str | None
    source: str
    told: str = field(default="", compare=False)


def choose(ways: Ways, machine: Machine, workload: Workload, ranks: int = 1) -> Choice:
    """The fastest known for the workload that can run here; measured on the nearest cell that is alike.

    What was measured is of one device. Raises ConfigError when nothing can compute it on this machine.
    """
    near = measured_near(ways, machine, workload) if ranks == 1 else None
    return choose_after(near, ways, machine, workload, ranks)


def choose_after(near: TunedCell | None, ways: Ways, machine: Machine, workload: Workload, ranks: int = 1) -> Choice:
    """As `choose`, by what `measured_near` gave."""
    if near and usable(ways, machine, _way(near, workload, ranks), measured=True):
        return Choice(near.implementation, near.backend, "tuned", near.told)
    for source, path in (("tuned", tune_path(machine)), ("shipped", shipped_path(machine))):
        for cell in alike(read_tune_file(path), workload):
            # What was measured on this very workload needs no rule.
            if usable(ways, machine, _way(cell, workload, ranks), measured=cell.workload == workload):
                return Choice(cell.implementation, cell.backend, source, cell.told)
    names = by_priority(ways, workload, ranks)
    candidates = (Way(name, None, workload, ranks) for name in names)
    able = (way for way in candidates if usable(ways, machine, way))
    best = _expected(ways, machine, tuple(able)) if ranks > 1 else _first(able)
    if best is not None:
        return best
    raise ConfigError(f"nothing here can compute {workload.label()}; `dilabench list --why` says why")


def _first(usable: Iterable[Way]) -> Choice | None:
    return next((Choice(way.implementation, None, "rule") for way in usable), None)


def _expected(ways: Ways, machine: Machine, usable: Sequence[Way]) -> Choice | None:
    """What should be the fastest over ranks, with what is expected of it and of the next."""
    from dilabench.choice.over_ranks import fastest_expected

    told = fastest_expected(usable, machine.device, ways)
    if not told or told[0][1] is None:
        return _first(usable)
    (best, seconds), *others = [(way.implementation, one) for way, one in told if one is not None]
    next_best = "".join(f", {name} {format_seconds(one)}" for name, one in others[:1])
    return Choice(best, None, f"{format_seconds(seconds)} expected{next_best}")


def _way(cell: TunedCell, workload: Workload, ranks: int) -> Way:
    return Way(cell.implementation, cell.backend, workload, ranks)


def by_priority(ways: Ways, workload: Workload, ranks: int = 1) -> tuple[str, ...]:
    """What may be taken unmeasured for a kind of pattern, on one device or over ranks, best first."""
    found = [
        one
        for one in ways.implementations
        if one.priority
        and one.supports.computes(workload.pattern.kind)
        # On one rank an implementation over ranks would do what its form for one device does.
        and (one.supports.max_world_size == 1) == (ranks == 1)
    ]
    return tuple(one.name for one in sorted(found, key=lambda one: -one.priority))


def usable(ways: Ways, machine: Machine, way: Way, measured: bool = False) -> bool:
    """Whether it can run here, and is taken unasked for such a workload unless it was `measured`."""
    there = way.implementation in ways.implementations
    if not there or (way.backend is not None and way.backend not in ways.backends):
        return False
    if ways.implementations.get(way.implementation).chooses:
        return False
    if not measured and ways.reasons_unasked(way, machine):
        return False
    return not ways.reasons_against(way, machine)
