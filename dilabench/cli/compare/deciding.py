"""What `compare` and `check` share: options, the policy of a machine, the refusal of records of another one."""

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from dilabench.errors import DilabenchError
from dilabench.record import RunRecord
from dilabench.store.calibrations import Calibration
from dilabench.units import parse_fraction

if TYPE_CHECKING:
    from dilabench.stats.decisions.policy import Policy


class FailOn(StrEnum):
    """What else may end a command with an exit code of its own."""

    SLOWER = "slower"
    LARGER = "larger"
    INCONCLUSIVE = "inconclusive"


Threshold = Annotated[
    str | None,
    typer.Option("--threshold", metavar="SHARE", help="Change that matters: 5%, 0.05 (default 3% GPU, 2% CPU)."),
]
Only = Annotated[
    list[str] | None, typer.Option("--only", "-k", metavar="TEXT", help="Only cases whose name holds it. Repeatable.")
]
FailOnOption = Annotated[
    list[FailOn] | None,
    typer.Option("--fail-on", help="Exit 6 for slower times or larger peaks, 7 for undecided cases. Repeatable."),
]


def policy_for(records: Sequence[RunRecord], threshold: str | None, calibration: Calibration | None) -> "Policy":
    """How to decide on these records: the user's margin, and what is known of the machine's noise."""
    from dilabench.stats.decisions.policy import Policy

    return Policy.for_device(
        records[-1].device,
        user_margin=None if threshold is None else parse_fraction(threshold),
        sigma_aa=calibration.sigma_aa if calibration else None,
    )


def refuse_other_machine(
    baseline: Sequence[RunRecord], candidate: Sequence[RunRecord], error: type[DilabenchError]
) -> None:
    """Raise `error` naming every hard field in which the sides differ, with both values."""
    from dilabench.compare.across import refusals

    differing = refusals(baseline, candidate)
    if differing:
        fields = "; ".join(map(str, differing))
        raise error(
            f"the two sides cannot be compared, they differ in {fields}; measure the baseline again on this machine, "
            "in this state (`dilabench run`, then `dilabench baseline save NAME`); `dilabench compare` with "
            "--across-machines shows the ratios of two machines without a verdict"
        )
