import contextlib
import re
from typing import Any

import pytest

from dilabench.comparison.verdicts import Policy
from dilabench.comparison.view import view_of
from dilabench.comparison.within import compare_within
from dilabench.plugins.manager import discover
from dilabench.record import (
    Check,
    Failed,
    Measured,
    Optimizations,
    Skipped,
    Slot,
    Timing,
    Verification,
)
from dilabench.report import markdown
from dilabench.report.columns import COLUMNS, NAMING_COLUMNS, DisplayRow
from dilabench.report.content import footnotes, workload_tables
from dilabench.report.findings import render, sections_of
from dilabench.report.table import to_text
from dilabench.runs.remeasure import Remeasure
from dilabench.stats.samples.location import median_interval
from dilabench.store.run_files import RECORD_NAME, read_record
from dilabench.workload.spec import Workload

DILATED = {"kind": "dilated", "segment_lengths": (96, 192), "dilation_rates": (1, 2)}
SHAPE = {"pattern": DILATED, "batch_size": 2, "seq_len": 389, "num_heads": 5, "num_kv_heads": 5, "head_dim": 24}


def workload(**changes: Any) -> Workload:
    return Workload.model_validate({**SHAPE, **changes})


def measured(*milliseconds: float) -> Measured:
    slot = Slot(samples_ns=tuple(round(value * 1e6) for value in milliseconds))
    return Measured(
        verification=Verification(checks=(Check(name="out", passed=True),)),
        timings=(Timing(timer="wall", proves="host time", slots=(slot,)),),
    )


@pytest.fixture
def row(make_row):
    """A row with an outcome made by hand, of `workload`."""
    return lambda name, outcome, **changes: make_row(name, outcome=outcome, **{**SHAPE, **changes})


@pytest.fixture
def record(make_record):
    return lambda *rows: make_record(rows)


def shown(display: DisplayRow, column: str) -> str:
    return display.text(column)


def test_speed_up_refers_to_the_plain_method_wherever_it_stands(row, record) -> None:
    (table,) = workload_tables(record(row("strided", measured(2, 2, 2)), row("gather", measured(6, 6, 6))))
    assert [shown(display, "speed-up") for display in table.rows] == ["3.00x", "1.00x"]
    assert [display.fastest for display in table.rows] == [False, False], "one turn each proves nothing"


def test_speed_up_refers_to_the_first_measured_row_without_a_plain_method(row, record) -> None:
    failed = Failed(stage="build", code="exception", why="x")
    (table,) = workload_tables(
        record(row("gather", failed), row("strided", measured(4)), row("fused", measured(2)), row("flex", measured(8)))
    )
    assert [shown(display, "speed-up") for display in table.rows] == ["–", "1.00x", "2.00x", "0.50x"]


def test_rows_of_different_workloads_are_never_in_one_table(row, record) -> None:
    different = (
        {},
        {"seq_len": 390},
        {"causal": False},
        {"scale": 0.5},
        {"dtype": "float64"},
        {"mode": "both"},
        {"world_size": 2},
        {"pattern": {**DILATED, "offset": "blocked"}},
    )
    tables = workload_tables(record(*(row("gather", measured(1), **changes) for changes in different)))
    assert len(tables) == len(different)


def test_rows_that_take_other_inputs_are_ranked_apart(row, record) -> None:
    (table,) = workload_tables(
        record(
            row("gather", measured(1)),
            row("strided-multihead", measured(9), takes="embeddings"),
            row("gather-multihead", measured(18), takes="embeddings"),
        )
    )
    own, embeddings = table.sections
    assert own.title is None
    assert embeddings.title is not None
    assert [shown(display, "speed-up") for display in own.rows] == ["1.00x"]
    assert [shown(display, "speed-up") for display in embeddings.rows] == ["2.00x", "1.00x"]


def test_a_yardstick_stands_in_the_table_of_its_shape_without_a_speed_up(row, record) -> None:
    dense = row("dense", measured(1), role="yardstick", pattern={"kind": "dense"})
    other = row("dense", measured(1), role="yardstick", pattern={"kind": "dense"}, seq_len=500)
    first, second = workload_tables(record(dense, other, row("gather", measured(5)), row("strided", measured(4))))
    assert [section.title is None for section in first.sections] == [True, False]
    assert [shown(display, "speed-up") for display in first.sections[1].rows] == ["–"]
    assert not first.sections[1].rows[0].fastest
    assert "1x500" in second.title or "2x500" in second.title


def test_a_row_without_a_time_shows_no_figures(row, record) -> None:
    (table,) = workload_tables(
        record(
            row("gather", Skipped(code="unsupported", why="needs cuda"), backend=None),
            row("strided", Failed(stage="verify", code="exception", why="x")),
        )
    )
    figures = [name for name in COLUMNS if name not in (*NAMING_COLUMNS, "median")]
    assert [shown(display, "median") for display in table.rows] == ["skipped", "FAILED"]
    assert {shown(display, name) for display in table.rows for name in figures} == {"–"}
    assert not any(display.fastest for display in table.rows)


def test_few_samples_have_no_interval_and_five_have_their_range(row, record) -> None:
    (table,) = workload_tables(record(row("gather", measured(1, 2, 3, 4)), row("strided", measured(1, 2, 3, 4, 5))))
    assert [shown(display, "95 % CI") for display in table.rows] == ["n<5, no CI", "1.000–5.000†"]
    assert any(text.startswith("†") for text in footnotes([table]))


