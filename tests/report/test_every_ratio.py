"""Every printed ratio is the quotient of the two times printed beside it: twenty records are printed and divided."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

from dilabench.cli.compare import verdict_view
from dilabench.comparison.across import compare_across
from dilabench.comparison.gate import exit_code
from dilabench.comparison.matrix import compare_all
from dilabench.comparison.within import compare_within
from dilabench.plugins.axis import LENGTH
from dilabench.plugins.manager import discover
from dilabench.record import Measured, RunRecord
from dilabench.report import leaderboard, markdown
from dilabench.report.answer import answer
from dilabench.report.findings import sections_of
from dilabench.report.html import comparison as page
from dilabench.report.html.page import notebook
from dilabench.report.pull_request import of_comparison, of_matrix, of_run
from dilabench.report.table import to_text
from dilabench.stats.decisions.decide import Policy
from dilabench.store.run_files import read_record
from tests.conftest import slow, stored_records, text_of

ROOT = Path(__file__).parents[2]
RESULTS = sorted(stored_records(), key=lambda path: path.stat().st_size)
RECORDS = [
    ROOT / "tests" / "golden" / "run_record.v1.json",
    *[path for path in RESULTS if '"schema_version"' in text_of(path)][:19],
]
UNITS_NS = {"s": 1e9, "ms": 1e6, "µs": 1e3, "ns": 1.0}
NUMBER = r"\d+(?:\.\d+)?"
TIME = rf"{NUMBER} (?:s|ms|µs|ns)"
CHANGE = rf"[+-]?{NUMBER} %(?:, {NUMBER}x (?:slower|faster))?"
read = cache(read_record)


@pytest.fixture(params=[slow(path) if at % 4 else path for at, path in enumerate(RECORDS)])
def record(request) -> RunRecord:
    return read(request.param)


def rounded(text: str, scale: float = 1.0) -> tuple[float, float]:
    """The ends of the numbers that are printed as this one."""
    half = 0.5 * 10.0 ** -len(text.partition(".")[2]) * 1.001
    return (float(text) - half) * scale, (float(text) + half) * scale


def time_ns(text: str) -> tuple[float, float]:
    number, unit = text.split()
    return rounded(number, UNITS_NS[unit])


def quotient(after: str, before: str) -> tuple[float, float]:
    (after_low, after_high), (before_low, before_high) = time_ns(after), time_ns(before)
    return after_low / before_high, after_high / before_low


def agree(first: tuple[float, float], second: tuple[float, float]) -> bool:
    return first[0] <= second[1] and second[0] <= first[1]


def is_quotient(ratio: str, dividend: str, divisor: str) -> bool:
    """'1.35x' is one time over another, as they are printed."""
    return agree(rounded(re.match(NUMBER, ratio)[0]), quotient(dividend, divisor))


def is_change(text: str, before: str, after: str) -> bool:
    """'-78 %, 4.5x faster' is the change from one printed time to another."""
    low, high = quotient(after, before)
    percent = re.match(rf"[+-]?{NUMBER}", text)[0]
    shares = rounded(percent.removeprefix("+").removeprefix("-"), 0.01)
    shares = (-shares[1], -shares[0]) if percent.startswith("-") else shares
    factor = re.search(rf"({NUMBER})x (slower|faster)", text)
    if factor is not None and not agree(
        rounded(factor[1]), (low, high) if factor[2] == "slower" else (1 / high, 1 / low)
    ):
        return False
    return agree((1 + shares[0], 1 + shares[1]), (low, high))


def markdown_tables(text: str) -> list[list[dict[str, str]]]:
    """The lines of each table, by the names of their columns."""
    tables: list[list[dict[str, str]]] = []
    names: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip().strip("*").replace("\\", "") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not cells:
            names = []
        elif not names:
            names = cells
            tables.append([])
        elif not set(cells[0]) <= set("-: ") or not cells[0]:
            tables[-1].append(dict(zip(names, cells, strict=True)))
    return tables


def speedups_divide(rows: list[tuple[str, str]]) -> bool:
    """Each speed-up of a section, as (time, speed-up), is the time of one row, whose own is 1.00x, over its own."""
    bases = [time for time, speedup in rows if speedup == "1.00x"]
    return not rows or any(all(is_quotient(speedup, base, time) for time, speedup in rows) for base in bases)


def test_the_walk_finds_a_wrong_ratio() -> None:
    assert is_change("-13 %", "4.183 ms", "3.639 ms")
    assert not is_change("+43 %, 1.4x slower", "4.183 ms", "3.639 ms")
    assert not is_change("-13 %, 1.4x slower", "4.183 ms", "3.639 ms")
    assert is_quotient("1.15x", "4.183 ms", "3.639 ms")
    assert not is_quotient("1.43x", "4.183 ms", "3.639 ms")
    assert not speedups_divide([("10.0 ms", "1.00x"), ("5.00 ms", "1.90x")])


def test_tables_and_pages(record: RunRecord) -> None:
    """Markdown, the summary of a job, a notebook's view and the terminal."""
    sections = [
        [(line.text("median").rstrip("‡"), line.text("speed-up")) for line in section.rows if line.speedup is not None]
        for table in markdown.workload_tables(record)
        for section in table.sections
    ]
    assert all(map(speedups_divide, sections))
    pairs = [pair for section in sections for pair in section]
    for text in (markdown.to_text(record), of_run(record, ())):
        written = [
            (row["median"].rstrip("‡"), row["speed-up"])
            for table in markdown_tables(text)
            for row in table
            if "median" in row and row.get("speed-up", "").endswith("x")
        ]
        assert written == pairs
    terminal, view = to_text(record, width=300, details=True), notebook(record)
    for time, speedup in pairs:
        assert re.search(rf"{re.escape(time)}.*{re.escape(speedup)}", terminal)
        assert time in view


