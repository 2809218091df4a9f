"""Verdicts as data: a code, the numbers behind it, the reason and what to do next.

Pure data, cheap to import; `decide` makes them.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

SpreadSource = Literal["calibrated", "sessions", "slots", "assumed", "rounds"]


class Code(StrEnum):
    """The claim about the candidate's time. SAME: no change above `Numbers.unchanged_within` was seen."""

    SLOWER = "SLOWER"
    FASTER = "FASTER"
    SAME = "SAME"
    UNDECIDED = "UNDECIDED"


class Cause(StrEnum):
    """One word for the reason, for programs; the sentence is in `Verdict.reason`."""

    PROVEN = "proven"
    TOO_FEW_ROUNDS = "too-few-rounds"
    IMPRECISE = "imprecise"
    THROTTLED = "throttled"
    MULTIPLICITY = "multiplicity"
    NOT_REMEASURED = "not-remeasured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Everything a reader needs to check a verdict. None is "cannot be said".

    ratio: the candidate's median of all samples / the baseline's; ratio_low, ratio_high: its interval at `confidence`.
    unchanged_within: the largest relative change, either way, inside that interval. df: None if the spread between
    sessions is taken as known. p_slower, p_faster: one-sided p of the claim that the change exceeds the margin in that
    direction; p_adjusted: of the claimed direction, after `decide.control_family`. mde: smallest relative slow-down
    that this measurement would have called SLOWER four times in five. a12: P(a candidate sample is slower); None if not
    computed. stored: sessions of a baseline measured at another time; 0 if both sides were interleaved. spread: sd
    between sessions in log units, from `spread_source`. sessions_needed: new sessions that should decide; both_needed:
    the same on either side; None when decided or when no number does.
    """

    ratio: float
    ratio_low: float | None
    ratio_high: float | None
    confidence: float | None = None
    unchanged_within: float | None = None
    log_ratio: float
    se: float | None
    df: float | None
    p_slower: float | None
    p_faster: float | None
    p_adjusted: float | None = None
    mde: float | None
    a12: float | None
    sessions: int
    stored: int
    rounds: int
    spread: float | None = None
    spread_source: SpreadSource
    sessions_needed: int | None = None
    both_needed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A decision on one pair. threshold: the margin as a fraction (0.03: three per cent) that a change must exceed."""

    code: Code
    cause: Cause
    numbers: Numbers
    threshold: float
    reason: str
    hint: str = ""

    @property
    def fails_gate(self) -> bool:
        """Return True for a proven slow-down."""
        return self.code is Code.SLOWER

    @property
    def imprecise(self) -> bool:
        """More sessions, or rounds, can decide it, or narrow what they exclude."""
        return self.cause in (Cause.IMPRECISE, Cause.MULTIPLICITY)

    @property
    def undecided(self) -> bool:
        """It is imprecise and claims nothing."""
        return self.imprecise and self.code is Code.UNDECIDED

    @property
    def flagged(self) -> bool:
        """To be measured again in fresh sessions, after which only those decide (`confirm`)."""
        return self.code in (Code.SLOWER, Code.FASTER)


def confirm(first: Verdict, second: Verdict | None) -> Verdict:
    """The verdict that counts once flagged pairs were measured again: the second alone, never a pooling of both.

    The second data are fresh, so when `second` comes from `control_family` its family is the re-measured pairs only.
    """
    if not first.flagged:
        return first
    if second is not None:
        return second
    return replace(
        first,
        code=Code.UNDECIDED,
        cause=Cause.NOT_REMEASURED,
        reason=f"looked {first.code.lower()} once ({first.reason}) and was not measured again",
        hint="only a second measurement in fresh processes decides",
    )
