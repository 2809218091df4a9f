"""Tables and lines on a terminal or into a pipe: never colours in a pipe, never a wrapped cell there."""

import codecs
import errno
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Never, TextIO

import typer

from dilabench.units import output_width, printable

if TYPE_CHECKING:
    from rich.console import Console

    from dilabench.report.columns import Column

WIDE = 1000
RESULT_WIDTH = 7
ROW_INDENT = "    "


class _KeptOpen(io.BufferedWriter):
    """A buffer that stays open when it, or its stream, is closed."""

    def close(self) -> None:
        """Does nothing: a plug-in may call it, and the command has more to print."""


class Output(io.TextIOWrapper):
    """A standard stream whose writing never fails, because the command's work and exit code still count.

    Text that cannot be written is dropped, and `lost` gives the reason, except for a reader that has gone (`| head`).
    Characters that the encoding lacks are escaped as in JSON.
    """

    lost: OSError | None = None

    def __init__(self, descriptor: int, encoding: str) -> None:
        binary = _KeptOpen(io.FileIO(descriptor, "w"))
        super().__init__(binary, encoding, errors="as_json", write_through=True)

    def write(self, text: str) -> int:
        """As any stream's."""
        try:
            super().write(text)
            super().flush()
        except OSError as error:
            self._drop(error)
        return len(text)

    def flush(self) -> None:
        """As any stream's."""
        try:
            super().flush()
        except OSError as error:
            self._drop(error)

    def detach(self) -> Never:
        """Raise io.UnsupportedOperation: the stream would be of no more use."""
        raise io.UnsupportedOperation("a standard stream of dilabench cannot be detached")

    def _drop(self, error: OSError) -> None:
        if not isinstance(error, BrokenPipeError):
            self.lost = error
        # Buffered text is discarded, now and at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())


def own_streams() -> None:
    """Keep standard output for the command itself: what libraries and plug-ins write to descriptor 1 goes to stderr.

    Streams that were closed (`>&-`) are opened on /dev/null, so that no file takes their numbers.
    """
    codecs.register_error("as_json", _spelt_out)
    closed = [descriptor for descriptor in range(3) if not _is_open(descriptor)]
    for _ in closed:
        os.open(os.devnull, os.O_RDWR)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    own = Output(os.dup(1), encoding)
    if 1 in closed:
        own.lost = OSError(errno.EBADF, "it is closed")
    os.dup2(2, 1)
    sys.stdout = sys.__stdout__ = own  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = Output(2, encoding)  # type: ignore[misc]


def standard_output() -> TextIO:
    """The stream for the command's answer, even if a plug-in replaces `sys.stdout`."""
    # It comes with all of plug-ins, which --help should not wait for.
    from dilabench.plugins.boundary import standard_output as outside

    return outside() or _nowhere()


def standard_error() -> TextIO:
    """The stream for all else. Programs without a console (pythonw, some services) have None: what is said is lost."""
    return sys.stderr or _nowhere()


@cache
def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


def output_lost() -> OSError | None:
    """Return why text could not be written to standard output; None if all was written."""
    stream = standard_output()
    return stream.lost if isinstance(stream, Output) else None


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _spelt_out(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def say_folded(text: str, indent: str = "", err: bool = False) -> None:
    """Print lines folded to the terminal's width; continued lines begin with `indent`."""
    import textwrap

    width = output_width(standard_error() if err else standard_output(), WIDE)
    for line in text.split("\n"):
        words = textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        say(words if len(line) > width else line, err)


def say(text: str = "", err: bool = False, styled: bool = False) -> None:
    """Print a line; control characters in it are spelt out, unless the text is `styled` by a reporter."""
    typer.echo(text if styled else printable(text), file=standard_error() if err else standard_output())


def say_text(text: str | Iterator[str]) -> None:
    """Print the text of a reporter, whole or in parts, as it is."""
    if isinstance(text, str):
        say(text, styled=True)
        return
    # Each writing is a call of the system.
    while several := "".join(islice(text, 1000)):
        typer.echo(several, nl=False, file=standard_output())
    say()


def say_page(text: str, folder: Path | None, name: str) -> None:
    """Print a page, or write it (`file_meant`) and print its path on stderr."""
    from dilabench.atomic_file import write_text

    if folder is None:
        say(text)
    else:
        path = file_meant(folder, name)
        write_text(path, text)
        say(str(path), err=True)


def file_meant(output: Path, name: str) -> Path:
    """Return the file that `-o OUTPUT` means: OUTPUT itself if it has the suffix of `name` and is no folder, else
    `name` in it.
    """
    is_file = output.suffix == Path(name).suffix != "" and not output.is_dir()
    return output if is_file else output / name


def note(text: str) -> None:
    """Print a line on stderr, separate from the answer."""
    say_folded(f"note: {text}", "  ", err=True)


def console(to_stderr: bool = False) -> "Console":
    """A rich console on stdout or stderr, as wide as `output_width` says."""
    from rich.console import Console

    stream = standard_error() if to_stderr else standard_output()
    width = output_width(stream, WIDE)
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def print_table(
    title: str | None,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Sequence[str] = (),
    spare: Sequence[str] = (),
) -> None:
    """A table without frame; `right` names the columns of numbers.

    On a narrow terminal texts fold, and columns named in `spare` may be omitted (`report.grid`).
    """
    from rich.text import Text

    from dilabench.report.grid import grid

    screen, cells = console(), []
    for row in rows:
        cells.append(tuple(map(printable, row)))
    with screen.capture() as captured:
        if title:
            screen.print(Text(printable(title), style="bold"))
        screen.print(grid(list(map(printable, columns)), cells, right, screen.width, spare))
    say("\n".join(line.rstrip() for line in captured.get().splitlines()), styled=True)


def print_items(title: str | None, columns: "Sequence[Column]", items: Iterable[object]) -> None:
    """A table with a line per item, as the columns show it."""
    from dilabench.report.columns import spared

    print_table(
        title,
        [column.name for column in columns],
        [[column.value_text(item) for column in columns] for item in items],
        right=[column.name for column in columns if column.right],
        spare=[column.name for column in spared(columns)],
    )


class Lines:
    """A table that is printed line by line, as soon as each is known.

    `known`: the first cells of all rows; the first `names` of them name the row (by default all). If the table is wider
    than the terminal, each row is a sentence: its names, then every other column with its cell.
    """

    def __init__(self, columns: Sequence[str], known: Sequence[Sequence[str]], names: int | None = None) -> None:
        from dilabench.report.grid import GAP

        self._columns = columns
        self._widths = [max(map(len, column)) for column in zip(columns, *known, strict=False)]
        self._names = len(self._widths) if names is None else names
        others = RESULT_WIDTH * (len(columns) - len(self._widths)) + GAP * (len(columns) - 1)
        self._fits = sum(self._widths) + others <= output_width(standard_output(), WIDE)
        if self._fits:
            self.print(columns)

    def print(self, cells: Sequence[str]) -> None:
        """One row; the cells beyond the known ones are not padded but for the last gap."""
        if not self._fits:
            others = zip(self._columns[self._names :], cells[self._names :], strict=True)
            sentence = ", ".join(f"{column} {cell}" for column, cell in others if cell)
            say_folded(f"{' '.join(cells[: self._names])}: {sentence}", ROW_INDENT)
            return
        padded = [cell.ljust(width) for cell, width in zip(cells, self._widths, strict=False)]
        rest = cells[len(self._widths) :]
        say_folded("  ".join([*padded, *(cell.ljust(RESULT_WIDTH) for cell in rest)]).rstrip(), ROW_INDENT)
