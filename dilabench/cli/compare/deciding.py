"""Options that `compare` and `check` share."""

from enum import StrEnum
from typing import Annotated

import typer


class FailOn(StrEnum):
    """Other results that may set the exit code."""

    SLOWER = "slower"
    LARGER = "larger"
    INCONCLUSIVE = "inconclusive"


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
