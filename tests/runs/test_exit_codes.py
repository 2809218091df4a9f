"""One order of severity for whatever commands end with, over all that may come together."""

from itertools import chain, combinations

import pytest

from dilabench.conformance.scorecard import Finding, Scorecard
from dilabench.errors import ExitCode, exit_code_for, gravest

# design.md: interrupted results and wrong ones first; that something was not measured says least.
BY_SEVERITY = {
    "interrupted": ExitCode.INTERRUPTED,
    "wrong": ExitCode.WRONG_OUTPUT,
    "failed": ExitCode.CASE_FAILED,
    "slower": ExitCode.REGRESSION,
    "undecided": ExitCode.INCONCLUSIVE,
    "broken": ExitCode.ENVIRONMENT,
    "nothing": ExitCode.NOTHING_MEASURED,
    "incomplete": ExitCode.INCOMPLETE,
}
SUBSETS = list(chain.from_iterable(combinations(BY_SEVERITY, size) for size in range(len(BY_SEVERITY) + 1)))


@pytest.mark.parametrize("found", SUBSETS, ids=lambda found: "+".join(found) or "ok")
def test_the_gravest_of_what_was_found_counts(found):
    expected = BY_SEVERITY[found[0]] if found else ExitCode.OK
    assert exit_code_for(**dict.fromkeys(found, True)) is expected
    assert gravest(BY_SEVERITY[name] for name in reversed(found)) is expected


RESULTS = ("wrong", "failed", "skipped", "right")


def card(*results):
    behaviour = tuple(Finding(name=result, result=result) for result in results)
    return Scorecard(name="n", kind="backend", plugin="p", version="1", device="cpu", package=(), behaviour=behaviour)


@pytest.mark.parametrize("results", list(combinations(RESULTS, 2)), ids="+".join)
def test_a_thing_that_cannot_be_tried_hides_no_wrong_output_of_its_namesake(results):
    """`plugin check` of a name that stands for several things."""
    order = [ExitCode.WRONG_OUTPUT, ExitCode.CASE_FAILED, ExitCode.NOTHING_MEASURED, ExitCode.OK]
    first, second = ({card(one).exit_code for one in results}, {card(*results).exit_code})
    assert gravest(first) is min(first, key=order.index)
    assert second == {gravest(first - {ExitCode.NOTHING_MEASURED}) if "right" in results else gravest(first)}
