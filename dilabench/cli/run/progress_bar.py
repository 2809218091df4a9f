"""The progress of a run on a terminal; in a pipe only why it waits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dilabench.cli.terminal import console, say
from dilabench.engine.progress import Progress, Silent
from dilabench.errors import printable
from dilabench.record import Case, Row

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


class ProgressBar(Silent):
    """One bar over all cases, with what goes on now beside it.

    It is drawn between measurements only: a thread that redraws it would take time from what is measured.
    """

    def __init__(self, bar: "Bar") -> None:
        self._bar = bar
        self._task = bar.add_task("starting", total=None)

    def run_started(self, total: int) -> None:
        """The bar gets its length."""
        self._bar.update(self._task, total=total, refresh=True)

    def waiting(self, why: str) -> None:
        """Show why nothing is measured."""
        self._bar.update(self._task, description=printable(why), refresh=True)

    def stage_started(self, case: Case, stage: str) -> None:
        """Names the case and what is done with it."""
        text = f"{stage} {case.implementation}, {case.workload.label()}"
        self._bar.update(self._task, description=text, refresh=True)

    def row_done(self, row: Row) -> None:
        """One case further; something that failed is said at once."""
        if row.outcome.status == "failed":
            self._bar.console.print(
                printable(f"failed: {row.case.implementation}, {row.case.workload.label()}: {row.outcome.why}")
            )
        self._bar.update(self._task, advance=1, refresh=True)


class WaitingTold(Silent):
    """Prints once why nothing is measured, so that the log of a waiting job is not empty."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def waiting(self, why: str) -> None:
        """Each reason once: it is asked again every half second."""
        if why not in self._told:
            self._told.add(why)
            say(why, err=True)


@contextmanager
def progress_shown() -> Iterator[Progress]:
    """A progress bar on stderr when that is a terminal, else a line for what it waits for."""
    screen = console(to_stderr=True)
    if not screen.is_terminal:
        yield WaitingTold()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=screen, transient=True, auto_refresh=False) as bar:
        yield ProgressBar(bar)
