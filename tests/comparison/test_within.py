"""Rows of one record against each other."""

from dataclasses import replace
from math import exp

import pytest

from dilabench.comparison.gate import exit_code
from dilabench.comparison.within import compare_within
from dilabench.errors import ConfigError, ExitCode
from dilabench.record import Failed, Optimizations, Skipped, Verification
from dilabench.stats.decisions.decide import Policy
from dilabench.stats.decisions.verdicts import Cause, Code

CPU = Policy.for_device("cpu")
MIRROR = {Code.SLOWER: Code.FASTER, Code.FASTER: Code.SLOWER}


@pytest.fixture
def duel(make_row, make_record):
    def make(ratio, *, seed=0, **fields):
        rows = [
            make_row("gather", position=0, seed=seed, **fields),
            make_row("strided", position=1, seed=seed, ns=1e7 * ratio, **fields),
        ]
        return make_record(rows, run_id=f"run{seed}")

    return make


@pytest.mark.parametrize(("ratio", "code"), [(1.06, Code.SLOWER), (0.94, Code.FASTER), (1.0, Code.SAME)])
def test_verdict_follows_the_interleaved_rounds(duel, ratio, code):
    (cell,) = compare_within([duel(ratio)], policy=CPU).pairs
    assert (cell.verdict.code, cell.route) == (code, "interleaved")
    assert (cell.baseline.implementation, cell.candidate.implementation) == ("gather", "strided")
    assert cell.verdict.numbers.rounds == 20
    assert cell.verdict.numbers.mde > 0.02


@pytest.mark.parametrize("ratio", [1.06, 0.94, 1.0, 1.02])
def test_swapping_the_sides_mirrors_the_verdict(duel, ratio):
    record = duel(ratio)
    (there,) = compare_within([record], policy=CPU, base="gather").pairs
    (back,) = compare_within([record], policy=CPU, base="strided").pairs
    assert back.verdict.code is MIRROR.get(there.verdict.code, there.verdict.code)
    assert back.verdict.numbers.log_ratio == pytest.approx(-there.verdict.numbers.log_ratio)
    assert back.verdict.numbers.a12 == pytest.approx(1 - there.verdict.numbers.a12)


def test_twenty_samples_against_twenty_one(make_row, make_record):
    """The comparison in which pyperf calls noise significant (measurement.md §3)."""
    for seed in range(20):
        rows = [
            make_row("gather", seed=seed, samples=20, position=0),
            make_row("strided", seed=seed, samples=21, position=1),
        ]
        (cell,) = compare_within([make_record(rows)], policy=CPU).pairs
        assert cell.verdict.code is Code.SAME


def test_several_records_of_a_request_add_sessions(duel):
    (cell,) = compare_within([duel(1.05, seed=seed) for seed in range(3)], policy=CPU).pairs
    assert cell.verdict.numbers.sessions == 3
    assert cell.verdict.code is Code.SLOWER


def test_margin_of_the_user(duel):
    (cell,) = compare_within([duel(1.10)], policy=replace(CPU, user_margin=0.2)).pairs
    assert (cell.verdict.code, cell.verdict.threshold) == (Code.SAME, 0.2)


def test_one_after_the_other_is_not_interleaved(make_row, make_record):
    rows = [make_row("gather", position=0), make_row("strided", position=0, ns=2e7)]
    (cell,) = compare_within([make_record(rows)], policy=CPU).pairs
    assert (cell.route, cell.verdict.code) == ("stored", Code.INCONCLUSIVE)
    assert cell.verdict.cause is Cause.TOO_FEW_SESSIONS
    assert "were not interleaved" in cell.notes[0]


def test_holm_over_all_cells(make_row, make_record):
    """Among many cells a lonely weak finding is no finding."""
    rows = []
    for index in range(40):
        ns = 1e7 * (1.045 if index == 0 else 1.0)
        rows.append(make_row("gather", position=0, spread=0.02, seq_len=97 + index, seed=index, rounds=8))
        rows.append(make_row("strided", position=1, spread=0.02, seq_len=97 + index, seed=index, rounds=8, ns=ns))
    alone = compare_within([make_record(rows[:2])], policy=CPU).pairs[0].verdict
    among = compare_within([make_record(rows)], policy=CPU).pairs[0].verdict
    assert among.numbers.p_adjusted == pytest.approx(min(1, 40 * among.numbers.p_slower))
    assert (alone.code, among.code, among.cause) == (Code.SLOWER, Code.INCONCLUSIVE, Cause.MULTIPLICITY)


