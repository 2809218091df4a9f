"""Tables and lines of a given width: columns fold between words, and no word is cut in two."""

import io
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

# Between two columns of a table without frame.
GAP = 2
BOLD = Style(bold=True)
# Cells without information; a column of only these is omitted.
NOTHING = frozenset({"", "–", "—"})


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


def grid(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Collection[str],
    width: int,
    spare: Sequence[str] = (),
) -> RenderableType:
    """A table without frame; columns of numbers, named in `right`, are aligned to the right.

    If it is wider than `width`, its widest texts fold. If even words do not fit, these steps follow in order: columns
    with one value move above the table; the first column becomes a heading of its rows; columns in `spare` are omitted,
    one by one, and named below; numbers fold; each row becomes a list with a cell per line.
    """
    for whole in (True, False):
        for form in _narrower(columns, rows, spare):
            if (widths := form.widths(right, width, whole=whole)) is not None:
                left_out = [name for name in spare[: form.left_out] if name in columns]
                below = [Text(f"omitted at {width} columns: {', '.join(left_out)}", style="dim")] if left_out else []
                return Group(form.drawn(widths, right), *below)
    return Group(*_as_lists(columns, rows))


@dataclass(frozen=True, slots=True)
class _Form:
    """A table in one form, with a line above it. `headed`: the first column is the heading of its rows; `left_out`:
    number of omitted spare columns.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    above: str = ""
    headed: bool = False
    left_out: int = 0

    def without(self, names: Collection[str]) -> "_Form":
        kept = [index for index, name in enumerate(self.columns) if name not in names]
        rows = [[row[index] for index in kept] for row in self.rows]
        return replace(self, columns=[self.columns[index] for index in kept], rows=rows)

    def widths(self, right: Collection[str], width: int, *, whole: bool) -> list[int] | None:
        """Widths of the columns; None if they do not fit. `whole`: numbers and the names of rows do not fold."""
        first = int(self.headed)
        by_column = list(zip(self.columns, *self.rows, strict=True))[first:]
        widths = [max(map(cell_len, column)) for column in by_column]
        least = [max((cell_len(word) for text in column for word in text.split()), default=0) for column in by_column]
        if whole:
            numbers = (self.columns[0], *right)
            least = [
                max(size, *map(cell_len, column[1:])) if column[0] in numbers and column[1:] else size
                for size, column in zip(least, by_column, strict=True)
            ]
        room = width - GAP * (len(widths) - 1)
        if sum(least) > room:
            return None
        for _ in range(sum(widths) - room):
            widest = max((index for index, size in enumerate(widths) if size > least[index]), key=widths.__getitem__)
            widths[widest] -= 1
        return widths

    def drawn(self, widths: Sequence[int], right: Collection[str]) -> RenderableType:
        parts: list[RenderableType] = [Text(self.above, style="dim")] if self.above else []
        if not self.headed:
            parts.append(_Table(self.columns, self.rows, widths, right))
        else:
            for name, rows in groupby(self.rows, key=lambda row: row[0]):
                parts += [Text(name, style="bold"), _Table(self.columns[1:], [row[1:] for row in rows], widths, right)]
        return Group(*parts)


def _narrower(columns: Sequence[str], rows: Sequence[Sequence[str]], spare: Sequence[str]) -> Iterator[_Form]:
    form = _Form(columns, rows)
    yield form
    if len(rows) < 2:
        return
    by_column = list(zip(columns, *rows, strict=True))[1:]
    alike = {name: cells[0] for name, *cells in by_column if len(set(cells)) == 1}
    if alike:
        said = " · ".join(f"{name} {cell}".strip() for name, cell in alike.items() if cell not in NOTHING)
        form = replace(form.without(alike), above=said)
        yield form
    if len({row[0] for row in form.rows}) < len(form.rows):
        form = replace(form, headed=True)
        yield form
    for number, name in enumerate(spare, 1):
        form = replace(form.without({name}), left_out=number)
        yield form


@dataclass(frozen=True, slots=True)
class _Table:
    """The lines of a table with a header, as rich's table draws them cell by cell in many times the time."""

    columns: Sequence[str]
    rows: Iterable[Sequence[str]]
    widths: Sequence[int]
    right: Collection[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._lines(console, self.columns, header=True)
        yield Segment("─" * (sum(self.widths) + GAP * (len(self.widths) - 1)))
        yield Segment.line()
        for row in self.rows:
            yield from self._lines(console, row)

    def _lines(self, console: Console, row: Sequence[str], *, header: bool = False) -> Iterator[Segment]:
        sides: list[Literal["left", "right"]] = ["right" if name in self.right else "left" for name in self.columns]
        cells = [_cell_lines(console, *cell) for cell in zip(row, self.widths, sides, strict=True)]
        height = max(map(len, cells))
        for lines, size in zip(cells, self.widths, strict=True):
            blank = [" " * size] * (height - len(lines))
            lines[:] = [*blank, *lines] if header else [*lines, *blank]
        for texts in zip(*cells, strict=True):
            yield Segment((" " * GAP).join(texts), BOLD if header else None)
            yield Segment.line()


def _cell_lines(console: Console, text: str, width: int, side: Literal["left", "right"]) -> list[str]:
    """The lines of a cell, each as wide as its column."""
    if text.isprintable() and cell_len(text) <= width:
        if side == "left":
            return [text + " " * (width - cell_len(text))]
        text = text.rstrip()
        return [" " * (width - cell_len(text)) + text]
    return [line.plain for line in Text(text).wrap(console, width, justify=side, overflow="ellipsis")]


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