def test_changed_optimizations_are_part_of_the_name(row, record) -> None:
    optimizations = Optimizations(pattern_cache_entries=0, buffer_pool_bytes=2**30, cuda_graph=True)
    (table,) = workload_tables(record(row("gather", measured(1), optimizations=optimizations)))
    assert shown(table.rows[0], "implementation") == "gather +cache 0 +pool 1G +cuda-graph"


OF_ANOTHER_VERSION = {
    "look-ahead": True,
    "look-ahead 4K": 4096,
    "look-ahead False": False,
    "look-ahead None": None,
    "look-ahead 1.5": 1.5,
    "look-ahead [1, 'x']": [1, "x"],
    "look-ahead {'a': 1}": {"a": 1},
}


def looking_ahead(value: object) -> Optimizations:
    return Optimizations.model_validate({"compile": True, "look_ahead": value})


@pytest.mark.parametrize(("text", "value"), OF_ANOTHER_VERSION.items())
def test_optimizations_of_another_version_are_named_and_kept(row, record, text, value, tmp_path) -> None:
    one = record(
        row("gather", measured(1, 2, 3), optimizations=looking_ahead(value)), row("strided", measured(1, 2, 3))
    )
    (tmp_path / RECORD_NAME).write_text(one.model_dump_json())
    assert read_record(tmp_path) == one
    (table,) = workload_tables(one)
    assert {shown(display, "implementation") for display in table.rows} == {f"gather +compile +{text}", "strided"}
    assert len(compare_within([one], policy=Policy.for_device("cpu"), by="optimizations").pairs) <= 1
    again = Remeasure(discover(), one, tmp_path, None, contextlib.nullcontext)
    assert again._skip(one.rows[0].planned).why.startswith(
        "optimizations that this dilabench does not know: look_ahead;"
    )


CATALOGUE = discover(strict=True).catalogue


@pytest.mark.parametrize(
    "reporter",
    [
        # Its summary names the extra that a reporter needs, if any.
        pytest.param(
            reporter,
            id=reporter.name,
            marks=[pytest.mark.needs_extra(name) for name in re.findall(r"\(extra: (\w+)\)", reporter.summary)],
        )
        for reporter in CATALOGUE.reporters
    ],
)
def test_optimizations_of_another_version_are_shown_by_every_reporter(row, record, reporter, tmp_path) -> None:
    optimizations = map(looking_ahead, OF_ANOTHER_VERSION.values())
    rows = [row("gather", measured(1, 2, 3), optimizations=changed) for changed in optimizations]
    one = record(*rows, row("strided", measured(1, 2, 3)))
    text = render(reporter, one, tmp_path, sections_of(one, CATALOGUE), CATALOGUE)
    assert text or any(tmp_path.iterdir())


def test_a_backend_chosen_by_auto_is_marked(row, record) -> None:
    chosen = row("gather", measured(1))
    chosen = chosen.model_copy(update={"planned": chosen.planned.model_copy(update={"requested_backend": "auto"})})
    (table,) = workload_tables(record(chosen))
    assert shown(table.rows[0], "backend") == "math*"
    assert "* chosen by auto" in footnotes([table])


def test_pattern_text_names_what_is_unusual() -> None:
    assert workload().pattern.label() == "dilated w 96,192 r 1,2"
    assert workload(pattern={**DILATED, "heads": "grouped"}).pattern.label().endswith(" heads=grouped")
    sparse = {"kind": "block_sparse", "mask": "local_window", "block_size": 32, "sparsity": 0.75, "branches": DILATED}
    text = workload(pattern=sparse).pattern.label()
    assert text == "block-sparse local_window block 32 density 0.25 dilated w 96,192 r 1,2"


def test_the_interval_tells_that_turns_differ(row) -> None:
    """Ten turns of ten like samples are not a hundred independent ones."""
    turns = [tuple(round(1e6 * (5 + turn % 10)) + sample for sample in range(10)) for turn in range(10)]
    slots = tuple(Slot(round=index, samples_ns=samples) for index, samples in enumerate(turns))
    timing = Timing(timer="wall", proves="host time", slots=slots)
    outcome = measured(1).model_copy(update={"timings": (timing,)})
    found = view_of(row("gather", outcome))
    assert found is not None
    assert found.interval is not None
    pooled = median_interval(timing.samples_ns)
    assert pooled is not None
    assert found.interval.half_width > 2 * pooled.half_width


@pytest.mark.parametrize("measured_lengths", [(), (1024,), (1024, 2048, 4096)], ids=["none", "one", "all"])
def test_rows_that_the_budget_skipped_are_one_line_and_no_dashes(make_row, make_record, measured_lengths) -> None:
    lengths = (1024, 2048, 4096)
    late = Skipped(code="budget", why="budget of 5 s used up before its turn; raise --budget")
    rows = [
        make_row(name, seq_len=length, **({} if length in measured_lengths else {"outcome": late}))
        for length in lengths
        for name in ("gather", "strided")
    ]
    record = make_record(rows)
    text = to_text(record, width=120, sections=sections_of(record, discover().catalogue))
    tables, answer = text.split("\nAnswer\n")
    assert tables.count("implementation") == len(measured_lengths)
    assert tables.count("budget of 5 s") == (len(measured_lengths) < len(lengths))
    assert not re.search("(gather|strided).*skipped", text)
    assert not re.search(r"\| (gather|strided) .*\| skipped", markdown.to_text(record))
    assert "budget of 5 s used up" in " ".join(answer.split()) or len(measured_lengths) == len(lengths)
    assert ("fastest" in answer) == bool(measured_lengths)
    assert re.search("(gather|strided).*skipped", to_text(record, width=120, details=True)) or "used up" not in answer
