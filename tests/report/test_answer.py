"""The closing answer: who is fastest where, said only as far as it is proven."""

import re

import pytest

from dilabench.metadata import DENSITY_REACHED, SPARSITY_REACHED
from dilabench.plugins.axis import DENSITY, LENGTH, RANKS
from dilabench.record import Row, Skipped
from dilabench.report.answer import HOW_TO_PROVE, answer
from dilabench.suites.range.findings import analyse as growth

DILATED = {"kind": "dilated", "segment_lengths": (2048, 4096), "dilation_rates": (1, 2)}


@pytest.fixture
def row(make_row):
    """Twenty turns of three samples of about so many milliseconds; `turn` is the place in each round."""

    def make(name, ms, length=1024, *, turn=0, role="method", **more):
        pattern = {"kind": "dense"} if role == "yardstick" else DILATED
        shape = {"pattern": pattern, "backend": None, "peak": 3 * 2**20, "seq_len": length}
        return make_row(name, ns=1e6 * ms, spread=0.002, samples=3, position=turn, role=role, **{**shape, **more})

    return make


@pytest.fixture
def unmeasured(make_row):
    """A row that the budget left no time for."""
    skipped = Skipped(code="budget", why="budget of 5 s used up before its turn")
    return lambda name, length: make_row(name, outcome=skipped, backend=None, seq_len=length, pattern=DILATED)


@pytest.fixture
def record(make_record):
    return lambda *rows: make_record(rows)


def test_each_length_has_a_winner_or_says_why_none(row, unmeasured, record) -> None:
    rows = [
        *(row("fused", 1, length, turn=0) for length in (1024, 2048)),
        *(row("gather", 2, length, turn=1) for length in (1024, 2048)),
        row("fused", 4.0, 4096, turn=0),
        row("gather", 4.01, 4096, turn=1),
        row("fused", 8, 8192, turn=0, rounds=3),
        row("gather", 16, 8192, turn=1, rounds=3),
        row("gather", 9, 16384),
        unmeasured("gather", 32768),
    ]
    found = answer(record(*rows), LENGTH)
    assert {line.at: line.winner for line in found.rows} == {
        "1K": "fused",
        "2K": "fused",
        "4K": "tie: fused, gather",
        "8K": "probably fused",
        "16K": "alone: gather",
        "32K": "not measured",
    }
    assert found.sentence == (
        "Fastest at 1K, 2K and 8K: fused (probably at 8K: fewer than 5 rounds in common; a new run with a longer "
        "--budget decides it); no difference proven at 4K between fused and gather; only gather was measured at 16K: "
        "no comparison; not measured at 32K: budget of 5 s used up."
    )
    assert [cells[0] for cells in found.table()[1]] == ["1K", "2K", "4K", "8K", "16K"]


@pytest.mark.parametrize(
    ("rounds", "doubt"), [((9, 9), ""), ((3, 9), " (at 1K: {})"), ((3, 3), " ({})")], ids=["none", "some", "all"]
)
def test_a_tie_without_enough_rounds_in_common_says_so(row, record, rounds, doubt) -> None:
    rows = [
        row(name, ms, length, turn=turn, rounds=count)
        for length, count in zip((1024, 2048), rounds, strict=True)
        for turn, (name, ms) in enumerate({"fused": 4.0, "gather": 4.01}.items())
    ]
    sentence = answer(record(*rows), LENGTH).sentence
    assert sentence == f"No difference proven at 1K and 2K between fused and gather{doubt.format(HOW_TO_PROVE)}."


@pytest.mark.parametrize("lengths", [(1024,), (1024, 2048, 4096), (512, 1024, 2048, 4096, 8192)])
@pytest.mark.parametrize("dense_ms", [None, 0.1, 9.0], ids=["without full attention", "faster", "slower"])
@pytest.mark.parametrize("rivals", [0, 1, 2])
def test_the_first_line_decides_and_recommends_nothing_that_was_not_compared(
    row, record, lengths, dense_ms, rivals
) -> None:
    rows = [row("fused", 1, length) for length in lengths]
    rows += [
        row(f"rival{number}", 2 + number, length, turn=1 + number) for length in lengths for number in range(rivals)
    ]
    rows += [row("dense", dense_ms, length, turn=3, role="yardstick") for length in lengths if dense_ms]
    found = answer(record(*rows), LENGTH)
    decision, *more = found.sentence.splitlines()
    assert decision.startswith("Fastest at " if rivals else "Only fused was measured at ")
    assert decision.endswith("no comparison.") != bool(rivals)
    # Full attention has one line, whatever it is, and there is no second summary.
    assert [line.partition(" (")[0] for line in more] == ["Full attention"] * bool(dense_ms)
    assert not any(line.ranking.proven for line in found.rows) or rivals


