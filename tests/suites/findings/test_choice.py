"""The regret of the choice from rows whose answer is known."""

from types import SimpleNamespace

import pytest

from dilabench.metadata import CHOSEN, INTERFERENCE, LAUNCH_BOUND, SHAPE
from dilabench.plugins.manager import discover
from dilabench.record import Row, Skipped
from dilabench.stats.samples.location import Interval
from dilabench.suites.choice.findings import analyse, regrets

CATALOGUE = discover().catalogue


@pytest.fixture
def shape(row):
    """shape(number, choice, *others): rows of one shape by milliseconds; the choice says that it took `strided`."""

    def make(number, choice, *others):
        labels, size = SHAPE.entry(number), {"seq_len": 384 + number}
        chosen = row("library", choice, labels=labels, backend=None, **size)
        if choice is not None:
            notes = (CHOSEN.note("strided:math (first use)", observed=2e9),)
            chosen = chosen.model_copy(update={"outcome": chosen.outcome.model_copy(update={"notes": notes})})
        ways = ("gather", "strided", "fused")
        return [chosen, *(row(ways[at], ms, at=at + 1, labels=labels, **size) for at, ms in enumerate(others))]

    return make


@pytest.fixture
def made(record):
    def make(*shapes, asked=200):
        config = {"options": {"shapes": asked}}
        return record(*(row for rows in shapes for row in rows), suite="choice").model_copy(update={"config": config})

    return make


def cut(row):
    return Row(planned=row.planned, outcome=Skipped(code="budget", why="no time"))


def test_regret_is_against_the_fastest_other_way(shape, made):
    found = list(regrets(made(shape(1, 10.0, 30.0, 8.0, 20.0), shape(2, 9.0, 10.0)), CATALOGUE))
    assert [(one.number, round(one.ratio, 3), one.other.case.implementation) for one in found] == [
        (1, 1.25, "strided"),
        (2, 0.9, "gather"),
    ]
    assert all(one.low <= one.ratio <= one.high for one in found)
    assert [(one.is_much, one.is_proven) for one in found] == [(True, True), (False, False)]


def test_the_answer_says_how_often_how_much_and_what_is_left(shape, made):
    record = made(shape(1, 10.0, 30.0, 8.0), shape(2, 10.0, 10.0), shape(3, 9.0, 10.0), asked=5)
    (section,) = analyse(record, CATALOGUE)
    assert section.answers
    assert "Over 3 shapes the choice took 1.05 times as long" in section.sentence
    assert "1.00 in the median and 1.25 at worst" in section.sentence
    assert "over 1.1 times slower in 1 (33.3%), 1 of them beyond doubt" in section.sentence
    assert "To choose took 2 s per shape" in section.sentence
    assert "2 of 5 shapes are missing; continue with `dilabench run choice --resume by-hand" in section.sentence
    lines = [dict(zip(section.columns, cells, strict=True)) for cells in section.rows]
    assert [(one["shape"], one["took"], one["regret"], one["over 1.1"]) for one in lines] == [
        ("1", "strided:math (first use)", "1.25", "yes"),
        ("2", "strided:math (first use)", "1.00", "no"),
        ("3", "strided:math (first use)", "0.90", "no"),
    ]


def test_a_shard_misses_shapes_of_its_own_alone(shape, made):
    record = made(shape(2, 10.0, 10.0), asked=5)
    half = record.model_copy(update={"config": {**record.config, "shard": (2, 2)}})
    (section,) = analyse(half, CATALOGUE)
    assert "1 of 2 shapes are missing" in section.sentence
    (section,) = analyse(record.model_copy(update={"argv": ("merge", "a", "b")}), CATALOGUE)
    assert "4 of 5 shapes are missing; continue the merged runs, then merge again." in section.sentence


