"""The terminal report: findings, a table per workload, rows without a time and why, notes, and last the answer."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dilabench.plugins.boundary import standard_output
from dilabench.plugins.manager import discover
from dilabench.record import RunRecord
from dilabench.report.columns import Column, chosen_columns, spared
from dilabench.report.content import (
    Section,
    Unmeasured,
    WorkloadTable,
    device_text,
    footnotes,
    headline,
    note_groups,
    time_spent,
    unmeasured,
    without_skipped,
    workload_tables,
)
from dilabench.report.findings import Section as Finding
from dilabench.report.findings import sections_of
from dilabench.report.grid import grid, text_console
from dilabench.units import counted, output_width

PIPED_WIDTH = 120
# The size of what `print(record)` shows.
BRIEF_WIDTH, BRIEF_LINES = 120, 10
# More tables are omitted, more rows with the same reason are counted, longer reasons are truncated.
MAX_TABLES = 6
MAX_TOLD = 3
MAX_WHY = 240
DETAILS_HINT = "--details shows them, and so does report.md"
STYLES = {"failed": "bold red", "skipped": "dim"}


def render(
    record: RunRecord,
    folder: Path | None,  # noqa: ARG001 - every reporter is called alike
    sections: Sequence[Finding] = (),
    *,
    details: bool = False,
    columns: Sequence[str] = (),
) -> str | None:
    """The findings and tables as text, with colours only on a terminal. Nothing is written into `folder`."""
    stream = standard_output()
    width = output_width(stream, PIPED_WIDTH)
    return to_text(record, width=width, colour=stream.isatty(), sections=sections, details=details, columns=columns)


def to_text(
    record: RunRecord,
    *,
    width: int,
    colour: bool = False,
    sections: Sequence[Finding] = (),
    details: bool = False,
    columns: Sequence[str] = (),
) -> str:
    """The report for a terminal of `width` columns, which ends with the answer.

    Without `details` most tables and all skipped rows are omitted, and notes and reasons of many rows are printed
    once. `columns`: of the tables.
    """
    console, out = text_console(width, colour)
    wanted = chosen_columns(columns, record.rows)
    tables = workload_tables(record)
    console.print(Text(f"dilabench {record.suite} on {device_text(record)}", style="bold"))
    for finding in sections:
        if not finding.answers and (finding.rows or not finding.plots):
            _print_finding(console, finding)
    if not details:
        tables = without_skipped(tables)
    if details or columns or len(tables) <= MAX_TABLES:
        shown = {column.name for table in tables for column in _print_table(console, table, wanted)}
        if notes := footnotes(tables, [column for column in wanted if column.name in shown]):
            console.print()
            console.print(Text("; ".join(notes), style="dim"))
    elif tables:
        console.print()
        console.print(Text(f"{len(tables)} tables, one per workload, are omitted; {DETAILS_HINT}", style="dim"))
    lines = [*_unmeasured_texts(record, details), *_note_texts(record, details)]
    if lines:
        console.print()
    for line in lines:
        console.print(line)
    if details and (spent := time_spent(record)):
        console.print()
        console.print(Text(f"Time spent: {spent}"))
    for finding in sections:
        if finding.answers:
            _print_finding(console, finding)
    console.print()
    console.print(Text(headline(record)))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def in_brief(record: RunRecord) -> str:
    """The text of `print(record)`: ten lines with the answer, the start of its table, and the counts of outcomes."""
    console, out = text_console(BRIEF_WIDTH, colour=False)
    for finding in sections_of(record, discover().catalogue, plots=False):
        if finding.answers:
            console.print(Text(finding.sentence))
            for _, columns, rows in finding.tables() if finding.rows else ():
                console.print(grid(columns, rows, finding.numeric, console.width, finding.spare))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    end = textwrap.wrap(headline(record), BRIEF_WIDTH)
    most = BRIEF_LINES - len(end)
    if len(lines) > most:
        omitted = counted(len(lines) - most + 1, "more line")
        lines[most - 1 :] = [f"… {omitted}: `dilabench report {record.run_id}`"]
    return "\n".join([*lines, *end])


def _print_table(console: Console, table: WorkloadTable, wanted: Sequence[Column]) -> list[Column]:
    """Print a table with the wanted columns that fit, and return them."""
    console.print()
    console.print(Text(table.title, style="bold"))
    cells = {column.name: [column.text(row) for row in table.rows] for column in wanted}
    # Columns are as wide as their widest text in any section, so that the sections of a table line up.
    widths = {name: max(cell_len(name), *map(cell_len, texts)) for name, texts in cells.items()}
    columns, gap = _fitting_columns(wanted, widths, console.width)
    for index, section in enumerate(table.sections):
        if section.title is not None:
            console.print(Text(section.title, style="dim"))
        console.print(_drawn(section, columns, widths, gap, header=index == 0))
    left_out = [column.name for column in wanted if column not in columns]
    if left_out:
        console.print(Text(f"omitted at {console.width} columns: {', '.join(left_out)}", style="dim"))
    return columns


def _fitting_columns(wanted: Sequence[Column], widths: Mapping[str, int], width: int) -> tuple[list[Column], int]:
    """The columns to show and the gap between them: first the gap shrinks, then the columns to spare go."""
    columns = list(wanted)
    for victim in (None, *spared(wanted)):
        if victim is not None:
            columns.remove(victim)
        for gap in (2, 1):
            if sum(widths[column.name] for column in columns) + gap * (len(columns) - 1) <= width:
                return columns, gap
    return columns, 1


def _drawn(section: Section, columns: Sequence[Column], widths: Mapping[str, int], gap: int, header: bool) -> Table:
    drawn = Table(box=SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), pad_edge=False, show_edge=False, show_header=header)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.right else "left"
        drawn.add_column(column.name, justify=justify, width=widths[column.name], no_wrap=True)
    for row in section.rows:
        style = STYLES.get(row.status, "bold green" if row.fastest else "")
        drawn.add_row(*(column.text(row) for column in columns), style=style)
    return drawn


def _print_finding(console: Console, finding: Finding) -> None:
    console.print()
    console.print(Text(finding.title, style="bold"))
    console.print(Text(finding.sentence))
    for heading, columns, rows in finding.tables() if finding.rows else ():
        if heading:
            console.print(Text(heading, style="dim"))
        console.print(grid(columns, rows, finding.numeric, console.width, finding.spare))


def _unmeasured_texts(record: RunRecord, details: bool) -> Iterator[Text]:
    """Print the rows without a time and why. Failures are printed in full; without `details`, only the first skip of
    each kind.
    """
    by_kind: dict[tuple[str, str], list[Unmeasured]] = {}
    for entry in unmeasured(record):
        by_kind.setdefault((entry.status, entry.code), []).append(entry)
    for (status, code), entries in by_kind.items():
        count = sum(entry.count for entry in entries)
        if details or status == "failed" or count <= MAX_TOLD:
            yield from map(_unmeasured_text, entries)
            continue
        text = Text(f"skipped, {code.replace('_', ' ')} ({count} rows): ", style=STYLES[status])
        others = f"; for {counted(len(entries) - 1, 'other reason')} see --details" if entries[1:] else ""
        why = entries[0].why
        yield text.append((why if len(why) <= MAX_WHY else why[:MAX_WHY].rsplit(" ", 1)[0] + " …") + others)


def _note_texts(record: RunRecord, details: bool) -> Iterator[Text]:
    """All notes with `details`; else those that disqualify a time, and one line for each other kind."""
    folded = False
    for group in note_groups(record):
        full = details or group.severe
        folded = folded or not (full or group.count == 1)
        for head, *lines in group.texts if full else [(group.brief,)]:
            yield Text(f"note: {head}", style="yellow")
            yield from (Text(f"  {line}", style="yellow") for line in lines)
    if folded:
        yield Text(f"All notes: {DETAILS_HINT}", style="dim")


def _unmeasured_text(entry: Unmeasured) -> Text:
    stage = f" at {entry.stage}" if entry.stage else ""
    text = Text(f"{entry.status}{stage}: ", style=STYLES[entry.status])
    text.append(f"{entry.rows}: {entry.why}")
    for check in entry.checks:
        text.append(f"\n    {check}")
    return text