@pytest.mark.parametrize(
    ("status", "why"), [("complete", "fused needs a CUDA GPU"), ("interrupted", "the run was interrupted")]
)
def test_a_length_to_which_an_interrupted_run_did_not_come_says_so(make_row, row, make_record, status, why) -> None:
    unsupported = Skipped(code="unsupported", why="needs a CUDA GPU (no NVIDIA GPU is visible)")
    skipped = make_row("fused", outcome=unsupported, backend=None, seq_len=2048, pattern=DILATED)
    record = make_record([row("gather", 1, 1024), skipped], status=status)
    assert [line.why_none for line in answer(record, LENGTH).rows] == ["", why]


@pytest.mark.parametrize(
    ("gather_ms", "rounds", "winner", "nearest"),
    [
        (2.0, 20, "fused", r"2\.00x \((1\.99|2\.00)–2\.0[01]\)"),
        (1.005, 20, "tie: fused, gather", r"1\.0[01]x \(1\.00–1\.01\)"),
        (2.0, 3, "probably fused", r"2\.00x"),
        (1.0005, 3, "tie: fused, gather", r"1\.00x"),
    ],
    ids=["proven", "tie", "too few rounds", "too few rounds and overlapping"],
)
def test_the_interval_that_decides_stands_in_the_row(row, record, gather_ms, rounds, winner, nearest) -> None:
    rows = [row("fused", 1, turn=0, rounds=rounds), row("gather", gather_ms, turn=1, rounds=rounds)]
    columns, lines, _ = answer(record(*rows), LENGTH).table()
    cells = dict(zip(columns, lines[0], strict=True))
    assert cells["fastest"] == winner
    assert re.fullmatch(nearest, cells["next, 95 % CI"]), cells


VERDICTS = {
    "rival": lambda lines, _: (lines[0].ranking.proven, lines[0].ranking.probable),
    "full attention": lambda lines, _: _claimed(lines[0].versus_dense),
    "one device": lambda lines, _: _claimed(lines[1].versus_one),
    "along lengths": lambda _, text: (" is faster than dense" in text, " is probably faster than dense" in text),
}


def _claimed(view):
    return view.proven, view.faster is not None and not view.proven


@pytest.mark.parametrize("kind", VERDICTS)
@pytest.mark.parametrize(
    ("ratio", "common", "proven", "probable"),
    [
        (1.3, 20, True, False),
        (1.01, 20, False, False),
        (1.3, 3, False, True),
        (1.3, 0, False, True),
        (1, 0, False, False),
    ],
    ids=["proven", "within the margin", "three rounds", "separately", "separately and overlapping"],
)
def test_one_rule_decides_on_every_comparison(row, record, kind, ratio, common, proven, probable) -> None:
    """The interval of 1.01x excludes 1 and is within the margin of 2 %."""
    # Rows with the same position in their rounds were measured one after the other.
    turn, rounds = int(common > 0), common or 20
    dense = kind in ("full attention", "along lengths")
    slow = {"role": "yardstick"} if dense else {}
    name = "dense" if dense else "gather"
    shapes = [{"length": 1024}, {"length": 2048}]
    if kind == "one device":
        shapes, slow = [{"world_size": 2}], {"world_size": 1}
    rows = [row("fused", 1, rounds=rounds, **shape) for shape in shapes]
    rows += [row(name, ratio, turn=turn, rounds=rounds, **{**shape, **slow}) for shape in shapes]
    whole = record(*rows)
    text = " ".join(section.sentence for section in growth(whole)) if kind == "along lengths" else ""
    axis = RANKS if kind == "one device" else LENGTH
    assert VERDICTS[kind](answer(whole, axis).rows, text) == (proven, probable)


