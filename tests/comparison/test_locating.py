"""Rows that are located together have the medians and intervals that each has alone."""

import random

import pytest

from dilabench.comparison import view
from dilabench.record import Slot

SAMPLES = ((3,), (3, 3, 3), (0, 2, 5, 0, 2), (1, 0), (4,) * 40)
SESSIONS = ((0,), (0, 1), (1, 0), (3, 1, 2, 0))


@pytest.fixture
def rows(make_row):
    """Rows of several sizes of slots, also empty ones, in sessions in several orders, five of each kind."""
    rng = random.Random(0)

    def row(name, sizes, sessions):
        slots = tuple(
            Slot(session=sessions[at % len(sessions)], round=at, samples_ns=tuple(rng.choices(range(100, 999), k=size)))
            for at, size in enumerate(sizes)
        )
        made = make_row(name)
        timing = made.outcome.timings[0].model_copy(update={"slots": slots})
        return made.model_copy(update={"outcome": made.outcome.model_copy(update={"timings": (timing,)})})

    return [row(f"{name}", sizes, sessions) for name in range(5) for sizes in SAMPLES for sessions in SESSIONS]


@pytest.mark.parametrize("together", [1, 7, 2**15])
def test_rows_are_located_together_as_alone(rows, monkeypatch, together):
    monkeypatch.setattr(view, "LOCATED_TOGETHER", together)
    monkeypatch.setattr(view, "_LOCATIONS", {})
    alone = [view.location_of(row.outcome.timings[0]) for row in rows]
    view._LOCATIONS.clear()
    view.locate_rows(rows)
    assert len(view._LOCATIONS) == len(rows)
    assert [view.location_of(row.outcome.timings[0]) for row in rows] == alone


def test_ten_times_the_rows_are_located_by_less_than_ten_times_the_calls(calls_of, make_row):
    few, many = ([make_row(seed=seed) for seed in range(count)] for count in (10, 100))
    view.locate_rows([make_row()])
    assert calls_of(view.locate_rows, many) < 10 * calls_of(view.locate_rows, few)
