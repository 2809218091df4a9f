"""Tables and lines on a terminal or into a pipe: never colours in a pipe, never a wrapped cell there."""

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

import typer

from dilabench.units import parse_count

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDE = 1000
# Between two columns of a table without frame.
GAP = 3
# Texts in a narrower column would be a word or less on a line.
READABLE_WIDTH = 12
RESULT_WIDTH = 7


def say(text: str = "", err: bool = False) -> None:
    """Print a line. A closed pipe does not end the command, whose work and exit code still count."""
    try:
        typer.echo(text, err=err)
    except BrokenPipeError:
        discard(sys.stderr if err else sys.stdout)


def discard(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, so that later writes and the flush at exit do not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def console(to_stderr: bool = False) -> "Console":
    """A rich console as wide as the terminal (TERMINAL_WIDTH pins it), or wide enough for any line in a pipe."""
    from rich.console import Console

    stream = sys.stderr if to_stderr else sys.stdout
    if pinned := os.environ.get("TERMINAL_WIDTH"):
        width = parse_count(pinned, "TERMINAL_WIDTH")
    else:
        width = shutil.get_terminal_size().columns if stream.isatty() else WIDE
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def print_table(
    title: str | None, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()
) -> None:
    """A table without frame; `right` names the columns of numbers.

    On a narrow terminal only texts fold. Where that is not enough, each row becomes a list, a cell to a line.
    """
    from rich.text import Text

    screen, cells = console(), [tuple(row) for row in rows]
    with screen.capture() as captured:
        if title:
            screen.print(Text(title, style="bold"))
        if _least_width(columns, cells, right) <= screen.width:
            screen.print(_side_by_side(columns, cells, right))
        else:
            for index, row in enumerate(cells):
                if index:
                    screen.print()
                screen.print(_one_below_the_other(columns, row))
    say("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _least_width(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> int:
    """Width of a table in which texts fold as far as they stay readable."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in zip(columns, *rows, strict=True)]
    least = [
        width if name in (columns[0], *right) else min(width, READABLE_WIDTH)
        for name, width in zip(columns, widths, strict=True)
    ]
    return sum(least) + GAP * (len(columns) - 1)


def _side_by_side(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        whole = name in (columns[0], *right)
        table.add_column(name, justify="right" if name in right else "left", no_wrap=whole, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _one_below_the_other(columns: Sequence[str], row: Sequence[str]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, cell in zip(columns, row, strict=True):
        if cell:
            table.add_row(Text(name, style="bold"), Text(cell))
    return table


class Lines:
    """A table that is printed line by line, as soon as each is known. `known` are the first cells of all its rows."""

    def __init__(self, columns: Sequence[str], known: Sequence[Sequence[str]]) -> None:
        self._widths = [max(map(len, column)) for column in zip(columns, *known, strict=False)]
        self.print(columns)

    def print(self, cells: Sequence[str]) -> None:
        """One row; the cells beyond the known ones are not padded but for the last gap."""
        padded = [cell.ljust(width) for cell, width in zip(cells, self._widths, strict=False)]
        rest = cells[len(self._widths) :]
        say("  ".join([*padded, *(cell.ljust(RESULT_WIDTH) for cell in rest)]).rstrip())