@pytest.mark.parametrize(
    ("device", "ratio", "spread", "winner"),
    [
        ("cpu", 1.1, 0.002, "tie: fused, gather"),
        ("cuda", 1.1, 0.002, "tie: fused, gather"),
        ("cuda", 1.2, 0.002, "probably fused"),
        ("cpu", 1.5, 0.002, "probably fused"),
        # Under a load the slots of a row vary, too.
        ("cpu", 1.5, 0.4, "tie: fused, gather"),
        ("cpu", 8.0, 0.4, "probably fused"),
    ],
)
def test_rows_of_both_parts_of_a_resumed_run_may_be_apart_as_sessions_are(
    make_row, make_record, device, ratio, spread, winner
) -> None:
    rows = [
        make_row(name, ns=1e7 * times, spread=spread, samples=1, backend=None, pattern=DILATED, seq_len=1024)
        for name, times in (("fused", 1.0), ("gather", ratio))
    ]
    (line,) = answer(make_record(rows, device=device), LENGTH).rows
    assert (line.winner, line.ranking.proven) == (winner, False)


def test_what_was_measured_separately_is_said_to_be_only_probable(row, record) -> None:
    rows = [row("fused", 1), row("gather", 2, turn=1), row("dense", 3, role="yardstick")]
    found = answer(record(*rows), LENGTH)
    assert found.sentence.endswith("\nFull attention (dense), another function: slower at 1K (measured separately).")
    columns, lines, _ = found.table()
    assert dict(zip(columns, lines[0], strict=True))["vs dense"] == "3.00x"


def test_why_nothing_was_measured_is_said_in_words(make_row, record) -> None:
    needs = make_row(
        "fused", outcome=Skipped(code="unsupported", why="needs a CUDA GPU (no NVIDIA GPU is visible)"), seq_len=1024
    )
    assert answer(record(needs), LENGTH).sentence == "Not measured at 1K: fused needs a CUDA GPU."


def test_what_is_not_supported_is_said_only_if_nothing_else_kept_a_time(make_row, record) -> None:
    unsupported = [
        make_row(name, outcome=Skipped(code="unsupported", why=f"pattern of {name} is not supported"), seq_len=1024)
        for name in ("flex", "gather-multihead", "native-sparse", "selected-gather")
    ]
    late = make_row("fused", outcome=Skipped(code="budget", why="budget of 35 s used up"), seq_len=1024)
    assert answer(record(*unsupported, late), LENGTH).sentence == "Not measured at 1K: budget of 35 s used up."
    assert answer(record(*unsupported), LENGTH).sentence == (
        "Not measured at 1K: flex pattern of flex is not supported, gather-multihead is not supported and 2 other "
        "reasons."
    )


def test_lines_follow_the_axis_whatever_the_order_of_the_record(row, record) -> None:
    found = answer(record(row("gather", 1, 4096), row("gather", 1, 512), row("gather", 1, 1024)), LENGTH)
    assert [line.at for line in found.rows] == ["512", "1K", "4K"]


@pytest.mark.parametrize(
    ("dense_ms", "shown", "side"),
    [(0.5, "0.50x (0.50–0.50)", "faster"), (3.0, "3.00x (3.00–3.00)", "slower"), (1.0, "≈1.00x (1.00–1.00)", None)],
)
def test_full_attention_stands_beside_the_winner(row, record, dense_ms: float, shown: str, side: str | None) -> None:
    rows = [row("fused", 1, turn=0), row("gather", 2, turn=1), row("dense", dense_ms, role="yardstick", turn=2)]
    found = answer(record(*rows), LENGTH)
    columns, lines, _ = found.table()
    cells = dict(zip(columns, lines[0], strict=True))
    assert (cells["fastest"], cells["vs dense"], cells["memory"], cells["verified"]) == (
        "fused",
        shown,
        "3.0 MiB",
        "✓ all",
    )
    line = f"\nFull attention (dense), another function: {side or 'no difference proven'} at 1K."
    assert found.sentence.endswith(line)


