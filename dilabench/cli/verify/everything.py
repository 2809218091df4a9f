"""`dilabench verify --all`: every implementation x backend x dtype x family, as a table of marks with reasons."""

from collections.abc import Mapping, Sequence

from dilabench.cli.terminal import Lines, say, say_folded
from dilabench.engine.outcomes import Result
from dilabench.runs.verification import Trial, families_of_patterns

HEAD = ("implementation", "backend", "dtype")
EVERY = "every"
# The mark of a result in the line of a case, and in a cell of the table.
SIGNS: Mapping[Result, str] = {"right": "✓", "wrong": "✗", "failed": "failed", "skipped": "skipped"}
MARKS: Mapping[Result, str] = {"right": "✓", "wrong": "✗", "failed": "!", "skipped": "-"}
# In the list of reasons, in its order.
WORDS: Mapping[Result, str] = {"wrong": "WRONG", "failed": "FAILED", "skipped": "skipped"}


class Marks:
    """Prints a line as soon as its last family is known; reasons come at the end, each once."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self._families = tuple(families_of_patterns())
        self._running = {trial.line[:2] for trial in trials if trial.planned.skip is None}
        self._pending: dict[tuple[str, str, str], int] = {}
        for trial in trials:
            line = self._line(trial)
            self._pending[line] = self._pending.get(line, 0) + 1
        self._marks: dict[tuple[str, str, str], dict[str, str]] = {}
        self._reasons: dict[tuple[Result, str], list[str]] = {}
        known = [(*line, *self._families) for line in self._pending]
        self._lines = Lines((*HEAD, *self._families), known, names=len(HEAD))

    def _line(self, trial: Trial) -> tuple[str, str, str]:
        """An implementation that runs in no dtype gets one line for all of them."""
        return trial.line if trial.line[:2] in self._running else (*trial.line[:2], EVERY)

    def add(self, trial: Trial, result: Result, detail: str) -> bool:
        """The result of a trial with its reason. Returns whether that completed a line, which was printed."""
        only_forward = result == "right" and trial.planned.case.workload.mode == "forward"
        line = self._line(trial)
        self._pending[line] -= 1
        marks = self._marks.setdefault(line, {})
        marks[trial.family] = MARKS[result] + ("fwd" if only_forward else "")
        if result != "right":
            implementation, backend, dtype = trial.line
            where = f"{implementation} over {backend}" if backend != "-" else implementation
            self._reasons.setdefault((result, detail.replace("\n", "; ")), []).append(f"{where} {dtype} {trial.family}")
        if self._pending[line]:
            return False
        self._lines.print((*line, *(marks.get(family, MARKS["skipped"]) for family in self._families)))
        return True

    def close(self) -> None:
        """The reasons, wrong results first, skipped ones last; equal ones together."""
        say()
        order = list(WORDS)
        for (result, detail), places in sorted(self._reasons.items(), key=lambda item: order.index(item[0][0])):
            shown = places[0] if len(places) == 1 else f"{places[0]} and {len(places) - 1} more"
            say_folded(f"{WORDS[result]}: {detail} ({shown if result == 'skipped' else ', '.join(places)})", "  ")
