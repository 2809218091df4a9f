"""comparison.html: two or more runs, each against each, case by case, and in what their environments differ."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dilabench.comparison.comparison import ComparedPair, Comparison
from dilabench.comparison.matrix import CaseMatrix, Matrix
from dilabench.errors import ExitCode
from dilabench.record import RunRecord
from dilabench.report.columns import ABSENT, case_name, verdict_text, workload_title
from dilabench.report.content import device_text, environment_rows, reproduce_command
from dilabench.report.html.page import page
from dilabench.report.matrix import ratio_text, time_text
from dilabench.units import format_latency

FILENAME = "comparison.html"
# How a verdict looks; what is decided nowhere else.
LOOKS = {"SLOWER": "failed", "FASTER": "won", "SAME": "tied", "INCONCLUSIVE": "skipped"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The newer side of a pair: its time, the ratio with its interval, the verdict with its reason."""

    look: str = ""
    word: str = ABSENT
    time: str = ABSENT
    ratio: str = ABSENT
    reason: str = ""
    memory: str = ""


NO_PAIR = Entry()
# A run against itself or an earlier one, which has another cell.
EMPTY = Entry(word="", time="", ratio="")
Line = tuple[str, str, str, str, list[Entry]]


# The banner has the colour of the exit code that its words name; any other code is a failure.
BANNERS = {
    ExitCode.OK: "",
    ExitCode.INCONCLUSIVE: "skipped",
    ExitCode.NOTHING_MEASURED: "skipped",
    ExitCode.INCOMPLETE: "skipped",
}


def to_text(matrix: Matrix, records: Sequence[RunRecord], verdict: str, code: ExitCode) -> str:
    """The page: a line per case and base, a column per later run. `records` of the runs; `verdict`: on top, in the
    colour of its exit `code`.
    """
    return page(
        "comparison.html.j2",
        names=matrix.names,
        records=records,
        verdict=verdict,
        worst=BANNERS.get(code, "failed"),
        device=device_text(records[0]),
        lines=[line for case in matrix.cases for line in _lines(matrix, case)],
        uncompared=[
            (matrix.names[base], matrix.names[new], entry, case_name(entry.case), workload_title(entry.case))
            for (base, new), each in matrix.comparisons.items()
            for entry in each.uncompared
        ],
        warnings=matrix.warnings,
        differences=_differences(records),
        commands=[(record.run_id, reproduce_command(record)) for record in records],
    )


def notebook(comparison: Comparison) -> str:
    """The view of a comparison in a notebook: a line per pair with its reason, and the cases without a pair."""
    return page(
        "notebook_comparison.html.j2",
        pairs=[(case_name(pair.candidate), workload_title(pair.candidate), _entry(pair)) for pair in comparison.pairs],
        uncompared=[(entry, case_name(entry.case), workload_title(entry.case)) for entry in comparison.uncompared],
        warnings=comparison.warnings,
    )


def _lines(matrix: Matrix, case: CaseMatrix) -> Iterator[Line]:
    times = case.times_ns
    for base, name in enumerate(matrix.names[:-1] if case.pairs else ()):
        entries = [_entry(case.pairs.get((base, new))) if base < new else EMPTY for new in range(1, len(matrix.names))]
        yield case_name(case.case), workload_title(case.case), name, time_text(times, base), entries


def _entry(pair: ComparedPair | None) -> Entry:
    if pair is None:
        return NO_PAIR
    verdict = pair.verdict
    return Entry(
        look=LOOKS[verdict.code],
        word=verdict_text(pair),
        time=format_latency(pair.candidate_ns),
        ratio=ratio_text(pair),
        reason=verdict.reason + (f"; {verdict.hint}" if verdict.hint else ""),
        memory="" if pair.memory is None or pair.memory.code == "SAME" else f"memory {pair.memory.code}",
    )


def _differences(records: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """The fields that differ between the environments, times of day excluded."""
    tables = [dict(environment_rows(record)) for record in records]
    for table, record in zip(tables, records, strict=True):
        table["dilabench"] = record.tool_version
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [(name, [table.get(name, ABSENT) for table in tables]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1 and name not in {"started", "finished"}]