def test_the_answer(record: RunRecord) -> None:
    suites = discover().catalogue.suites
    found = answer(record, suites.get(record.suite).axis if record.suite in suites else LENGTH)
    times = {
        line.row.case.case_id: line.text("median").rstrip("‡")
        for table in markdown.workload_tables(record)
        for line in table.rows
        if line.view is not None
    }
    for row in found.rows:
        if row.fastest is None:
            continue
        fastest = times[row.fastest.case.case_id]
        if row.nearest is not None:
            others = [case_id for case_id in row.ranking.speedups if case_id != row.fastest.case.case_id]
            assert any(is_quotient(row.nearest.text, times[case_id], fastest) for case_id in others)
        if row.versus_dense is not None:
            assert is_quotient(row.versus_dense.text, times[row.dense.case.case_id], fastest)


def test_findings(record: RunRecord) -> None:
    """'5.2 ms (1.35x)' in a table: some other time of the line, or of the record, over this one."""
    known = {
        line.text("median").rstrip("‡")
        for table in markdown.workload_tables(record)
        for line in table.rows
        if line.view is not None
    }
    for section in sections_of(record, discover().catalogue):
        for row in section.rows:
            for cell in row:
                for time, ratio in re.findall(rf"^({TIME}) \(({NUMBER}x)", cell):
                    assert any(is_quotient(ratio, other, time) for other in known), (section.title, cell)


def test_the_leaderboard(record: RunRecord) -> None:
    known = {row.case.implementation for row in record.rows}
    for rows in leaderboard._ranked_together(record, known):
        entries = list(leaderboard._entries(rows, record))
        assert all(is_quotient(f"{entry.behind:.2f}", entry.time, entries[0].time) for entry in entries)


def disturbed(record: RunRecord) -> RunRecord:
    """The record with every third slot half as slow again, and every second sample 4 % faster: its median moves by
    another factor than its minimum and quartiles."""
    rows = []
    for row in record.rows:
        if isinstance(row.outcome, Measured):
            timings = []
            for timing in row.outcome.timings:
                slots = tuple(
                    slot.model_copy(
                        update={
                            "samples_ns": tuple(
                                round(ns * (1.5 if at % 3 == 0 else 1.0) * (0.96 if number % 2 else 1.0))
                                for number, ns in enumerate(slot.samples_ns)
                            )
                        }
                    )
                    for at, slot in enumerate(timing.slots)
                )
                timings.append(timing.model_copy(update={"slots": slots}))
            row = row.model_copy(update={"outcome": row.outcome.model_copy(update={"timings": tuple(timings)})})
        rows.append(row)
    return record.model_copy(update={"rows": tuple(rows), "run_id": "disturbed"})


def compared_lines(text: str) -> list[tuple[str, str, str]]:
    """(before, after, change) of each line of a table in the terminal."""
    return re.findall(rf"({TIME})  +({TIME})  +({CHANGE})", text)


def test_comparisons(record: RunRecord, capsys, monkeypatch) -> None:
    """Rows of one record against each other, and a record against another of the same cases."""
    monkeypatch.setenv("TERMINAL_WIDTH", "300")
    policy = Policy.for_device(record.device)
    other = disturbed(record)
    for comparison in (compare_within([record], policy=policy), compare_across([record], [other], policy=policy)):
        code = exit_code(comparison)
        verdict_view.show(comparison, code, None, (), details=True)
        printed = compared_lines(capsys.readouterr().out)
        assert len(printed) == len(comparison.pairs)
        assert all(is_change(change, before, after) for before, after, change in printed)
        for table in markdown_tables(of_comparison(comparison, "ok")):
            assert all(is_change(row["change"], row["before"], row["after"]) for row in table)
        for cell in json.loads(verdict_view.as_json(comparison, code, None))["cells"]:
            numbers = cell["verdict"]["numbers"]
            assert numbers["ratio"] == pytest.approx(numbers["candidate_ns"] / numbers["baseline_ns"], rel=1e-9)
        for pair in comparison.pairs:
            low, high = pair.verdict.numbers.ratio_low, pair.verdict.numbers.ratio_high
            assert low is None or low <= pair.verdict.numbers.ratio <= high


def test_matrices(record: RunRecord) -> None:
    sides = [[record], [disturbed(record)], [record]]
    matrix = compare_all(("a", "b", "c"), sides, policy=Policy.for_device(record.device))
    for table in markdown_tables(of_matrix(matrix, ())):
        for base, new in zip(table[0::3], table[1::3], strict=True):
            before, after = base["a"], new["b"]
            changed = re.search(CHANGE, base["b"].partition(": ")[2])
            assert changed is None or is_change(changed[0], before, after)
    text = page.to_text(matrix, [record] * 3, "ok", exit_code(matrix.with_first[0]))
    cells = re.findall(rf'<td class="number">({TIME})</td><td class="number">({CHANGE})', text)
    assert len(cells) == sum(len(comparison.pairs) for comparison in matrix.comparisons.values())
