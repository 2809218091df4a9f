"""Options that `compare` and `check` share, and the commands that decide what they leave open."""

import shlex
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from dilabench.units import counted, format_seconds

if TYPE_CHECKING:
    from dilabench.comparison.comparison import ComparedPair
    from dilabench.record import RunRecord


# Options of a run that the command which decides gives itself.
OWN_OPTIONS = frozenset({"-o", "--output", "--sessions"})


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


def longer_run(record: "RunRecord", pairs: "Sequence[ComparedPair]", save: str | None = None) -> list[str]:
    """The command that measures a record again in as many sessions as its imprecise rows need; empty if none would.

    `save`: the command that adds the sessions, in the folder `more-sessions`, to a baseline; they must then suffice on
    either side. If sessions decide some rows only, the text says how many, and what the others need.
    """
    from dilabench.comparison.comparison import imprecise_pairs

    numbers = [pair.verdict.numbers for pair in imprecise_pairs(pairs)]
    needed = [number.sessions_needed if save is None else number.both_needed for number in numbers]
    known = [sessions for sessions in needed if sessions is not None]
    run = _run_again(record)
    if not known or not run:
        return []
    lasts = f" (about {format_seconds(max(known) * record.duration_s)})" if record.duration_s else ""
    command = f"`{run} --sessions {max(known)}`{lasts}"
    if save is not None:
        command = f"`{run} --sessions {max(known)} -o more-sessions`{lasts}, then `{save}`"
    if len(known) < len(needed):
        rows = counted(len(needed), "row")
        return [f"{command}, for {len(known)} of {rows}", f"for the other {len(needed) - len(known)}: {OTHERWISE}"]
    return [command]


def _run_again(record: "RunRecord") -> str:
    """The command that made a record, without its output folder and sessions; empty if a script made it."""
    from dilabench.report.content import reproduce_command

    command = reproduce_command(record).partition("\n")[0]
    if command.startswith("#"):
        return ""
    words, kept = iter(shlex.split(command)), []
    for word in words:
        if word in OWN_OPTIONS:
            next(words, None)
        elif word.partition("=")[0] not in OWN_OPTIONS:
            kept.append(word)
    return shlex.join(kept)


# No number of sessions decides: sessions scatter too much, or the change is as large as the threshold.
OTHERWISE = "a quieter machine (`dilabench doctor` names what disturbs it), or another --threshold"
