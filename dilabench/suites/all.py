"""Suite `all`: every question that this machine can answer, the most telling ones first."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dilabench.errors import ConfigError
from dilabench.metadata import SUITE
from dilabench.plugins.catalogue import load_target
from dilabench.plugins.descriptors import Suite
from dilabench.record import PlannedCase, Row
from dilabench.request import RunRequest
from dilabench.suites.planner import Planner


def suites(planner: Planner) -> tuple[Suite, ...]:
    """The other suites, those first that tell most, those last that can use any time that is left."""
    others = [one for one in planner.catalogue.suites if one.name != planner.request.suite]
    return tuple(sorted(others, key=lambda one: (one.takes_the_rest, -one.priority)))


def expand(request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """The cases of the suites, each labelled with its suite and planned once, for the first that asks.

    Those that take the rest of the time are left to `follow_up`.
    """
    offered = {one.name: one.options for one in suites(planner) if one.options}
    unknown = sorted(request.options.keys() - {option for options in offered.values() for option in options})
    if unknown:
        passed_on = ", ".join(offered)
        raise ConfigError(f"suite {request.suite!r} has no option {unknown[0]!r}; it passes on those of {passed_on}")
    planned: dict[str, PlannedCase] = {}
    for suite in suites(planner):
        if not suite.takes_the_rest:
            for one in _cases(planner, suite, request):
                planned.setdefault(one.case.case_id, one)
    return tuple(planned.values())


def follow_up(rows: Sequence[Row], request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """What the suites ask for when they have seen their rows; when that is done, the suite that takes what is left."""
    planned: list[PlannedCase] = []
    for suite in suites(planner):
        if suite.follow_up is not None:
            own = [row for row in rows if SUITE.of(row.planned) == suite.name]
            asked = _own_request(suite, request)
            planned += _labelled(load_target(suite.follow_up)(own, asked, replace(planner, request=asked)), suite)
    known = {row.case.case_id for row in rows}
    if not any(one.case.case_id not in known for one in planned):
        for suite in suites(planner):
            if suite.takes_the_rest:
                planned += _cases(planner, suite, request)
    return tuple(planned)


def _cases(planner: Planner, suite: Suite, request: RunRequest) -> Iterator[PlannedCase]:
    asked = _own_request(suite, request)
    return _labelled(load_target(suite.target)(asked, replace(planner, request=asked)), suite)


def _own_request(suite: Suite, request: RunRequest) -> RunRequest:
    options = {option: value for option, value in request.options.items() if option in (suite.options or ())}
    return request.model_copy(update={"suite": suite.name, "options": options})


def _labelled(planned: Sequence[PlannedCase], suite: Suite) -> Iterator[PlannedCase]:
    return (one.model_copy(update={"labels": one.labels | SUITE.entry(suite.name)}) for one in planned)
