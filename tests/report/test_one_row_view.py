"""Each figure of a row is the same number in every output, over the records that are kept."""

import csv
import io
import json
from functools import cache
from pathlib import Path
from statistics import fmean, median, stdev

import pytest

from dilabench.cli.compare import verdict_view
from dilabench.compare.across import compare_across
from dilabench.compare.gate import exit_code
from dilabench.compare.view import RowView, view_of
from dilabench.record import ESTIMATOR, RunRecord
from dilabench.report import columns, services, tidy
from dilabench.report.columns import COLUMNS, Column, chosen_columns
from dilabench.report.content import ESTIMATES, workload_tables
from dilabench.report.html.data import PageData
from dilabench.report.pull_request import of_comparison
from dilabench.stats.decisions.decide import Policy
from dilabench.store.run_files import read_record
from dilabench.units import format_bytes, format_latency, format_rate

ROOT = Path(__file__).parents[2]
RECORDS = [ROOT / "tests" / "golden" / "run_record.v1.json"] + [
    path
    for path in sorted((ROOT / "docs" / "results").glob("*.json"))
    if '"schema_version"' in path.read_text() and path.stat().st_size < 2**20
]


read = cache(read_record)


# Its patterns' pairs are counted for long.
SLOW = {"h200-flashinfer"}


@pytest.fixture(
    params=[pytest.param(path, marks=pytest.mark.slow if path.stem in SLOW else (), id=path.stem) for path in RECORDS]
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
    assert {one["value"] for one in json.loads(services.render_github_action(record, None) or "")} <= medians
    for metrics in json.loads(services.render_bencher(record, None) or "").values():
        assert metrics["latency"]["value"] in medians
        assert metrics["throughput"]["value"] in {view.tokens_per_s for view in known.values()}


def test_comparisons_show_the_times_of_the_report(record: RunRecord, capsys) -> None:
    comparison = compare_across([record], [record], policy=Policy.for_device(record.device))
    known = views(record)
    code = exit_code(comparison, set())
    written = json.loads(verdict_view.as_json(comparison, code, None))["cells"]
    page = of_comparison(comparison, "ok")
    verdict_view.show(comparison, code, None)
    table = capsys.readouterr().out
    for pair, cell in zip(comparison.pairs, written, strict=True):
        view = known[pair.candidate.case_id]
        assert (pair.baseline_ns, pair.candidate_ns) == (view.median_ns, view.median_ns)
        assert cell["verdict"]["numbers"]["baseline_ns"] == view.median_ns
        assert format_latency(view.median_ns) in page or "left out" in page
        assert format_latency(view.median_ns).split()[0] in table


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
