"""Exports that other programs load: every one of them into pandas, with the numbers that tables show."""

import io
import json

import pytest

from dilabench.api import to_frame
from dilabench.comparison.across import compare_across
from dilabench.comparison.view import view_of
from dilabench.errors import EnvironmentNotReady
from dilabench.record import Failed, Skipped, Slot, Timing
from dilabench.report import continuous_benchmarking, tidy
from dilabench.report.html.comparison import notebook as notebook_of_comparison
from dilabench.report.html.page import notebook
from dilabench.stats.decisions.decide import Policy

needs_data = pytest.mark.needs_extra("data")


@pytest.fixture
def record(make_row, make_record):
    rows = [
        make_row("gather", ns=2e7, labels={"way": "a"}),
        make_row("strided", ns=1e7, sessions=2),
        make_row("flex", outcome=Skipped(code="unsupported", why='no, "really"\nnot')),
        make_row("fused", outcome=Failed(stage="build", code="exception", why="broke")),
    ]
    return make_record(rows)


@needs_data
def test_a_frame_has_a_line_per_case_and_what_the_tables_show(record):
    frame = to_frame(record)
    assert list(frame["implementation"]) == ["gather", "strided", "flex", "fused"]
    assert list(frame["status"]) == ["measured", "measured", "skipped", "failed"]
    assert frame["case_id"].is_unique
    found = view_of(record.rows[0])
    first = frame.iloc[0]
    assert (first.median_ns, first.ci_low_ns, first.ci_high_ns) == (
        found.median_ns,
        found.interval.low,
        found.interval.high,
    )
    assert first.p25_ns < first.median_ns < first.p75_ns
    assert first.mean_ns == pytest.approx(sum(record.rows[0].outcome.timings[0].samples_ns) / first.samples)
    assert first.tokens_per_s == pytest.approx(96 / first.median_ns * 1e9)
    assert (first.peak_bytes, first.label_way) == (2**24, "a")
    assert frame["median_ns"].isna().tolist() == [False, False, True, True]


@needs_data
def test_the_former_method_of_a_record_gives_its_frame_and_names_its_place(record):
    with pytest.warns(DeprecationWarning, match=r"use dilabench.to_frame\(record\)"):
        former = record.to_frame()
    assert former.equals(to_frame(record))


@needs_data
def test_a_frame_of_samples_has_every_one_of_them(record):
    frame = to_frame(record, samples=True)
    counts = frame.groupby("case_id").size()
    assert {row.case.case_id: len(row.outcome.timings[0].samples_ns) for row in record.rows[:2]} == counts.to_dict()
    assert sorted(frame["session"].unique()) == [0, 1]


@needs_data
@pytest.mark.parametrize("samples", [False, True])
def test_csv_and_parquet_are_the_frame(record, tmp_path, samples):
    import pandas

    expected = to_frame(record, samples)
    text = "".join((tidy.render_csv_samples if samples else tidy.render_csv)(record, None))
    (tidy.render_parquet_samples if samples else tidy.render_parquet)(record, tmp_path)
    name = "samples.parquet" if samples else "cases.parquet"
    for loaded in (pandas.read_csv(io.StringIO(text)), pandas.read_parquet(tmp_path / name)):
        assert list(loaded.columns) == list(expected.columns)
        pandas.testing.assert_frame_equal(
            loaded.select_dtypes("number"),
            expected[loaded.select_dtypes("number").columns].astype(loaded.select_dtypes("number").dtypes),
        )
    assert samples or pandas.read_csv(io.StringIO(text))["why"][2] == 'no, "really"\nnot'


@needs_data
def test_bencher_gets_latency_throughput_and_memory_with_their_ends(record):
    import pandas

    document = json.loads(continuous_benchmarking.render_bencher(record, None))
    assert len(document) == 2
    frame = pandas.DataFrame.from_dict(document, orient="index")
    assert set(frame.columns) == {"latency", "throughput", "peak-memory"}
    for metrics in document.values():
        for measure in ("latency", "throughput"):
            assert metrics[measure]["lower_value"] <= metrics[measure]["value"] <= metrics[measure]["upper_value"]


@needs_data
def test_github_action_benchmark_gets_one_entry_per_measured_row(record, tmp_path):
    import pandas

    assert continuous_benchmarking.render_github_action(record, tmp_path) is None
    frame = pandas.read_json(tmp_path / "github-action-benchmark.json")
    assert list(frame["unit"]) == ["ns", "ns"]
    assert frame["name"].is_unique
    assert frame["range"].str.startswith("± ").all()


def test_rows_that_differ_in_what_their_name_leaves_out_have_different_names(make_row, make_record):
    rows = [make_row(), make_row(scale=0.5)]
    assert len(json.loads(continuous_benchmarking.render_bencher(make_record(rows), None))) == 2


def test_few_samples_give_no_interval(make_row, make_record):
    row = make_row()
    timing = Timing(timer="wall", proves="", slots=(Slot(samples_ns=(5, 6)),))
    row = row.model_copy(update={"outcome": row.outcome.model_copy(update={"timings": (timing,)})})
    (line,) = tidy.cases(make_record([row]))
    assert (line["ci_low_ns"], line["samples"]) == (None, 2)
    (metrics,) = json.loads(continuous_benchmarking.render_bencher(make_record([row]), None)).values()
    assert "lower_value" not in metrics["latency"]


def test_without_pandas_the_way_out_is_told(record, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(EnvironmentNotReady, match=r"dilabench\[data\]"):
        to_frame(record)


def test_a_notebook_shows_the_result_and_escapes_it(make_row, make_record):
    text = notebook(make_record([make_row("<b>x")], suite="<script>"))
    assert "<table>" in text
    assert "<script>" not in text
    assert "<b>" not in text
    many = make_record([make_row(seq_len=64 + index, rounds=1, samples=1) for index in range(25)])
    assert "and 5 more workloads" in notebook(many)
    assert repr(many) == f"<RunRecord {many.run_id}: {many.suite} on {many.device}, complete, 25 measured>"


def test_a_notebook_shows_a_comparison_and_escapes_it(make_row, make_record):
    records = [make_record([make_row("<b>x"), *more]) for more in ([], [make_row("new")])]
    comparison = compare_across(records[:1], records[1:], policy=Policy())
    text = notebook_of_comparison(comparison)
    assert "<table>" in text
    assert "no change above " in text
    assert "new: new" in text
    assert "<b>" not in text
    assert repr(comparison) == "<Comparison: 1 SAME, 1 not compared>"


def test_samples_are_written_turn_by_turn(record, tmp_path):
    parts = list(tidy._samples_text(record))
    slots = [slot for row in record.rows for timing in getattr(row.outcome, "timings", ()) for slot in timing.slots]
    assert len(parts) == 1 + len(slots)
    assert tidy.render_csv_samples(record, tmp_path) is None
    assert (tmp_path / "samples.csv").read_text() == "".join(parts)
    assert list(tidy.render_csv_samples(record, None)) == parts
