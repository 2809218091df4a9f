"""A report to read and share: the answer first, findings, tables, what went wrong, the machine and the command."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from dilabench.atomic_file import write_text
from dilabench.record import RunRecord
from dilabench.report.columns import Column, chosen_columns
from dilabench.report.content import (
    NoteGroup,
    Unmeasured,
    environment_rows,
    footnotes,
    headline,
    note_groups,
    reproduce_command,
    unmeasured,
    without_skipped,
    workload_tables,
)
from dilabench.report.findings import Section as Finding
from dilabench.report.plots.plots import FOLDER
from dilabench.units import printable

FILENAME = "report.md"
# A mention, and the middle of a mail address.
_MENTION = re.compile(r"@(?=[\w-])")


def render(
    record: RunRecord, folder: Path | None, sections: Sequence[Finding] = (), *, columns: Sequence[str] = ()
) -> str | None:
    """Write report.md into `folder` and print nothing; without a folder, return the text to print.

    Plots in the folder are embedded. Raises EnvironmentNotReady when the file cannot be written.
    """
    text = to_text(record, sections, folder, columns)
    if folder is None:
        return text
    write_text(folder / FILENAME, text)
    return None


def to_text(
    record: RunRecord, sections: Sequence[Finding] = (), folder: Path | None = None, columns: Sequence[str] = ()
) -> str:
    """The whole report as GitHub-flavoured Markdown."""
    return "\n".join(_lines(record, sections, folder, chosen_columns(columns, record.rows))) + "\n"


def _lines(
    record: RunRecord, sections: Sequence[Finding], folder: Path | None, columns: Sequence[Column]
) -> Iterator[str]:
    yield f"# dilabench {escaped(record.suite)}"
    yield from ("", escaped(headline(record)))
    for finding in sections:
        yield from finding_lines(finding, folder)
    yield from ("", "## Results", *tables_lines(record, columns))
    entries = unmeasured(record)
    for status, heading in (("failed", "Failures"), ("skipped", "Skipped")):
        chosen = [entry for entry in entries if entry.status == status]
        if chosen:
            yield from ("", f"## {heading}", "")
            for entry in chosen:
                yield from _unmeasured(entry)
    if groups := note_groups(record):
        yield from ("", "## Notes")
        for group in groups:
            yield from _notes(group)
    yield from ("", "## Environment", "")
    yield from table_lines(("what", "value"), ("---", "---"), environment_rows(record))
    yield from ("", "## Reproduce", "", *fenced(reproduce_command(record)), "")
    versions = f"dilabench {record.tool_version}, record schema {record.schema_version}"
    run_id = " ".join(record.run_id.replace("`", "'").split())
    yield f"Run `{run_id}`, {escaped(versions)}."


def tables_lines(record: RunRecord, columns: Sequence[Column]) -> Iterator[str]:
    """A table per workload with these columns, without skipped rows, and what their marks mean."""
    tables = without_skipped(workload_tables(record))
    for table in tables:
        yield from ("", f"### {escaped(table.title)}")
        for section in table.sections:
            if section.title is not None:
                yield from ("", f"{escaped(section.title)}:")
            cells = [[escaped(column.text(row)) for column in columns] for row in section.rows]
            rows = [
                [f"**{text}**" if row.fastest else text for text in texts]
                for row, texts in zip(section.rows, cells, strict=True)
            ]
            rules = ["---:" if column.right else "---" for column in columns]
            yield from ("", *table_lines([column.name for column in columns], rules, rows, escape=False))
    for meaning in footnotes(tables, columns):
        yield from ("", escaped(meaning))


def finding_lines(finding: Finding, folder: Path | None = None, heading: str = "##") -> Iterator[str]:
    """Heading, sentence and table of a finding, and its plots if they are in the folder."""
    yield from ("", f"{heading} {escaped(finding.title)}")
    for line in finding.sentence.splitlines():
        yield from ("", escaped(line))
    for title, columns, rows in finding.tables() if finding.rows else ():
        rules = ["---:" if name in finding.numeric else "---" for name in columns]
        yield from ("", f"{escaped(title)}:", "") if title else ("",)
        yield from table_lines([escaped(name) for name in columns], rules, rows)
    for plot in finding.plots:
        picture = f"{FOLDER}/{plot.name}.png"
        if folder is not None and (folder / picture).exists():
            yield from ("", f"![{escaped(plot.caption)}]({picture})")


def _notes(group: NoteGroup) -> Iterator[str]:
    """One line for the notes of a kind; notes of several rows are folded below it."""
    yield from ("", f"- {escaped(group.brief)}")
    if group.count > 1:
        yield from ("", "  <details><summary>all rows</summary>", "")
        for head, *lines in group.texts:
            yield f"  - {escaped(head)}"
            yield from (f"    - {escaped(line)}" for line in lines)
        yield from ("", "  </details>")


def table_lines(
    header: Sequence[str], rules: Sequence[str], rows: Sequence[Sequence[str]], escape: bool = True
) -> Iterator[str]:
    """A table, with the alignment of its columns as `rules`."""
    yield _line(header)
    yield _line(rules)
    for row in rows:
        yield _line([escaped(cell) for cell in row] if escape else row)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _unmeasured(entry: Unmeasured) -> Iterator[str]:
    stage = f" failed at {entry.stage}" if entry.stage else ""
    yield f"- **{escaped(entry.rows)}**{stage}: {escaped(entry.why)}"
    for check in entry.checks:
        yield f"  - {escaped(check)}"
    if entry.traceback:
        yield from ("", *(f"  {line}" for line in fenced(entry.traceback.rstrip())))


def fenced(text: str) -> Iterator[str]:
    """The lines of a block of code, between fences that no line of the text can close."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    yield from (fence, *printable(text).splitlines(), fence)


def escaped(text: str) -> str:
    """Text that cannot end a table cell or a line, open markup, link anywhere, mention anyone or move a cursor."""
    text = printable(text)
    for mark in "\\|*_<`[]$~":
        text = text.replace(mark, f"\\{mark}")
    text = text.replace("://", ":\\//").replace("www.", "www\\.")
    # GitHub looks for mentions and addresses after escapes are undone; a space without width is no part of a name.
    return " ".join(_MENTION.sub("@\u200b", text).split())
