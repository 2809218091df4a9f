"""Tables and lines of a given width: columns fold between words, and no word is cut in two."""

import io
import os
import shutil
from collections.abc import Collection, Sequence
from typing import IO

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from dilabench.units import terminal_width

# Between two columns of a table without frame.
GAP = 2


def output_width(stream: IO[str], piped: int) -> int:
    """The width for a stream: TERMINAL_WIDTH or COLUMNS where they say, the terminal's own, or `piped` in a pipe."""
    if pinned := os.environ.get("TERMINAL_WIDTH"):
        return terminal_width(pinned)
    asked = os.environ.get("COLUMNS", "")
    if not stream.isatty() and not (asked.isdecimal() and int(asked)):
        return piped
    return shutil.get_terminal_size().columns


def text_console(width: int, colour: bool = False) -> tuple[Console, io.StringIO]:
    """A console that writes into a text. Without colour it writes neither bold nor dim; with it, NO_COLOR counts."""
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=colour,
        color_system="auto" if colour else None,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    return console, out


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str], width: int) -> RenderableType:
    """A table without frame; columns of numbers, named in `right`, stand to the right.

    Where it is wider than `width`, its widest texts fold, then its widest numbers and the names of rows; where even
    words do not fit, each row becomes a list, a cell to a line.
    """
    by_column = list(zip(columns, *rows, strict=True))
    widths = [max(map(cell_len, column)) for column in by_column]
    words = [max(map(_longest_word, column)) for column in by_column]
    numbers = [
        max(map(cell_len, column[1:]), default=0) if column[0] in (columns[0], *right) else 0 for column in by_column
    ]
    room = width - GAP * (len(columns) - 1)
    whole = [max(pair) for pair in zip(words, numbers, strict=True)]
    least = next((one for one in (whole, words) if sum(one) <= room), None)
    if least is None:
        return Group(*_as_lists(columns, rows))
    for _ in range(sum(widths) - room):
        widest = max((index for index, size in enumerate(widths) if size > least[index]), key=widths.__getitem__)
        widths[widest] -= 1
    table = Table(box=SIMPLE_HEAD, padding=(0, GAP - 1, 0, 0), pad_edge=False, show_edge=False)
    for name, size in zip(columns, widths, strict=True):
        table.add_column(Text(name), justify="right" if name in right else "left", width=size)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)


def _as_lists(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for index, row in enumerate(rows):
        if index:
            parts.append(Text(""))
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, cell in zip(columns, row, strict=True):
            if cell:
                table.add_row(Text(name, style="bold"), Text(cell))
        parts.append(table)
    return parts
