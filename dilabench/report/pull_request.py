"""Markdown to paste into a pull request, or for a job's summary: the answer or the verdict first, details folded."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from dilabench.atomic_file import write_text
from dilabench.comparison.comparison import ComparedPair, Comparison
from dilabench.comparison.matrix import CaseMatrix, Matrix
from dilabench.record import RunRecord
from dilabench.report import matrix as texts
from dilabench.report.columns import Column, case_name, chosen_columns, pair_columns, workload_title
from dilabench.report.content import device_text, headline, reproduce_command, unmeasured
from dilabench.report.findings import Section
from dilabench.report.markdown import escaped, fenced, finding_lines, table_lines, tables_lines
from dilabench.stats.decisions.verdicts import Code

FILENAME = "pull-request.md"
# GitHub takes 65,536 characters in a comment.
MOST_CHARACTERS = 60_000


def render(record: RunRecord, folder: Path | None, sections: Sequence[Section] = ()) -> str | None:
    """Write pull-request.md into `folder` and print nothing; without a folder, return the text to print."""
    text = of_run(record, sections)
    if folder is None:
        return text
    write_text(folder / FILENAME, text)
    return None


def of_run(record: RunRecord, sections: Sequence[Section]) -> str:
    """The answer of a run with its table, and its results folded."""
    lines = [f"### {escaped(f'dilabench {record.suite} on {device_text(record)}')}", "", escaped(headline(record))]
    for section in sections:
        if section.answers:
            lines += finding_lines(section, heading="####")
    findings = [line for section in sections if not section.answers for line in finding_lines(section, heading="####")]
    without_time = [f"- {escaped(f'{group.rows}: {group.why}')}" for group in unmeasured(record)]
    parts = [
        ("Findings", findings),
        ("Rows without a time", without_time),
        ("Results", list(tables_lines(record, chosen_columns((), record.rows)))),
    ]
    return _limited(lines, [*parts, ("Command", [*fenced(reproduce_command(record))])])


def of_comparison(comparison: Comparison, verdict: str) -> str:
    """The verdict of a comparison, what changed with its reasons, and what did not, folded.

    verdict: its lines as a terminal shows them, the verdict in the last one.
    """
    changed = [pair for pair in comparison.pairs if _matters(pair)]
    same = [pair for pair in comparison.pairs if not _matters(pair)]
    *ways, title = verdict.splitlines()
    lines = [f"### dilabench: {escaped(title)}", *(line for text in ways for line in ("", _with_commands(text)))]
    if changed:
        lines += ["", *_compared(changed)]
        for pair in changed:
            lines += ["", f"- {escaped(f'{case_name(pair.candidate)}: {pair.verdict.reason}')}"]
            if pair.memory is not None and pair.memory.fails_gate:
                lines += [f"- {escaped(f'{case_name(pair.candidate)}: LARGER: {pair.memory.reason}')}"]
    lines += [line for text in comparison.warnings for line in ("", f"> {escaped(text)}")]
    lacking = [
        escaped(
            f"{entry.lack}: {case_name(entry.case)}, {workload_title(entry.case)}: {entry.baseline}; {entry.candidate}"
        )
        for entry in comparison.uncompared
    ]
    parts = [("Without a proven change", list(_compared(same)) if same else [])]
    return _limited(lines, [*parts, ("Not compared", [f"- {text}" for text in lacking])])


def of_matrix(matrix: Matrix, verdicts: Sequence[str]) -> str:
    """The verdicts on several runs, the cases in which any two differ, and the others, folded."""
    lines = ["### dilabench: every run against every other", *(f"- {escaped(verdict)}" for verdict in verdicts)]
    changed = [case for case in matrix.cases if _changes(case)]
    same = [case for case in matrix.cases if not _changes(case)]
    lines += ["", texts.HOW_TO_READ]
    if changed:
        lines += ["", *_matrix_lines(matrix, changed)]
    lines += [line for text in matrix.warnings for line in ("", f"> {escaped(text)}")]
    parts = [("Without a proven change", list(_matrix_lines(matrix, same)) if any(case.pairs for case in same) else [])]
    return _limited(lines, [*parts, ("Not compared", [f"- {escaped(text)}" for text in texts.lacking(matrix)])])


def _with_commands(text: str) -> str:
    """A line in which commands between backticks stay so, and other text is escaped."""
    parts = re.split("(`[^`]*`)", text)
    return "".join(
        part if place % 2 else re.sub(r"\S.*\S|\S", lambda match: escaped(match[0]), part)
        for place, part in enumerate(parts)
    )


def _changes(case: CaseMatrix) -> bool:
    return any(map(_matters, case.pairs.values()))


def _matrix_lines(matrix: Matrix, cases: Sequence[CaseMatrix]) -> Iterator[str]:
    heads = list(map(escaped, texts.columns(matrix)[1:]))
    rows = [(name, workload_title(case.case), *cells) for case in cases for name, *cells in texts.rows(matrix, case)]
    return table_lines(("case", "workload", *heads), ["---"] * (2 + len(heads)), rows)


def _matters(pair: ComparedPair) -> bool:
    larger = pair.memory is not None and pair.memory.fails_gate
    return larger or pair.verdict.code in (Code.SLOWER, Code.FASTER)


def _compared(pairs: Sequence[ComparedPair]) -> Iterator[str]:
    workload = Column(name="workload", cell=lambda pair: workload_title(pair.candidate), right=False)
    verdict, row, *rest = pair_columns(lambda pair: case_name(pair.candidate))
    columns = [verdict, row, workload, *rest]
    rules = ["---:" if column.right else "---" for column in columns]
    rows = [[column.value_text(pair) for column in columns] for pair in pairs]
    return table_lines([column.name for column in columns], rules, rows)


def _limited(lines: Sequence[str], folded: Sequence[tuple[str, Sequence[str]]]) -> str:
    """The lines, and the folded parts that fit; the others are named as omitted."""
    text = "\n".join(lines) + "\n"
    for title, part in folded:
        if not part:
            continue
        block = f"\n<details><summary>{title}</summary>\n\n" + "\n".join(part) + "\n\n</details>\n"
        room = len(text) + len(block) <= MOST_CHARACTERS
        text += block if room else f"\n{title} omitted: too long for a comment; report.md has it.\n"
    return text
