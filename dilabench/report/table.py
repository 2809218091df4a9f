"""The terminal report: one table per workload, then what has no time and why, then the verdict."""

import io
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dilabench.plugins.boundary import standard_output
from dilabench.record import RunRecord
from dilabench.report.findings import Section as Finding
from dilabench.report.rows import COLUMNS, TEXT_COLUMNS, Section, WorkloadTable, footnotes, workload_tables
from dilabench.report.summary import Unmeasured, device_text, headline, notes, unmeasured
from dilabench.units import terminal_width

PIPED_WIDTH = 120
# Dropped from the left of this list when a terminal is too narrow for all columns.
LEAST_NEEDED = ("TFLOP/s", "timer", "95 % CI", "peak mem.", "backend", "tok/s", "verified")
STYLES = {"failed": "bold red", "skipped": "dim"}


def render(
    record: RunRecord,
    folder: Path | None,  # noqa: ARG001 - every reporter is called alike
    sections: Sequence[Finding] = (),
) -> str | None:
    """The tables as text, with colours only on a terminal. Nothing is written into `folder`."""
    return to_text(record, width=output_width(), colour=standard_output().isatty(), sections=sections)


def output_width() -> int:
    """The terminal's width; TERMINAL_WIDTH where that is set; a fixed width when piped."""
    if pinned := os.environ.get("TERMINAL_WIDTH"):
        return terminal_width(pinned)
    return shutil.get_terminal_size().columns if standard_output().isatty() else PIPED_WIDTH


def to_text(record: RunRecord, *, width: int, colour: bool = False, sections: Sequence[Finding] = ()) -> str:
    """The report for a terminal of `width` columns."""
    # color_system None also keeps bold and dim out; "auto" respects NO_COLOR.
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=colour,
        color_system="auto" if colour else None,
        highlight=False,
        legacy_windows=False,
    )
    tables = workload_tables(record)
    console.print(Text(f"dilabench {record.suite} on {device_text(record)}", style="bold"))
    for table in tables:
        _print_table(console, table)
    _print_footnotes(console, tables)
    for finding in sections:
        if finding.rows or not finding.plots:
            _print_finding(console, finding)
    for entry in unmeasured(record):
        console.print(_unmeasured_text(entry))
    for note in notes(record):
        console.print(Text(f"note: {note}", style="yellow"))
    console.print()
    console.print(Text(headline(record)))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def _print_table(console: Console, table: WorkloadTable) -> None:
    console.print()
    console.print(Text(table.title, style="bold"))
    names, gap = _fitting_columns(table, console.width)
    for index, section in enumerate(table.sections):
        if section.title is not None:
            console.print(Text(section.title, style="dim"))
        console.print(_drawn(section, _widths(table, names), gap, header=index == 0))
    left_out = [name for name in COLUMNS if name not in names]
    if left_out:
        console.print(Text(f"left out at {console.width} columns: {', '.join(left_out)}", style="dim"))


def _fitting_columns(table: WorkloadTable, width: int) -> tuple[list[str], int]:
    """The columns to show and the gap between them: first the gap shrinks, then the least needed columns go."""
    names = list(COLUMNS)
    for victim in (None, *LEAST_NEEDED):
        if victim is not None:
            names.remove(victim)
        for gap in (2, 1):
            if sum(_widths(table, names).values()) + gap * (len(names) - 1) <= width:
                return names, gap
    return names, 1


def _widths(table: WorkloadTable, names: Sequence[str]) -> dict[str, int]:
    """Columns are as wide as their widest text in any section, so that the sections of a table line up."""
    rows = [dict(zip(COLUMNS, row.cells, strict=True)) for row in table.rows]
    return {name: max(cell_len(name), *(cell_len(row[name]) for row in rows)) for name in names}


def _drawn(section: Section, widths: dict[str, int], gap: int, header: bool) -> Table:
    drawn = Table(box=SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), pad_edge=False, show_edge=False, show_header=header)
    for name, width in widths.items():
        drawn.add_column(name, justify="left" if name in TEXT_COLUMNS else "right", width=width, no_wrap=True)
    for row in section.rows:
        style = STYLES.get(row.status, "bold green" if row.fastest else "")
        cells = dict(zip(COLUMNS, row.cells, strict=True))
        drawn.add_row(*(cells[name] for name in widths), style=style)
    return drawn


def _print_footnotes(console: Console, tables: Sequence[WorkloadTable]) -> None:
    used = footnotes(tables)
    if used:
        console.print()
        console.print(Text("; ".join(used), style="dim"))


def _print_finding(console: Console, finding: Finding) -> None:
    console.print()
    console.print(Text(finding.title, style="bold"))
    console.print(Text(finding.sentence))
    if not finding.rows:
        return
    drawn = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name in finding.columns:
        drawn.add_column(Text(name), justify="right" if name in finding.numeric else "left", overflow="fold")
    for cells in finding.rows:
        drawn.add_row(*map(Text, cells))
    console.print(drawn)


def _unmeasured_text(entry: Unmeasured) -> Text:
    stage = f" at {entry.stage}" if entry.stage else ""
    text = Text(f"{entry.status}{stage}: ", style=STYLES[entry.status])
    text.append(f"{entry.rows}: {entry.why}")
    for check in entry.checks:
        text.append(f"\n    {check}")
    return text
