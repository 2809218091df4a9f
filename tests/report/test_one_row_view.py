"""Each figure of a row is the same number in every output, over the records that are kept."""

import csv
import io
import json
import re
from functools import cache
from pathlib import Path
from statistics import fmean, median, stdev

import pytest

from dilabench.cli.compare import verdict_view
from dilabench.comparison.across import compare_across
from dilabench.comparison.gate import exit_code
from dilabench.comparison.view import RowView, view_of
from dilabench.plugins.axis import LENGTH
from dilabench.plugins.manager import discover
from dilabench.record import ESTIMATOR, RunRecord
from dilabench.report import columns, markdown, tidy
from dilabench.report import json as as_json
from dilabench.report.answer import answer
from dilabench.report.columns import ABSENT, COLUMNS, Column, chosen_columns, row_name
from dilabench.report.content import ESTIMATES, footnotes, without_skipped, workload_tables
from dilabench.report.continuous_benchmarking import render_bencher, render_github_action
from dilabench.report.findings import sections_of
from dilabench.report.html.data import PageData
from dilabench.report.pull_request import of_comparison
from dilabench.report.table import to_text as terminal_text
from dilabench.stats.decisions.decide import Policy
from dilabench.store.archive import Archive
from dilabench.store.index import HistoryIndex
from dilabench.store.run_files import read_record
from dilabench.suites.findings.series import plots_over_length, series_of
from dilabench.suites.overview import bars_of
from dilabench.units import format_bytes, format_latency, format_rate
from tests.conftest import smallest_of_each_suite, stored_record, text_of

ROOT = Path(__file__).parents[2]
RECORDS = [ROOT / "tests" / "golden" / "run_record.v1.json"] + [
    path
    for path in sorted((ROOT / "docs" / "results").glob("*.json.xz"))
    if '"schema_version"' in (text := text_of(path)) and len(text) < 2**20
]


read = cache(read_record)


# The smallest record of each suite shows what its rows hold; the others are slow.
QUICK = {RECORDS[0], *smallest_of_each_suite(RECORDS)}


@pytest.fixture(
    params=[pytest.param(path, marks=() if path in QUICK else pytest.mark.slow, id=path.stem) for path in RECORDS]
)
def record(request) -> RunRecord:
    return read(request.param)


def views(record: RunRecord) -> dict[str, RowView]:
    found = {row.case.case_id: view_of(row) for row in record.rows}
    return {case_id: view for case_id, view in found.items() if view is not None}


def test_figures_follow_from_the_samples(record: RunRecord) -> None:
    for view in views(record).values():
        samples = view.timing.samples_ns
        assert view.median_ns == pytest.approx(median(samples), rel=1e-12)
        assert view.mean_ns == pytest.approx(fmean(samples))
        assert view.std_ns == (pytest.approx(stdev(samples)) if len(samples) > 1 else None)
        assert view.tokens_per_s == pytest.approx(view.row.case.workload.tokens * 1e9 / median(samples))
        assert view.interval is None or view.interval.low <= view.median_ns <= view.interval.high


def test_tables_show_the_numbers_of_the_exports(record: RunRecord) -> None:
    exported = {line["case_id"]: line for line in tidy.cases(record)}
    written = {line["case_id"]: line for line in csv.DictReader(io.StringIO(tidy.render_csv(record, None) or ""))}
    for table in workload_tables(record):
        for line in table.rows:
            numbers, texts = exported[line.row.case.case_id], written[line.row.case.case_id]
            if line.view is None:
                assert numbers["median_ns"] is None
                continue
            assert line.text("median").rstrip("‡") == format_latency(numbers["median_ns"])
            assert line.text("mean") == format_latency(numbers["mean_ns"])
            assert line.text("std") == ("–" if numbers["std_ns"] is None else format_latency(numbers["std_ns"]))
            assert line.text("tok/s") == format_rate(numbers["tokens_per_s"])
            peak = numbers["peak_bytes"]
            assert line.text("peak mem.") == ("–" if peak is None else format_bytes(peak))
            interval = line.view.interval
            assert (numbers["ci_low_ns"], numbers["ci_high_ns"]) == (
                (interval.low, interval.high) if interval else (None, None)
            )
            assert float(texts["median_ns"]) == numbers["median_ns"]