def test_what_a_caller_waits_for_is_told_where_launches_take_longer(shape, made):
    rows = [*shape(1, 10.0, 12.0), *shape(2, 9.0, 10.0)]
    (section,) = analyse(made(rows, asked=2), CATALOGUE)
    assert "waits" not in section.sentence
    for at, host_ms in ((0, 30.0), (1, 15.0)):
        note = LAUNCH_BOUND.note("the host takes long", observed=host_ms * 1e6)
        notes = (*rows[at].outcome.notes, note)
        rows[at] = rows[at].model_copy(update={"outcome": rows[at].outcome.model_copy(update={"notes": notes})})
    (section,) = analyse(made(rows, asked=2), CATALOGUE)
    assert "took 0.87 times as long" in section.sentence
    assert "In 1 shape some way takes longer to launch" in section.sentence
    assert (
        "took 1.45 times as long in the mean, 1.45 in the median and 2.00 at worst, over 1.1 in 1." in section.sentence
    )


def test_launches_of_the_chosen_way_itself_are_told_apart(shape, made):
    """The fixture's choice says `strided:math`: what it took longer than that is the library around it."""
    rows = shape(1, 10.0, 30.0, 9.0)
    strided = rows[2].planned.case.model_copy(update={"backend": "math"})
    rows[2] = rows[2].model_copy(update={"planned": rows[2].planned.model_copy(update={"case": strided})})
    for at, host_ms in ((0, 30.0), (2, 15.0)):
        notes = (*rows[at].outcome.notes, LAUNCH_BOUND.note("the host takes long", observed=host_ms * 1e6))
        rows[at] = rows[at].model_copy(update={"outcome": rows[at].outcome.model_copy(update={"notes": notes})})
    (section,) = analyse(made(rows, asked=1), CATALOGUE)
    assert "over 1.1 in 1, in 1 of these against the chosen implementation called directly." in section.sentence


def test_what_noise_may_have_done_is_not_proven(shape, made, monkeypatch):
    view = SimpleNamespace(ratio=1.2, interval=Interval(0.9, 1.6, 0.95))
    monkeypatch.setattr("dilabench.suites.choice.findings.pair_views", lambda *_: [view])
    (section,) = analyse(made(shape(1, 12.0, 10.0), asked=1), CATALOGUE)
    assert "in 1 (100.0%), 0 of them beyond doubt" in section.sentence
    assert section.rows[0][-3:] == ("1.20", "0.90–1.60", "within noise")
    assert "left out" not in section.sentence


def test_nothing_is_proven_where_neighbours_disturbed_a_way(shape, made):
    rows = shape(1, 10.0, 30.0, 8.0)
    note = INTERFERENCE.note("alone it is 40 % slower", observed=0.4)
    rows[1] = rows[1].model_copy(update={"outcome": rows[1].outcome.model_copy(update={"notes": (note,)})})
    (section,) = analyse(made(rows, asked=1), CATALOGUE)
    assert "in 1 (100.0%), 0 of them beyond doubt" in section.sentence
    assert section.rows[0][-1] == "disturbed"


def test_without_common_rounds_there_is_no_interval(shape, made):
    rows = shape(1, 12.0, 10.0)
    slots = tuple(slot.model_copy(update={"round": slot.round + 50}) for slot in rows[0].outcome.timings[0].slots)
    timing = rows[0].outcome.timings[0].model_copy(update={"slots": slots})
    rows[0] = rows[0].model_copy(update={"outcome": rows[0].outcome.model_copy(update={"timings": (timing,)})})
    (found,) = regrets(made(rows), CATALOGUE)
    assert (round(found.ratio, 2), found.low, found.is_proven) == (1.2, None, False)


def test_only_ten_are_shown_and_the_worst_first(shape, made):
    record = made(*(shape(number, 10.0 + number, 10.0) for number in range(1, 13)), asked=12)
    (section,) = analyse(record, CATALOGUE)
    assert [cells[0] for cells in section.rows] == [str(number) for number in range(12, 2, -1)]


def test_a_shape_counts_whole_or_not_at_all(shape, made):
    whole, half, failed = shape(1, 10.0, 10.0), shape(2, 50.0, 10.0, 20.0), shape(3, None, 10.0)
    half[2] = cut(half[2])
    (section,) = analyse(made(whole, half, failed, asked=3), CATALOGUE)
    assert "Over 1 shape the choice took 1.00" in section.sentence
    assert "Without a time of the choice or of another way: 1 shape (3)." in section.sentence
    assert "1 of 3 shapes are missing" in section.sentence
    (nothing,) = analyse(made(shape(1, None)), CATALOGUE)
    assert nothing.sentence.startswith("No shape was measured.")
    assert nothing.rows == ()
