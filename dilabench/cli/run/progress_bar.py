"""The progress of a run: a bar on a terminal or in a notebook, a line now and then in a pipe or a log."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

from dilabench.cli.terminal import console, say
from dilabench.engine.progress import Progress
from dilabench.record import Case, PlannedCase, Row
from dilabench.units import format_seconds, printable
from dilabench.workload.spec import Workload

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

# Characters of the bar; the rest of the line is for count, times and stage.
BAR_WIDTH = 16
# Between two lines of a log.
EVERY_S = 10.0
# Between two pictures of a notebook's bar while no row ends.
REDRAWN_EVERY_S = 1.0


class RunProgress:
    """Rows done of a run, the time left, and the time left of the budget.

    The time left is the expected time of the open cases, which grows with their work, times measured over expected
    time so far. `PRIOR_S` seconds that went as expected keep the first rows from deciding alone.
    """

    PRIOR_S = 5.0

    def __init__(self, budget_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget_s, self._clock = budget_s, clock
        self._started = self._ended_at = clock()
        self.total: int | None = None
        self.done = 0
        self._open_s: dict[str, float] = {}
        self._ended: set[str] = set()
        self._finished_s = 0.0
        # Cases of the current workload that are measured in common rounds: they end together.
        self._together: frozenset[str] = frozenset()

    def start(self) -> None:
        """Time counts from now on."""
        self._started = self._ended_at = self._clock()

    def expect(self, expected_s: Mapping[str, float]) -> None:
        """Cases by id with their expected seconds, those already done included."""
        self.total = len(expected_s)
        self._open_s = {case_id: seconds for case_id, seconds in expected_s.items() if case_id not in self._ended}

    def group_started(self, cases: Sequence[PlannedCase]) -> None:
        """The cases of one workload are next."""
        self._together = frozenset(planned.case.case_id for planned in cases if planned.procedure == "interleaved")

    def add(self, row: Row) -> None:
        """A row has ended. Cases that cannot run are not expected, and so not counted."""
        if row.planned.skip is not None:
            return
        self.done += 1
        ended = self._together if row.case.case_id in self._together else frozenset({row.case.case_id})
        self._ended |= ended
        self._finished_s += sum(self._open_s.pop(case_id, 0.0) for case_id in ended)
        self._ended_at = self._clock()

    @property
    def left(self) -> str:
        """Return 'about 40 s left, 90 s of the budget left', or the known part."""
        return ", ".join(self.texts_left)

    @property
    def texts_left(self) -> list[str]:
        """The parts of `left`, the one that says most first."""
        now = self._clock()
        budget_left = None if self._budget_s is None else max(0.0, self._budget_s - (now - self._started))
        texts = []
        about = self.expected_left_s(now)
        if budget_left != 0 and about > 0:
            texts.append(f"about {format_seconds(about if budget_left is None else min(about, budget_left))} left")
        if budget_left is not None:
            texts.append(f"{format_seconds(budget_left)} of the budget left" if budget_left else "budget used up")
        return texts

    def expected_left_s(self, now: float) -> float:
        """Return the expected seconds of the open cases, at the pace so far."""
        current_s = sum(self._open_s.get(case_id, 0.0) for case_id in self._together)
        # If the current workload takes longer than expected, so will the others, by as much at least.
        pace = max(
            (self._ended_at - self._started + self.PRIOR_S) / (self._finished_s + self.PRIOR_S),
            (now - self._started + self.PRIOR_S) / (self._finished_s + current_s + self.PRIOR_S),
        )
        others_s = sum(self._open_s.values()) - current_s
        return pace * others_s + max(0.0, pace * current_s - (now - self._ended_at))


class ProgressReporter(Progress):
    """Listens to a run and prints its progress, a failure immediately; subclasses define how."""

    def __init__(self, progress: RunProgress) -> None:
        self._progress = progress

    def device_held(self) -> None:
        """The budget runs from here."""
        self._progress.start()

    def run_started(self, expected_s: Mapping[str, float]) -> None:
        """The cases, known or changed."""
        self._progress.expect(expected_s)
        self._tell("starting")

    def group_started(self, workload: Workload, cases: Sequence[PlannedCase]) -> None:  # noqa: ARG002
        """Which rows will end together."""
        self._progress.group_started(cases)

    def stage_started(self, case: Case, stage: str) -> None:
        """Names the case and what is done with it."""
        self._tell(f"{stage} {case.implementation}, {case.workload.label()}")

    def row_done(self, row: Row) -> None:
        """One case further."""
        self._progress.add(row)
        if row.outcome.status == "failed":
            self._say(f"failed: {row.case.implementation}, {row.case.workload.label()}: {row.outcome.why}")
        self._tell(None)

    def _tell(self, now: str | None) -> None:
        """Show the progress; `now` describes the current stage, None if it has not changed."""
        raise NotImplementedError

    def _say(self, text: str) -> None:
        raise NotImplementedError


class ProgressBar(ProgressReporter):
    """One bar over all cases, with their count, the time passed and the time left; then as much of the current stage as
    the terminal has space for.

    It is drawn between measurements only: a thread that redraws it would take time from what is measured.
    """

    def __init__(self, progress: RunProgress, bar: "Bar") -> None:
        super().__init__(progress)
        self._bar = bar
        self._task = bar.add_task("starting", total=None, left="")
        self._now = ""

    def waiting(self, why: str) -> None:
        """Show the reason for waiting in place of the current stage."""
        self._bar.update(self._task, description=printable(f"WAITING: {why}"), refresh=True)

    def _tell(self, now: str | None) -> None:
        progress, self._now = self._progress, now or self._now
        self._bar.update(
            self._task,
            total=progress.total,
            completed=progress.done,
            left=(progress.texts_left or [""])[0],
            description=printable(self._now),
            refresh=True,
        )

    def _say(self, text: str) -> None:
        self._bar.console.print(printable(text))


class ProgressDisplay(ProgressReporter):
    """One bar in the output of a notebook's cell, redrawn in place between measurements."""

    def __init__(
        self, progress: RunProgress, display: Callable[..., Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(progress)
        self._clock = clock
        self._now, self._drawn, self._drawn_at = "", -1, clock()
        self._shown = display({"text/plain": "starting"}, raw=True, display_id=True)

    def waiting(self, why: str) -> None:
        """Show the reason for waiting in place of the current stage."""
        self._draw(f"WAITING: {why}")

    def _tell(self, now: str | None) -> None:
        progress, self._now = self._progress, now or self._now
        if progress.done == self._drawn and self._clock() - self._drawn_at < REDRAWN_EVERY_S:
            return
        ended = progress.done == progress.total
        self._draw("" if ended else " · ".join(filter(None, (progress.left, self._now))))

    def _draw(self, text: str) -> None:
        done, total = self._progress.done, self._progress.total
        self._drawn, self._drawn_at = done, self._clock()
        rows = f"{done} of {total} rows" if total is not None else ""
        text = printable("; ".join(filter(None, (rows, text))))
        bar = f'<progress value="{done}" max="{total or 1}"></progress> {escape(text)}'
        self._shown.update({"text/plain": text, "text/html": bar}, raw=True)

    def _say(self, text: str) -> None:
        say(text, err=True)


class ProgressLines(ProgressReporter):
    """A line at the start and then every ten seconds at most; each reason for waiting once."""

    def __init__(self, progress: RunProgress, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(progress)
        self._clock = clock
        self._said_at: float | None = None
        self._reasons: set[str] = set()

    def waiting(self, why: str) -> None:
        """Each reason once: it is asked again every half second."""
        if why not in self._reasons:
            self._reasons.add(why)
            self._say(f"waiting: {why}")

    def _tell(self, now: str | None) -> None:
        if now is None or (self._said_at is not None and self._clock() - self._said_at < EVERY_S):
            return
        self._said_at = self._clock()
        progress = self._progress
        rows = f"{progress.done} of {progress.total} rows" if progress.total is not None else ""
        self._say("; ".join(filter(None, (rows, progress.left, f"now: {now}"))))

    def _say(self, text: str) -> None:
        say(text, err=True)


class CheckedLines:
    """Says on stderr how far `verify` is if its table has been silent for ten seconds."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._clock = total, clock
        self._started = self._spoke_at = clock()

    def spoke(self) -> None:
        """The table has grown by a line."""
        self._spoke_at = self._clock()

    def checked(self, done: int, what: str) -> None:
        """`done` cases are checked, `what` is the last."""
        now = self._clock()
        if now - self._spoke_at >= EVERY_S and done < self._total:
            about = (now - self._started) / done * (self._total - done)
            # The first case also compiles kernels, so its time foretells nothing.
            left = f", about {format_seconds(about)} left" if done > 1 else ""
            say(f"{done} of {self._total} checked{left}; last: {what}", err=True)
            self.spoke()


@contextmanager
def progress_shown(budget_s: float | None = None) -> Iterator[Progress]:
    """A progress bar on stderr when that is a terminal, or in a notebook's cell; else a line now and then."""
    # A program that IPython has not started has not loaded it; its shell has a kernel in a notebook.
    notebook = sys.modules.get("IPython")
    if notebook is not None and hasattr(notebook.get_ipython(), "kernel"):
        yield ProgressDisplay(RunProgress(budget_s), notebook.display.display)
        return
    screen, progress = console(to_stderr=True), RunProgress(budget_s)
    if not screen.is_terminal:
        yield ProgressLines(progress)
        return
    with bar_on(screen) as bar:
        yield ProgressBar(progress, bar)


def bar_on(screen: "Console") -> "Bar":
    """The bar with count, time passed, time left and, in what is left of the line, the stage."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    whole, rest = Column(no_wrap=True, overflow="ignore"), Column(no_wrap=True, overflow="ellipsis", ratio=1)
    columns = (
        BarColumn(BAR_WIDTH, table_column=Column(min_width=BAR_WIDTH)),
        MofNCompleteColumn(table_column=whole),
        TimeElapsedColumn(table_column=whole.copy()),
        TextColumn("{task.fields[left]}", markup=False, table_column=whole.copy()),
        TextColumn("{task.description}", markup=False, table_column=rest),
    )
    return Progress(*columns, console=screen, transient=True, auto_refresh=False, expand=True)
