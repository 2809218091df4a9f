"""The words of a run on a terminal, and what several sessions of one request are good for."""

from collections.abc import Sequence
from functools import partial

from dilabench.cli.run.progress_bar import progress_shown
from dilabench.cli.terminal import say, say_folded, say_text
from dilabench.plugins.descriptors import Reporter
from dilabench.runs.execute import Output

TABLE = "table"


def terminal(formats: Sequence[Reporter], budget_s: float | None) -> Output:
    """Reports go to stdout. Lines about the run go there with the table, and else to stderr, as notes always do."""
    return Output(
        tell=partial(say, err=[reporter.name for reporter in formats] != [TABLE]),
        warn=partial(say_folded, indent="  ", err=True),
        show=say_text,
        progress=progress_shown(budget_s),
    )


def together(folders: Sequence[str]) -> str:
    """The commands that read several sessions of one request."""
    runs = " ".join(folders)
    return (
        f"{len(folders)} sessions. To evaluate them together: `dilabench compare {runs} --by implementation`; "
        f"as a baseline for `check`: `dilabench baseline save NAME {runs}`"
    )