def test_the_page_and_services_hold_the_same_numbers(record: RunRecord) -> None:
    known = views(record)
    tables = workload_tables(record)
    page = json.loads(PageData(record, tables, chosen_columns()).as_json({}))
    lines = [line for table in tables for line in table.rows]
    for line, entry in zip(lines, page["rows"], strict=True):
        if line.view is not None:
            assert entry["m"] == line.view.median_ns
            assert entry.get("p") == line.view.peak_bytes
            assert entry["tps"] == pytest.approx(line.view.tokens_per_s, rel=1e-5)
    medians = {view.median_ns for view in known.values()}
    assert {one["value"] for one in json.loads(render_github_action(record, None) or "")} <= medians
    for metrics in json.loads(render_bencher(record, None) or "").values():
        assert metrics["latency"]["value"] in medians
        assert metrics["throughput"]["value"] in {view.tokens_per_s for view in known.values()}


def test_comparisons_show_the_times_of_the_report(record: RunRecord, capsys) -> None:
    comparison = compare_across([record], [record], policy=Policy.for_device(record.device))
    known = views(record)
    code = exit_code(comparison, set())
    written = json.loads(verdict_view.as_json(comparison, code, None))["cells"]
    page = of_comparison(comparison, "ok")
    verdict_view.show(comparison, code, None, ())
    table = capsys.readouterr().out
    for pair, cell in zip(comparison.pairs, written, strict=True):
        view = known[pair.candidate.case_id]
        assert (pair.baseline_ns, pair.candidate_ns) == (view.median_ns, view.median_ns)
        assert cell["verdict"]["numbers"]["baseline_ns"] == view.median_ns
        assert format_latency(view.median_ns) in page or "left out" in page
        assert format_latency(view.median_ns).split()[0] in table


def test_printed_json_holds_the_numbers_of_the_exports(record: RunRecord) -> None:
    exported = {line["case_id"]: line for line in tidy.cases(record)}
    for row, written in zip(record.rows, json.loads(as_json.render(record, None) or "")["rows"], strict=True):
        figures, summary = exported[row.case.case_id], written.pop("summary")
        assert written == json.loads(row.model_dump_json())
        assert summary == (None if figures["median_ns"] is None else {name: figures[name] for name in summary})
        assert summary is None or {"median_ns", "ci_low_ns", "mean_ns", "std_ns", "tokens_per_s"} <= summary.keys()


