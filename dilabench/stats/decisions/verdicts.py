"""Verdicts as data: a code, the numbers behind it, the threshold, the reason and what to do next.

Pure data, cheap to import; `decide` makes them.
"""

from dataclasses import dataclass, replace
from enum import StrEnum


class Code(StrEnum):
    """The claim about the candidate's time. All codes but INCONCLUSIVE are proven at the stated confidence."""

    SLOWER = "SLOWER"
    FASTER = "FASTER"
    SAME = "SAME"
    INCONCLUSIVE = "INCONCLUSIVE"


class Cause(StrEnum):
    """One word for the reason, for programs; the sentence is in `Verdict.reason`."""

    PROVEN = "proven"
    TOO_FEW_ROUNDS = "too-few-rounds"
    TOO_FEW_SESSIONS = "too-few-sessions"
    IMPRECISE = "imprecise"
    OUT_OF_REACH = "out-of-reach"
    CLOCK = "clock"
    THROTTLED = "throttled"
    MULTIPLICITY = "multiplicity"
    NOT_REMEASURED = "not-remeasured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Everything a reader needs to check a verdict. Ratios are candidate / baseline time; None is "cannot be said".

    p_slower, p_faster: one-sided p of the claim that the change exceeds the margin in that direction, before
    correction; p_adjusted: of the claimed direction, after `decide.control_family`. confidence: of the interval.
    mde: smallest relative slow-down that this measurement would have called SLOWER four times in five.
    a12: P(a candidate sample is slower); None if not computed. rounds_needed: further rounds for a conclusion; None
    when concluded or when rounds alone are not enough. sessions_needed: total number of new sessions that decide four
    times in five, given this spread and this change or none; both_needed: sessions on either side.
    """

    ratio: float
    ratio_low: float | None
    ratio_high: float | None
    confidence: float | None = None
    log_ratio: float
    se: float | None
    df: float | None
    p_slower: float | None
    p_faster: float | None
    p_adjusted: float | None = None
    mde: float | None
    a12: float | None
    sessions: int
    rounds: int
    rounds_needed: int | None = None
    sessions_needed: int | None = None
    both_needed: int | None = None
    cycles_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A decision on one pair.

    threshold: the margin as a fraction (0.03: three per cent) that a change must exceed; threshold_source: which term
    set it ("user", "noise", "timer" or "absolute"). advisory: shown, but never fails a gate.
    """

    code: Code
    cause: Cause
    numbers: Numbers
    threshold: float
    threshold_source: str
    reason: str
    hint: str = ""
    advisory: bool = False

    @property
    def fails_gate(self) -> bool:
        """A proven slow-down with enough history behind it."""
        return self.code is Code.SLOWER and not self.advisory

    @property
    def undecided(self) -> bool:
        """More sessions, or rounds, can decide it."""
        return self.cause in (Cause.IMPRECISE, Cause.MULTIPLICITY)

    @property
    def flagged(self) -> bool:
        """To be measured again in fresh sessions, after which only those decide (`confirm`)."""
        return self.code in (Code.SLOWER, Code.FASTER) and not self.advisory


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
        code=Code.INCONCLUSIVE,
        cause=Cause.NOT_REMEASURED,
        reason=f"looked {first.code.lower()} once ({first.reason}) and was not measured again",
        hint="measure the pair again in fresh sessions; only the second data decide",
    )
