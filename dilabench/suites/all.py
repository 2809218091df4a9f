"""Suite `all`: every question that this machine can answer, the most telling ones first."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dilabench.errors import ConfigError
from dilabench.plugins.catalogue import load_target
from dilabench.record import PlannedCase, Row
from dilabench.request import RunRequest
from dilabench.suites.billion import cases as billion
from dilabench.suites.extreme import cases as extreme
from dilabench.suites.planner import Planner
from dilabench.suites.ring import cases as ring

NAME = "all"
SUITE = "suite"
# What a reader wants to know first: does it work and roughly how fast; which to choose; how far it goes; then the rest.
ORDER = ("quick", "implementations", "extreme", "backends", "range", "optimization")
# It can use any time that is left, so it waits until nothing else does.
LAST = "billion"
OPTIONS = {
    "extreme": extreme.OPTIONS,
    "billion": billion.OPTIONS,
    "ring": ring.OPTIONS,
    "distributed": ring.OPTIONS,
}


def suites(planner: Planner) -> tuple[str, ...]:
    """The other suites: ours in the order of what they tell, then everything else that is installed."""
    installed = [name for name in planner.catalogue.suites.names if name != NAME]
    return (*(name for name in ORDER if name in installed), *(name for name in installed if name not in ORDER))


def expand(request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """The cases of every suite but the last, each labelled with its suite and planned once, for the first that asks."""
    unknown = sorted(request.options.keys() - {option for options in OPTIONS.values() for option in options})
    if unknown:
        raise ConfigError(f"suite {NAME!r} has no option {unknown[0]!r}; it passes on those of {', '.join(OPTIONS)}")
    planned: dict[str, PlannedCase] = {}
    for name in suites(planner):
        if name != LAST:
            for one in _cases(planner, name, request):
                planned.setdefault(one.case.case_id, one)
    return tuple(planned.values())


def follow_up(rows: Sequence[Row], request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """What the suites ask for when they have seen their rows; when that is done, the suite that takes what is left."""
    planned: list[PlannedCase] = []
    for name in suites(planner):
        target = planner.catalogue.suites.get(name).follow_up
        if target is not None:
            own = [row for row in rows if row.planned.labels.get(SUITE) == name]
            asked = _own_request(name, request)
            planned += _labelled(load_target(target)(own, asked, replace(planner, request=asked)), name)
    known = {row.case.case_id for row in rows}
    if not any(one.case.case_id not in known for one in planned) and LAST in planner.catalogue.suites:
        planned += _cases(planner, LAST, request)
    return tuple(planned)


def _cases(planner: Planner, name: str, request: RunRequest) -> Iterator[PlannedCase]:
    asked = _own_request(name, request)
    target = load_target(planner.catalogue.suites.get(name).target)
    return _labelled(target(asked, replace(planner, request=asked)), name)


def _own_request(name: str, request: RunRequest) -> RunRequest:
    options = {option: value for option, value in request.options.items() if option in OPTIONS.get(name, ())}
    return request.model_copy(update={"suite": name, "options": options})


def _labelled(planned: Sequence[PlannedCase], name: str) -> Iterator[PlannedCase]:
    return (one.model_copy(update={"labels": {**one.labels, SUITE: name}}) for one in planned)