def markdown_cells(text: str) -> list[dict[str, str]]:
    """The lines of all tables of medians, by the names of their columns."""
    found, names = [], []
    for line in text.splitlines():
        cells = [cell.strip().strip("*").replace("\\", "") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if "median" in cells:
            names = cells
        elif not cells:
            names = []
        elif names and not cells[0].startswith("---"):
            found.append(dict(zip(names, cells, strict=True)))
    return found


def test_markdown_and_terminal_show_the_numbers_of_the_exports(record: RunRecord) -> None:
    exported = {line["case_id"]: line for line in tidy.cases(record)}
    shown = ["median", "mean", "std", "peak mem."]
    lines = [line for table in without_skipped(workload_tables(record)) for line in table.rows]
    written = markdown_cells(markdown.to_text(record, columns=shown))
    terminal = terminal_text(record, width=300, columns=shown)
    for line, cells in zip(lines, written, strict=True):
        figures = exported[line.row.case.case_id]
        if line.view is not None:
            texts = [format_latency(figures[name]) if figures[name] else ABSENT for name in ("mean_ns", "std_ns")]
            median, *others = (cells[name] for name in shown)
            assert median.rstrip("‡") == format_latency(figures["median_ns"])
            assert others == [*texts, format_bytes(figures["peak_bytes"]) if figures["peak_bytes"] else ABSENT]
            assert re.search(r" +".join(map(re.escape, [median, *others])), terminal)


def test_the_answer_shows_the_numbers_of_the_exports(record: RunRecord) -> None:
    exported = {line["case_id"]: line for line in tidy.cases(record)}
    suites = discover().catalogue.suites
    found = answer(record, suites.get(record.suite).axis if record.suite in suites else LENGTH)
    names, lines, _ = found.table()
    for fastest, cells in zip(filter(None, (row.fastest for row in found.rows)), lines, strict=True):
        shown, figures = dict(zip(names, cells, strict=True)), exported[fastest.case.case_id]
        assert shown["time"] == format_latency(figures["median_ns"])
        assert shown["verified"] == view_of(fastest).verified
        if figures["peak_bytes"] is not None:
            assert shown["memory"] == format_bytes(figures["peak_bytes"])


def test_plots_and_the_history_hold_the_same_numbers(record: RunRecord, tmp_path: Path) -> None:
    known = views(record)
    series = [one for one in series_of(record) if one.measured]
    for plot in plots_over_length(series):
        for curve in plot.curves:
            (drawn,) = [one for one in series if one.label == curve.label]
            of_rows = {
                "latency": [view.median_ns / 1e6 for view in drawn.measured],
                "throughput": [view.tokens_per_s for view in drawn.measured],
                "memory": [view.peak_bytes / 2**20 for view in drawn.measured if view.peak_bytes is not None],
            }
            assert [point.y for point in curve.points] == of_rows[plot.name]
    for plot in bars_of(record):
        figures = [
            view.median_ns / 1e6 if plot.name == "latency" else (view.peak_bytes or 0) / 2**20
            for view in known.values()
        ]
        assert {value for bars in plot.bars for value in bars.values if value is not None} <= {*figures}
    archive = Archive(tmp_path)
    archive.add(record)
    with HistoryIndex(archive, pytest.fail) as index:
        for entry in index.cases():
            view = known.get(entry.case_id)
            low, high = (view.interval.low, view.interval.high) if view and view.interval else (None, None)
            stored = (entry.median_ns, entry.low_ns, entry.high_ns, entry.samples)
            assert stored == ((view.median_ns, low, high, view.samples) if view else (*(None,) * 3, 0))
            assert view is None or entry.peak_bytes == view.peak_bytes


# A record of each suite whose findings are quick to make.
FINDINGS = (
    "cpu-flash",
    "h200-backends",
    "h200-block-sparse-backward",
    "h200-field-two-gpus",
    "h200-range-ragged",
    "h200-two-gpus",
)
TIMES = {"time", "median", "median of ours", "total", "best"}
SIZES = {"memory", "peak memory"}


@pytest.mark.parametrize("name", FINDINGS)
def test_findings_show_the_times_and_peaks_of_rows(name: str) -> None:
    record = read(stored_record(name))
    known = views(record).values()
    times = {ABSENT, *(format_latency(view.median_ns) for view in known)}
    sizes = {ABSENT, *(format_bytes(view.peak_bytes) for view in known if view.peak_bytes is not None)}
    ways = {row_name(view.row) for view in known}
    seen = 0
    for section in sections_of(record, discover().catalogue):
        for column, *cells in zip(section.columns, *section.rows, strict=True):
            if column in TIMES or column in ways:
                assert {cell.partition(" (")[0] for cell in cells} <= times
                seen += len(cells)
            elif column in SIZES:
                assert set(cells) <= sizes
    assert seen


def test_the_estimator_is_named_in_the_record_and_below_the_tables(record: RunRecord) -> None:
    assert json.loads(record.model_dump_json())["estimator"] == ESTIMATOR
    assert ESTIMATOR in ESTIMATES


def test_a_column_is_one_object(record: RunRecord, monkeypatch) -> None:
    slowest = Column(name="max", cell=lambda view: max(view.timing.samples_ns), unit="ns", export="max_ns")
    monkeypatch.setitem(columns.COLUMNS, "max", slowest)
    (line, *_) = workload_tables(record)[0].rows
    expected = "–" if line.view is None else format_latency(max(line.view.timing.samples_ns))
    assert line.text("max") == expected
    assert [one.name for one in chosen_columns(["max"])] == ["implementation", "backend", "max"]
    assert "max_ns" in tidy.cases(record)[0]


def test_a_column_says_its_name_and_unit_once() -> None:
    assert all(name == column.name for name, column in COLUMNS.items())
    exports = [column.export for column in COLUMNS.values() if column.export]
    assert len(exports) == len(set(exports))


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({"timed_calls": 12}, "✓ all, 12 timed"),
        ({"timed_calls": 3, "sampled_rows": 64, "against": "gather"}, "✓ all vs gather, 3 timed"),
        ({"timed_calls": 1, "sampled_rows": 64}, "✓ 64, 1 timed"),
        ({}, "✓ all"),
    ],
)
def test_how_many_timed_calls_were_checked_is_said(make_row, make_record, found, text):
    row = make_row()
    outcome = row.outcome.model_copy(update={"verification": row.outcome.verification.model_copy(update=found)})
    row = row.model_copy(update={"outcome": outcome})
    tables = workload_tables(make_record([row]))
    assert view_of(row).verified == text
    assert tables[0].rows[0].text("verified") == text
    assert any(note.startswith("timed calls") for note in footnotes(tables)) is ("timed_calls" in found)