def test_heat_withdraws_a_verdict(make_row, make_record):
    rows = [make_row("gather", position=0, throttle=("hw_thermal",)), make_row("strided", position=1, ns=2e7)]
    (cell,) = compare_within([make_record(rows)], policy=CPU).pairs
    assert (cell.verdict.code, cell.verdict.cause) == (Code.INCONCLUSIVE, Cause.THROTTLED)


def test_every_row_without_a_verdict_is_named(make_row, make_record):
    wrong = Failed(stage="verify", code="wrong_output", why="out differs", verification=Verification(checks=()))
    rows = [
        make_row("gather", position=0),
        make_row("strided", position=1),
        make_row("fused", outcome=Skipped(code="unsupported", why="needs cuda")),
        make_row("ours", outcome=Failed(stage="time", code="crash", why="killed")),
        make_row("shifted", outcome=wrong),
        make_row("other-timer", position=2, timer="hot"),
        make_row("gather", seq_len=101),
        make_row("module", position=3, takes="embeddings"),
    ]
    found = compare_within([make_record(rows)], policy=CPU)
    lacks = {one.case.implementation: one.lack for one in found.uncompared}
    assert lacks == {
        "fused": "skipped",
        "ours": "failed",
        "shifted": "wrong output",
        "other-timer": "not comparable",
        "gather": "not comparable",
        "module": "not comparable",
    }
    assert [cell.candidate.implementation for cell in found.pairs] == ["strided"]
    assert "needs cuda" in next(one.candidate for one in found.uncompared if one.lack == "skipped")
    assert exit_code(found) is ExitCode.WRONG_OUTPUT


def test_rows_that_all_stand_on_the_baseline_side_are_all_named(make_row, make_record):
    rows = [make_row("gather", backend=backend) for backend in ("math", "sdpa-flash")]
    found = compare_within([make_record(rows)], policy=CPU)
    assert [one.case.backend for one in found.uncompared] == ["math", "sdpa-flash"]


def test_backends_of_one_implementation(make_row, make_record):
    rows = [
        make_row("gather", backend="math", position=0),
        make_row("gather", backend="sdpa-flash", position=1, ns=5e6),
        make_row("strided", backend="math", position=2, ns=2e7),
    ]
    (cell,) = compare_within([make_record(rows)], policy=CPU, by="backend", base="math").pairs
    assert (cell.candidate.backend, cell.verdict.code) == ("sdpa-flash", Code.FASTER)
    by_implementation = compare_within([make_record(rows)], policy=CPU).pairs
    assert [(cell.baseline.backend, cell.candidate.implementation) for cell in by_implementation] == [
        ("math", "strided")
    ]


def test_optimizations_of_one_implementation(make_row, make_record):
    row = make_row("gather", position=1, ns=8e6)
    case = row.case.model_copy(update={"optimizations": Optimizations(buffer_pool_bytes=2**20)})
    pooled = row.model_copy(update={"planned": row.planned.model_copy(update={"case": case})})
    (cell,) = compare_within([make_record([make_row("gather"), pooled])], policy=CPU, by="optimizations").pairs
    assert cell.verdict.code is Code.FASTER
    assert cell.verdict.numbers.ratio == pytest.approx(0.8, rel=0.02)


def test_unknown_baseline_names_what_there_is(duel):
    with pytest.raises(ConfigError, match=r"unknown baseline implementation 'gathr'.*gather"):
        compare_within([duel(1.0)], policy=CPU, base="gathr")


def test_noise_floor_widens_the_margin(duel):
    noisy = Policy.for_device("cpu", sigma_aa=0.05)
    (cell,) = compare_within([duel(exp(0.06))], policy=noisy).pairs
    assert (cell.verdict.threshold, cell.verdict.threshold_source) == (0.1, "noise")
    assert cell.verdict.code is not Code.SLOWER
