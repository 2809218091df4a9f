"""Who is fastest, by the rule that `compare` decides with; what cannot be true is neither ranked nor quoted."""

import pytest

from dilabench.comparison.view import is_quotable, rank
from dilabench.metadata import ABOVE_PEAK_FLOPS, LAUNCH_BOUND
from dilabench.record import Row, Slot


@pytest.fixture
def row(make_row):
    """Twenty turns of three samples of about so many milliseconds; `turn` is the place in each round."""
    return lambda name, ms, *, turn=0, **more: make_row(
        name, ns=1e6 * ms, spread=0.002, samples=3, position=turn, **{"role": "method", **more}
    )


def test_the_fastest_is_proven_against_every_other(row) -> None:
    rows = [row("slow", 12, turn=0, role="plain"), row("fast", 10, turn=1), row("slower", 14, turn=2)]
    found = rank(rows, "cpu")
    assert (found.fastest.case.implementation, found.proven) == ("fast", True)
    assert found.baseline is rows[0]
    assert abs(found.speedups[rows[1].case.case_id] - 1.2) < 0.01


def test_rows_that_differ_by_less_than_the_margin_are_tied(row) -> None:
    rows = [row("a", 10.0, turn=0), row("b", 10.05, turn=1), row("c", 15, turn=2)]
    found = rank(rows, "cpu")
    assert not found.proven
    assert not found.too_few_rounds
    assert [one.case.implementation for one in found.tied] == ["b"]


def test_few_rounds_prove_nothing(row) -> None:
    found = rank([row("a", 10, turn=0, rounds=3), row("b", 20, turn=1, rounds=3)], "cpu")
    assert (found.fastest.case.implementation, found.proven, found.too_few_rounds) == ("a", False, True)


def test_a_time_that_cannot_be_true_is_neither_ranked_nor_quoted(row) -> None:
    impossible = row("cheat", 0.1, turn=1, notes=(ABOVE_PEAK_FLOPS.note("more than this device can do"),))
    bound = row("bound", 10, turn=0, notes=(LAUNCH_BOUND.note("the host takes longer"),))
    assert (is_quotable(impossible), is_quotable(bound)) == (False, True)
    found = rank([bound, impossible], "cpu")
    assert found.fastest is bound
    assert list(found.speedups) == [bound.case.case_id]
    assert rank([impossible], "cpu") is None


def test_the_ratio_comes_from_common_rounds_and_not_from_medians(row) -> None:
    """Both drift by a factor of three; in every round one takes 5 % longer than the other."""
    drift = [1 + 2 * at / 19 for at in range(20)]

    def drifting(name: str, turn: int, factor: float, rounds: range) -> Row:
        slots = tuple(
            Slot(round=at, position=(turn + at) % 5, samples_ns=(int(1e7 * factor * drift[at]),) * 3) for at in rounds
        )
        plain = row(name, 1)
        timing = plain.outcome.timings[0].model_copy(update={"slots": slots})
        return plain.model_copy(update={"outcome": plain.outcome.model_copy(update={"timings": (timing,)})})

    early, late = drifting("early", 0, 1.0, range(12)), drifting("late", 1, 1.05, range(20))
    found = rank([early, late], "cpu")
    assert abs(found.speedups[late.case.case_id] - 1 / 1.05) < 0.005


def test_a_row_is_not_proven_to_be_faster_by_its_few_undisturbed_samples(row) -> None:
    """A call whose launches are waited for: one sample in five is 8 % below the other row, the rest far above."""

    def samples(name: str, turn: int, times: tuple[float, ...]) -> Row:
        slots = tuple(
            Slot(round=at, position=turn, samples_ns=tuple(int(1e6 * ms + at) for ms in times)) for at in range(20)
        )
        plain = row(name, 1)
        timing = plain.outcome.timings[0].model_copy(update={"slots": slots})
        return plain.model_copy(update={"outcome": plain.outcome.model_copy(update={"timings": (timing,)})})

    waited, steady = samples("waited", 0, (11.1, 13, 14, 15, 16)), samples("steady", 1, (12.1,) * 5)
    found = rank([waited, steady], "cuda")
    assert (found.fastest, found.tied, found.too_few_rounds) == (steady, (waited,), False)
    # Where its median is smaller as well, it is faster.
    found = rank([samples("waited", 0, (11.1, 11.2, 11.3, 14, 16)), steady], "cuda")
    assert found.fastest.case.implementation == "waited"
    assert found.proven


@pytest.mark.parametrize(
    ("roles", "base"),
    [
        (("theirs plain", "plain", "method"), 1),
        (("theirs plain", "method", "method"), 1),
        (("theirs method", "theirs plain"), 1),
        (("theirs method", "theirs method"), 0),
        (("method", "plain"), 1),
    ],
)
def test_speed_ups_refer_to_a_built_in(make_row, roles, base):
    rows = [
        make_row(f"row-{at}", role=role.split()[-1], position=at, ns=1e7 * (at + 1)) for at, role in enumerate(roles)
    ]
    rows = [
        one.model_copy(update={"planned": one.planned.model_copy(update={"source": "sleepy 1.0"})})
        if "theirs" in role
        else one
        for one, role in zip(rows, roles, strict=True)
    ]
    assert rank(rows, "cpu").baseline is rows[base]
