"""Suite `all`: every suite that applies to this machine, the most informative ones first."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from dilabench.metadata import SUITE
from dilabench.plugins.descriptors import Suite
from dilabench.record import PlannedCase, Row
from dilabench.request import RunRequest
from dilabench.suites.planner import Planner, cases_of, more_cases_of, refuse_unknown_options


def suites(planner: Planner) -> tuple[Suite, ...]:
    """The other suites, by priority; those that use all remaining time are last."""
    others = [suite for suite in planner.catalogue.suites if suite.name != planner.request.suite and not suite.by_name]
    return tuple(sorted(others, key=lambda suite: (suite.takes_the_rest, -suite.priority)))


def expand(request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """The cases of the suites, each planned once and labelled with the first suite that plans it.

    Suites that use all remaining time are left to `follow_up`.
    """
    refuse_unknown_options(
        request, {name for suite in suites(planner) if suite.options for name in suite.options.model_fields}
    )
    planned: dict[str, PlannedCase] = {}
    for suite in suites(planner):
        if not suite.takes_the_rest:
            for plan in _cases(planner, suite):
                planned.setdefault(plan.case.case_id, plan)
    return tuple(planned.values())


def follow_up(rows: Sequence[Row], _request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """The follow-up cases of the suites; after these, the suite that uses all remaining time."""
    planned: list[PlannedCase] = []
    for suite in suites(planner):
        if suite.follow_up is not None:
            suite_rows = [row for row in rows if SUITE.of(row.planned) == suite.name]
            with _left_out(planner, suite):
                planned += _labelled(more_cases_of(suite, _own(planner, suite), suite_rows), suite)
    known = {row.case.case_id for row in rows}
    if not any(plan.case.case_id not in known for plan in planned):
        for suite in suites(planner):
            if suite.takes_the_rest:
                planned += _cases(planner, suite)
    return tuple(planned)


def _cases(planner: Planner, suite: Suite) -> list[PlannedCase]:
    """The suite's cases; empty if it fails, which does not end the run."""
    with _left_out(planner, suite):
        return list(_labelled(cases_of(suite, _own(planner, suite)), suite))
    return []


def _left_out(planner: Planner, suite: Suite) -> AbstractContextManager[None]:
    return planner.catalogue.left_out(planner.catalogue.suites.origin(suite.name), f"suite {suite.name!r}")


def _own(planner: Planner, suite: Suite) -> Planner:
    """A planner for the suite's part of the request."""
    fields = suite.options.model_fields if suite.options else {}
    options = {name: value for name, value in planner.request.options.items() if name in fields}
    return planner.asking(suite=suite.name, options=options)


def _labelled(planned: Sequence[PlannedCase], suite: Suite) -> Iterator[PlannedCase]:
    return (plan.model_copy(update={"labels": plan.labels | SUITE.entry(suite.name)}) for plan in planned)
