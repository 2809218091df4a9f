"""Options that `compare` and `check` share, and the commands that decide what they leave open."""

import shlex
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dilabench.comparison.comparison import ComparedPair
    from dilabench.record import RunRecord


class FailOn(StrEnum):
    """Other results that may set the exit code."""

    SLOWER = "slower"
    LARGER = "larger"
    UNDECIDED = "undecided"


Threshold = Annotated[
    str | None,
    typer.Option("--threshold", metavar="SHARE", help="Change that matters: 5%, 0.05 (default 3% GPU, 2% CPU)."),
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", "-k", metavar="TEXT", help="Only cases whose name contains TEXT. Repeatable."),
]
FailOnOption = Annotated[
    list[FailOn] | None,
    typer.Option("--fail-on", help="Exit 6 for slower times or larger peaks, 7 for undecided cases. Repeatable."),
]


def check_again(against: str, *options: str) -> str:
    """The command that measures the cases of a run again until they are decided."""
    return f"`{shlex.join(['dilabench', 'check', '--against', against, *options])}`"


def longer_run(record: "RunRecord", pairs: "Sequence[ComparedPair]", add_to: str | None = None) -> list[str]:
    """The command that measures a record again in as many sessions as its undecided rows need; empty if none would.

    `add_to`: the baseline that the sessions are added to; they must then suffice on either side.
    """
    from dilabench.report.content import reproduce_command

    undecided = [pair.verdict.numbers for pair in pairs if pair.verdict.undecided]
    needed = [number.sessions_needed if add_to is None else number.both_needed for number in undecided]
    known = [sessions for sessions in needed if sessions is not None]
    run = f"{reproduce_command(record)} --sessions {max(known, default=0)}"
    if add_to is None or not known:
        return [f"`{run}`"] if known else []
    save = shlex.join(["dilabench", "baseline", "save", add_to])
    return [f"`{run} -o more-sessions`, then `{save} more-sessions/* --add`"]


# No number of sessions decides: sessions scatter too much, or the change is as large as the threshold.
OTHERWISE = "a quieter machine (`dilabench doctor` names what disturbs it), or another --threshold"
