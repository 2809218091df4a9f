"""Tables and lines on a terminal or into a pipe: never colours in a pipe, never a wrapped cell there."""

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console

WIDE = 1000
RESULT_WIDTH = 7


def console(to_stderr: bool = False) -> "Console":
    """A rich console as wide as the terminal (TERMINAL_WIDTH pins it), or wide enough for any line in a pipe."""
    from rich.console import Console

    stream = sys.stderr if to_stderr else sys.stdout
    pinned = os.environ.get("TERMINAL_WIDTH")
    width = int(pinned) if pinned else shutil.get_terminal_size().columns if stream.isatty() else WIDE
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def print_table(
    title: str | None, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()
) -> None:
    """A table without frame; `right` names the columns of numbers. Only texts fold when the terminal is narrow."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        whole = name in (columns[0], *right)
        table.add_column(name, justify="right" if name in right else "left", no_wrap=whole, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    screen = console()
    with screen.capture() as captured:
        if title:
            screen.print(Text(title, style="bold"))
        screen.print(table)
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


class Lines:
    """A table that is printed line by line, as soon as each is known. `known` are the first cells of all its rows."""

    def __init__(self, columns: Sequence[str], known: Sequence[Sequence[str]]) -> None:
        self._widths = [max(map(len, column)) for column in zip(columns, *known, strict=False)]
        self.print(columns)

    def print(self, cells: Sequence[str]) -> None:
        """One row; the cells beyond the known ones are not padded but for the last gap."""
        padded = [cell.ljust(width) for cell, width in zip(cells, self._widths, strict=False)]
        rest = cells[len(self._widths) :]
        typer.echo("  ".join([*padded, *(cell.ljust(RESULT_WIDTH) for cell in rest)]).rstrip())
