"""Functions for verdicts of both routes: medians, notes of the rows, memory, throttling, correction for many pairs."""

from collections.abc import Sequence
from dataclasses import replace

from dilabench.comparison.pairing import sessions_of
from dilabench.comparison.view import location_of
from dilabench.record import Measured, Memory, Row, Timing
from dilabench.stats.decisions.decide import Policy, control_family
from dilabench.stats.decisions.memory import (
    RESIDENT_ABSOLUTE_LIMIT_BYTES,
    RESIDENT_RELATIVE_LIMIT,
    MemoryVerdict,
    judge_memory,
)
from dilabench.stats.decisions.verdicts import Cause, Code, Verdict
from dilabench.stats.samples.location import locate_sessions


def median_over(timings: Sequence[Timing]) -> float:
    """The median of all samples of one case in one or several records, in ns."""
    return (location_of(timings[0]) if len(timings) == 1 else locate_sessions(sessions_of(timings))).median_ns


def corrected(verdicts: Sequence[Verdict], throttled: Sequence[bool], policy: Policy) -> list[Verdict]:
    """Withdraw verdicts on throttled pairs; correct the others by Holm, gated and advisory ones as two families.

    An advisory verdict can fail nothing, so it must not make the gated ones more careful.
    """
    withdrawn = [_withdrawn(verdict) if hot else verdict for verdict, hot in zip(verdicts, throttled, strict=True)]
    result = list(withdrawn)
    for advisory in {verdict.advisory for verdict in withdrawn}:
        family = [index for index, verdict in enumerate(withdrawn) if verdict.advisory is advisory]
        controlled = control_family([withdrawn[index] for index in family], alpha=policy.alpha)
        for index, verdict in zip(family, controlled, strict=True):
            result[index] = verdict
    return result


def _withdrawn(verdict: Verdict) -> Verdict:
    if verdict.code is Code.INCONCLUSIVE:
        return verdict
    return replace(
        verdict,
        code=Code.INCONCLUSIVE,
        cause=Cause.THROTTLED,
        numbers=replace(verdict.numbers, p_slower=None, p_faster=None),
        reason=f"{verdict.reason}; but heat or power delivery slowed the GPU down in more than a fifth of the slots",
        hint="improve cooling or lower the power limit, then measure again (`dilabench doctor`)",
    )


def memory_verdict(baseline: Sequence[Row], candidate: Sequence[Row]) -> tuple[MemoryVerdict | None, str | None]:
    """Return the verdict on peak memory, or the reason for its absence if a side has a peak.

    The baseline's largest peak is compared with the candidate's smallest. A count of torch's allocator is judged
    exactly, the resident sets of older records by wider limits, because they vary by pages from run to run.
    """
    old, new = _memories(baseline), _memories(candidate)
    if not old or not new:
        return None, "memory was measured on one side only" if old or new else None
    ways = {(memory.source, memory.isolated) for memory in (*old, *new)}
    if len(ways) > 1:
        return None, "memory was measured in different ways and is not compared"
    peaks = max(memory.peak_bytes for memory in old), min(memory.peak_bytes for memory in new)
    if new[-1].source == "allocator":
        return judge_memory(*peaks), None
    resident = judge_memory(
        *peaks, relative_limit=RESIDENT_RELATIVE_LIMIT, absolute_limit_bytes=RESIDENT_ABSOLUTE_LIMIT_BYTES
    )
    return resident, None


def _memories(rows: Sequence[Row]) -> list[Memory]:
    outcomes = (row.outcome for row in rows)
    return [outcome.memory for outcome in outcomes if isinstance(outcome, Measured) and outcome.memory is not None]


def row_notes(baseline: Row, candidate: Row) -> list[str]:
    """The warnings that the rows themselves carry."""
    notes = []
    for side, row in (("baseline", baseline), ("candidate", candidate)):
        assert isinstance(row.outcome, Measured)
        notes += [f"{side}: {note.code}: {note.message}" for note in row.outcome.notes]
    return notes
