"""The terminal report: findings, a table per workload, what has no time and why, notes, and last the answer."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dilabench.errors import counted
from dilabench.plugins.boundary import standard_output
from dilabench.record import RunRecord
from dilabench.report.findings import Section as Finding
from dilabench.report.grid import grid, text_console
from dilabench.report.rows import (
    ALL_COLUMNS,
    TEXT_COLUMNS,
    Section,
    WorkloadTable,
    chosen_columns,
    footnotes,
    workload_tables,
)
from dilabench.report.summary import Unmeasured, device_text, headline, note_groups, unmeasured
from dilabench.units import output_width

PIPED_WIDTH = 120
# More tables are left out of the terminal, more rows that share a reason are counted, longer reasons cut.
MAX_TABLES = 6
MAX_TOLD = 3
MAX_WHY = 240
DETAILS_HINT = "--details shows them, and so does report.md"
# Dropped from the left of this list when a terminal is too narrow for all columns.
LEAST_NEEDED = ("std", "mean", "TFLOP/s", "timer", "95 % CI", "peak mem.", "backend", "tok/s", "verified")
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

    Without `details` many tables are left out, and what many rows share is said once. `columns`: of the tables.
    """
    console, out = text_console(width, colour)
    names = chosen_columns(columns)
    tables = workload_tables(record)
    console.print(Text(f"dilabench {record.suite} on {device_text(record)}", style="bold"))
    for finding in sections:
        if not finding.answers and (finding.rows or not finding.plots):
            _print_finding(console, finding)
    if details or columns or len(tables) <= MAX_TABLES:
        shown = {name for table in tables for name in _print_table(console, table, names)}
        _print_footnotes(console, tables, shown)
    elif tables:
        console.print()
        console.print(Text(f"{len(tables)} tables, one of each workload, are left out; {DETAILS_HINT}", style="dim"))
    lines = [*_unmeasured_texts(record, details), *_note_texts(record, details)]
    if lines:
        console.print()
    for line in lines:
        console.print(line)
    for finding in sections:
        if finding.answers:
            _print_finding(console, finding)
    console.print()
    console.print(Text(headline(record)))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _print_table(console: Console, table: WorkloadTable, wanted: Sequence[str]) -> list[str]:
    """Print a table with those of the wanted columns that there is room for, which it returns."""
    console.print()
    console.print(Text(table.title, style="bold"))
    names, gap = _fitting_columns(table, wanted, console.width)
    for index, section in enumerate(table.sections):
        if section.title is not None:
            console.print(Text(section.title, style="dim"))
        console.print(_drawn(section, _widths(table, names), gap, header=index == 0))
    left_out = [name for name in wanted if name not in names]
    if left_out:
        console.print(Text(f"left out at {console.width} columns: {', '.join(left_out)}", style="dim"))
    return names


def _fitting_columns(table: WorkloadTable, wanted: Sequence[str], width: int) -> tuple[list[str], int]:
    """The columns to show and the gap between them: first the gap shrinks, then the least needed columns go."""
    names = list(wanted)
    for victim in (None, *(name for name in LEAST_NEEDED if name in wanted)):
        if victim is not None:
            names.remove(victim)
        for gap in (2, 1):
            if sum(_widths(table, names).values()) + gap * (len(names) - 1) <= width:
                return names, gap
    return names, 1


def _widths(table: WorkloadTable, names: Sequence[str]) -> dict[str, int]:
    """Columns are as wide as their widest text in any section, so that the sections of a table line up."""
    rows = [dict(zip(ALL_COLUMNS, row.cells, strict=True)) for row in table.rows]
    return {name: max(cell_len(name), *(cell_len(row[name]) for row in rows)) for name in names}


def _drawn(section: Section, widths: dict[str, int], gap: int, header: bool) -> Table:
    drawn = Table(box=SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), pad_edge=False, show_edge=False, show_header=header)
    for name, width in widths.items():
        drawn.add_column(name, justify="left" if name in TEXT_COLUMNS else "right", width=width, no_wrap=True)
    for row in section.rows:
        style = STYLES.get(row.status, "bold green" if row.fastest else "")
        cells = dict(zip(ALL_COLUMNS, row.cells, strict=True))
        drawn.add_row(*(cells[name] for name in widths), style=style)
    return drawn


def _print_footnotes(console: Console, tables: Sequence[WorkloadTable], names: Collection[str]) -> None:
    used = footnotes(tables, names)
    if used:
        console.print()
        console.print(Text("; ".join(used), style="dim"))


def _print_finding(console: Console, finding: Finding) -> None:
    console.print()
    console.print(Text(finding.title, style="bold"))
    console.print(Text(finding.sentence))
    for heading, columns, rows in finding.tables() if finding.rows else ():
        if heading:
            console.print(Text(heading, style="dim"))
        console.print(grid(columns, rows, finding.numeric, console.width, finding.spare))


def _unmeasured_texts(record: RunRecord, details: bool) -> Iterator[Text]:
    """What has no time and why. Failures are told in full; without `details`, of skips of one kind only the first."""
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
        yield text.append(_shortened(entries[0].why) + others)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_WHY else text[:MAX_WHY].rsplit(" ", 1)[0] + " …"


def _note_texts(record: RunRecord, details: bool) -> Iterator[Text]:
    """All notes with `details`; else those that disqualify a time, and one line for each other kind."""
    folded = False
    for group in note_groups(record):
        full = details or group.severe
        folded = folded or not (full or len(group.texts) == 1)
        for text in group.texts if full else [group.brief]:
            yield Text(f"note: {text}", style="yellow")
    if folded:
        yield Text(f"All notes: {DETAILS_HINT}", style="dim")


def _unmeasured_text(entry: Unmeasured) -> Text:
    stage = f" at {entry.stage}" if entry.stage else ""
    text = Text(f"{entry.status}{stage}: ", style=STYLES[entry.status])
    text.append(f"{entry.rows}: {entry.why}")
    for check in entry.checks:
        text.append(f"\n    {check}")
    return text
