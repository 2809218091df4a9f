"""Several runs, each against each: a table per workload, JSON, Markdown or a page."""

from collections.abc import Sequence
from pathlib import Path

from dilabench.cli.compare.verdict_view import INDENT, as_data, final_line, json_text, noise_line, sigma_of
from dilabench.cli.terminal import print_table, say, say_folded, say_page
from dilabench.compare.matrix import Matrix
from dilabench.errors import ExitCode, gravest
from dilabench.record import RunRecord
from dilabench.report import matrix as texts
from dilabench.report.columns import workload_title
from dilabench.report.html import comparison
from dilabench.report.pull_request import of_matrix
from dilabench.store.calibrations import Calibration


def show(matrix: Matrix, codes: Sequence[ExitCode], calibration: Calibration | None) -> None:
    """Print warnings, a table per workload with a line per case and run, what some runs lack, and the verdicts."""
    for warning in matrix.warnings:
        say_folded(f"note: {warning}", INDENT)
    say_folded(noise_line(calibration), INDENT)
    by_workload: dict[str, list[tuple[str, ...]]] = {}
    for one in matrix.cases:
        by_workload.setdefault(workload_title(one.case), []).extend(texts.rows(matrix, one))
    compared = {title: rows for title, rows in by_workload.items() if rows}
    for title, rows in compared.items():
        say()
        print_table(title, texts.columns(matrix), rows)
    say()
    if compared:
        say_folded(texts.HOW_TO_READ, INDENT)
    if texts.is_advisory(matrix):
        say_folded(texts.ADVISORY_MEANS, INDENT)
    for text in texts.lacking(matrix):
        say_folded(f"not compared everywhere: {text}", INDENT)
    for line in _verdicts(matrix, codes):
        say_folded(line, INDENT)


def as_json(matrix: Matrix, codes: Sequence[ExitCode], calibration: Calibration | None) -> str:
    """Every number of every pair of runs, for programs."""
    document = {
        "exit_code": int(gravest(codes)),
        "sigma_aa": sigma_of(calibration),
        "runs": list(matrix.names),
        "comparisons": [
            {"base": matrix.names[base], "new": matrix.names[new], **as_data(one)}
            for (base, new), one in matrix.comparisons.items()
        ],
    }
    return json_text(document)


def as_markdown(matrix: Matrix, codes: Sequence[ExitCode]) -> str:
    """The matrix for a pull request."""
    return of_matrix(matrix, _verdicts(matrix, codes))


def write_page(matrix: Matrix, codes: Sequence[ExitCode], records: Sequence[RunRecord], output: Path | None) -> None:
    """Print the page, or write it into a folder and print the verdicts. `records`: the newest of each run."""
    lines = _verdicts(matrix, codes)
    say_page(comparison.to_text(matrix, records, "; ".join(lines)), output, comparison.FILENAME)
    for line in lines if output else ():
        say(line)


def _verdicts(matrix: Matrix, codes: Sequence[ExitCode]) -> list[str]:
    """The final line of each run against the first."""
    lines = map(final_line, matrix.with_first, codes)
    return [f"{name} against {matrix.names[0]}: {line}" for name, line in zip(matrix.names[1:], lines, strict=True)]
