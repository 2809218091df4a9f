"""Times relative to a reference that took turns with them."""

from dataclasses import replace
from math import log

import pytest

from dilabench.comparison.across import compare_across
from dilabench.comparison.gate import common_change
from dilabench.errors import ConfigError
from dilabench.record import Measured
from dilabench.stats.decisions.decide import Policy
from dilabench.stats.decisions.verdicts import Code

CPU = Policy.for_device("cpu")


@pytest.fixture
def session(make_row, make_record):
    """A session on a machine that was so much slower than usual; `gather` and `strided` took turns, `other` did not."""

    def make(index, machine=1.0, **effects):
        rows = [
            make_row(name, seed=index, position=position, ns=1e7 * machine * effects.get(name, 1.0))
            for position, name in enumerate(("gather", "strided", "other"))
        ]
        alone = rows[2].outcome
        slots = tuple(slot.model_copy(update={"position": 0}) for slot in alone.timings[0].slots)
        timing = alone.timings[0].model_copy(update={"slots": slots})
        rows[2] = rows[2].model_copy(update={"outcome": alone.model_copy(update={"timings": (timing,)})})
        return make_record(rows, run_id=f"run{index}")

    return make


@pytest.fixture
def history(session):
    """Six sessions between which the machine's speed varies by a third."""
    return [session(index, machine) for index, machine in enumerate((1.0, 1.2, 0.9, 1.3, 1.0, 1.1))]


@pytest.mark.parametrize(("effect", "code"), [(1.0, Code.SAME), (1.06, Code.SLOWER), (0.94, Code.FASTER)])
def test_what_the_machine_does_to_both_cancels(history, session, effect, code):
    new = [session(10 + index, machine, strided=effect) for index, machine in enumerate((1.5, 1.6, 1.4))]
    absolute = compare_across(history, new, policy=CPU)
    found = compare_across(history, new, policy=CPU, reference="gather")
    (pair,) = found.pairs
    assert pair.verdict.code is code
    assert pair.verdict.numbers.log_ratio == pytest.approx(log(effect), abs=0.005)
    assert {one.verdict.code for one in absolute.pairs} != {Code.SAME}
    assert "relative to gather in the same rounds, itself 1.39x" in found.warnings[0]


def test_a_row_that_took_no_turns_with_it_is_not_compared(history, session):
    found = compare_across(history, [session(10)], policy=CPU, reference="gather")
    assert [(one.case.implementation, one.lack) for one in found.uncompared] == [("other", "not comparable")]


def test_samples_are_scaled_in_copies(history, session):
    before = history[0].model_dump()
    compare_across(history, [session(10)], policy=CPU, reference="gather")
    assert history[0].model_dump() == before


@pytest.mark.parametrize(
    ("changes", "what"), [({"tool_version": "1"}, "dilabench: 0 against 1"), ({"soft": {"torch": "2.7"}}, "torch: ")]
)
def test_other_software_may_have_changed_the_reference(history, session, make_record, changes, what):
    new = make_record(session(10).rows, run_id="new", **changes)
    with pytest.raises(ConfigError, match=f"gather cannot be the reference, .*{what}"):
        compare_across(history, [new], policy=CPU, reference="gather")


def test_a_reference_that_the_baseline_lacks(history, session):
    with pytest.raises(ConfigError, match="unknown reference 'gathr'; did you mean gather"):
        compare_across(history, [session(10)], policy=CPU, reference="gathr")


def test_a_change_that_all_cases_share_may_be_the_machine(history, session):
    steady = [session(index) for index in range(6)]
    alike = compare_across(steady, [session(10, 1.2)], policy=CPU)
    assert "all 3 cases look slower: either code that they share has changed, or the machine" in common_change(alike)
    assert common_change(compare_across(steady, [session(10, strided=1.2)], policy=CPU)) is None


def test_ratios_that_may_be_1_are_no_change_that_all_cases_share(history, session):
    alike = compare_across([session(index) for index in range(6)], [session(10, 1.2)], policy=CPU)
    pairs = []
    for pair in alike.pairs:
        numbers = replace(pair.verdict.numbers, ratio_low=0.9)
        pairs.append(replace(pair, verdict=replace(pair.verdict, numbers=numbers)))
    assert common_change(replace(alike, pairs=tuple(pairs))) is None


def test_the_reference_has_no_other_timer(history, session, make_row):
    """Rows are scaled timer by timer."""
    new = session(10)
    hot = make_row("strided", position=1, timer="hot").outcome.timings
    rows = list(new.rows)
    outcome = rows[1].outcome
    assert isinstance(outcome, Measured)
    rows[1] = rows[1].model_copy(update={"outcome": outcome.model_copy(update={"timings": (*outcome.timings, *hot)})})
    found = compare_across(history, [new.model_copy(update={"rows": tuple(rows)})], policy=CPU, reference="gather")
    assert [pair.timer for pair in found.pairs] == ["wall"]
