"""What verdicts of both routes share: notes of the rows, memory, throttling, correction for many cells."""

from collections.abc import Sequence
from dataclasses import replace

from dilabench.results import Measured, Row
from dilabench.stats.memory import MemoryVerdict, judge_memory
from dilabench.stats.multiplicity import control_family
from dilabench.stats.policy import Policy
from dilabench.stats.verdicts import Cause, Code, Verdict


def corrected(verdicts: Sequence[Verdict], throttled: Sequence[bool], policy: Policy) -> list[Verdict]:
    """Verdicts on throttled cells withdrawn, the others corrected by Holm: gated cells and advisory ones apart.

    An advisory verdict can fail nothing, so it must not make the gated ones more careful.
    """
    withdrawn = [_withdrawn(one) if hot else one for one, hot in zip(verdicts, throttled, strict=True)]
    result = list(withdrawn)
    for advisory in (False, True):
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


def memory_verdict(baseline: Row, candidate: Row) -> tuple[MemoryVerdict | None, str | None]:
    """The verdict on peak memory, or why there is none although both sides have a peak."""
    assert isinstance(baseline.outcome, Measured)
    assert isinstance(candidate.outcome, Measured)
    old, new = baseline.outcome.memory, candidate.outcome.memory
    if old is None or new is None:
        return None, None if old is new else "memory was measured on one side only"
    if (old.method, old.isolated) != (new.method, new.isolated):
        return None, "memory was measured in different ways and is not compared"
    return judge_memory(old.peak_bytes, new.peak_bytes), None


def row_notes(baseline: Row, candidate: Row) -> list[str]:
    """The warnings that the rows themselves carry."""
    notes = []
    for side, row in (("baseline", baseline), ("candidate", candidate)):
        assert isinstance(row.outcome, Measured)
        notes += [f"{side}: {note.code}: {note.message}" for note in row.outcome.notes]
    return notes