def test_full_attention_is_faster_and_slower_in_one_line(row, record) -> None:
    def at(length: int, fused: float, dense: float) -> list[Row]:
        ours = [row("fused", fused, length, turn=0), row("gather", 2 * fused, length, turn=1)]
        return [*ours, row("dense", dense, length, role="yardstick", turn=2)]

    rows = [*at(1024, 2, 1), *at(2048, 3, 2), *at(4096, 4, 8), *at(8192, 8, 32), *at(16384, 16, 16)]
    assert answer(record(*rows), LENGTH).sentence == (
        "Fastest at 1K to 16K: fused.\n"
        "Full attention (dense), another function: faster at 1K and 2K; slower at 4K and 8K; no difference proven at "
        "16K."
    )


def test_full_attention_alone_is_an_answer_too(row, record) -> None:
    found = answer(record(row("dense", 1, role="yardstick")), LENGTH)
    assert [line.winner for line in found.rows] == ["alone: dense"]
    assert "vs dense" not in found.table()[0]


def test_the_axis_is_the_suites(row, record) -> None:
    ranks = answer(record(row("ring", 2, world_size=2), row("ring", 1, world_size=4)), RANKS)
    assert [(line.at, line.workload) for line in ranks.rows] == [("2", ""), ("4", "")]
    assert ranks.sentence == "Only ring was measured at world size 2 and 4: no comparison."
    half = row("block_sparse", 1, labels=SPARSITY_REACHED.entry(0.5))
    assert [line.at for line in answer(record(half), DENSITY).rows] == ["50.0%"]


def test_rows_over_ranks_stand_beside_one_device(row, record) -> None:
    rows = [row("strided", 8), row("ring", 5, world_size=2, turn=0), row("zigzag-ring", 6, world_size=2, turn=1)]
    names, cells, _ = answer(record(*rows), RANKS).table()
    column = [line[names.index("vs one device")] for line in cells]
    assert column == ["–", "1.60x"]
    sentence = answer(record(*rows), RANKS).sentence
    assert "no comparison" not in sentence, "one device is compared in the next line"
    assert "world size 1" not in sentence
    level = answer(record(row("strided", 5), row("ring", 5, world_size=2)), RANKS)
    assert level.table()[1][1][3] == "≈1.00x"
    assert level.sentence.endswith("\nOne device: no difference proven at world size 2.")
    assert "vs one device" not in answer(record(*rows[:1]), RANKS).table()[0]


def test_full_attention_stands_beside_every_pattern_of_its_shape(row, record) -> None:
    rows = [row("dense", 4, role="yardstick", turn=1)]
    for number, ms in enumerate((1, 2, 8, 16)):
        pattern = {**DILATED, "dilation_rates": (1, 2 + number)}
        rows.append(row("fused", ms, pattern=pattern, labels=DENSITY_REACHED.entry(0.5 / (1 + number))))
    elsewhere = row("fused", 1, 2048, labels=DENSITY_REACHED.entry(0.75))
    found = answer(record(*rows, elsewhere), DENSITY)
    ratios = {line.at: line.versus_dense.ratio for line in found.rows if line.versus_dense}
    assert ratios == pytest.approx({"12.5%": 0.25, "16.7%": 0.5, "25.0%": 2.0, "50.0%": 4.0}, rel=0.02)
    assert [line.at for line in found.rows if line.versus_dense is None] == ["75.0%"]


def test_of_many_workloads_full_attention_is_counted(row, record) -> None:
    def rows(seed, ms):
        pattern = {**DILATED, "dilation_rates": (1, 2 + seed)}
        return row("fused", ms, pattern=pattern, head_dim=16 + seed), row(
            "dense", 4, role="yardstick", turn=1, head_dim=16 + seed
        )

    found = answer(record(*(one for seed, ms in enumerate((1, 2, 8, 16)) for one in rows(seed, ms))), LENGTH)
    assert found.sentence == (
        "4 workloads: no comparison in 4, where one row was measured.\n"
        "Full attention, another function: slower in 2 and faster in 2 of the 4 where it was measured."
    )


def test_workloads_of_one_length_are_told_apart(row, record) -> None:
    rings = [row("ring", 4 / ranks, world_size=ranks, batch_size=32) for ranks in (2, 4)]
    found = answer(record(*rings), LENGTH)
    assert [line.workload for line in found.rows] == ["2 ranks", "4 ranks"]
    assert found.table()[0][:3] == ("length", "batch", "workload")
