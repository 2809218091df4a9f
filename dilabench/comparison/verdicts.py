"""Functions for verdicts of both routes: medians, notes of the rows, memory, throttling, correction for many pairs."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dilabench.comparison.pairing import sessions_of, slots_of
from dilabench.record import Measured, Memory, Row, Timing
from dilabench.stats.decisions.decide import Policy, control_family, decide
from dilabench.stats.decisions.history import StoredSessions, estimate_stored
from dilabench.stats.decisions.memory import (
    RESIDENT_ABSOLUTE_LIMIT_BYTES,
    RESIDENT_RELATIVE_LIMIT,
    MemoryVerdict,
    judge_memory,
)
from dilabench.stats.decisions.verdicts import Cause, Code, Verdict
from dilabench.stats.samples.location import Slots, checked_slots, group_medians

Side = Sequence[Timing]
"""The timings of one case, one of each record that measured it."""

# More cases at once save no more time, and each takes memory.
JUDGED_TOGETHER = 256


def medians_over(sides: Sequence[Side]) -> list[float]:
    """The median of all samples of each case in its records, in ns."""
    medians: list[float] = []
    for first in range(0, len(sides), JUDGED_TOGETHER):
        batch = sides[first : first + JUDGED_TOGETHER]
        samples_ns = np.concatenate([slots_of(timing).samples_ns for timings in batch for timing in timings])
        counts = [sum(len(timing.columns.samples_ns) for timing in timings) for timings in batch]
        of_cases = checked_slots(Slots(samples_ns, np.array(counts, np.intp)))
        medians += group_medians(of_cases.samples_ns, of_cases.sizes).tolist()
    return medians


def decide_stored(pairs: Sequence[tuple[Side, Side]], policy: Policy) -> list[Verdict]:
    """Verdicts on pairs that were not interleaved, before any correction for multiple pairs."""
    verdicts: list[Verdict] = []
    for first in range(0, len(pairs), JUDGED_TOGETHER):
        batch = pairs[first : first + JUDGED_TOGETHER]
        estimates = estimate_stored(
            [StoredSessions(sessions_of(old), sessions_of(new)) for old, new in batch],
            default=policy.spread,
            calibrated=policy.sigma_sessions,
            confidence=policy.confidence_at(policy.look),
        )
        verdicts += [decide(estimate, policy) for estimate in estimates]
    return verdicts


def corrected(verdicts: Sequence[Verdict], throttled: Sequence[bool], policy: Policy) -> list[Verdict]:
    """Withdraw verdicts on throttled pairs, and correct the others by Holm."""
    sound = [_withdrawn(verdict) if hot else verdict for verdict, hot in zip(verdicts, throttled, strict=True)]
    return control_family(sound, policy)


def _withdrawn(verdict: Verdict) -> Verdict:
    if verdict.code is Code.UNDECIDED:
        return verdict
    return replace(
        verdict,
        code=Code.UNDECIDED,
        cause=Cause.THROTTLED,
        numbers=replace(verdict.numbers, p_slower=None, p_faster=None),
        reason=f"{verdict.reason}; but heat or power delivery slowed the GPU down in more than a fifth of the rounds",
        hint="improve cooling or lower the power limit, then measure again (`dilabench doctor`)",
    )


def memory_verdict(baseline: Sequence[Row], candidate: Sequence[Row]) -> tuple[MemoryVerdict | None, str | None]:
    """Return the verdict on peak memory, or the reason for its absence if a side has a peak.

    The baseline's largest peak is compared with the candidate's smallest. A count of torch's allocator is judged
    exactly. Resident sets vary by pages from run to run and are judged by wider limits; if a peak contains one, the
    resident sets of all rows are compared.
    """
    old, new = _memories(baseline), _memories(candidate)
    if not old or not new:
        return None, "memory was measured on one side only" if old or new else None
    ways = {(memory.source, memory.isolated) for memory in (*old, *new)}
    if len(ways) > 1:
        return None, "memory was measured in different ways and is not compared"
    if all(memory.source == "allocator" and not _shows_process(memory) for memory in (*old, *new)):
        peaks = max(memory.peak_bytes for memory in old), min(memory.peak_bytes for memory in new)
        return judge_memory(*peaks), None
    resident = judge_memory(
        max(map(_process_peak, old)),
        min(map(_process_peak, new)),
        relative_limit=RESIDENT_RELATIVE_LIMIT,
        absolute_limit_bytes=RESIDENT_ABSOLUTE_LIMIT_BYTES,
    )
    return resident, None


def _process_peak(memory: Memory) -> int:
    """Bytes that exist before a call, and those that calls added to the process; the peak if these are unknown."""
    if memory.process_bytes is None:
        return memory.peak_bytes
    return memory.process_bytes + sum(
        part or 0 for part in (memory.inputs_bytes, memory.parameters_bytes, memory.kept_bytes)
    )


def _shows_process(memory: Memory) -> bool:
    """Return True if the peak contains what others than torch's allocator added to the process."""
    return memory.process_bytes is not None and memory.peak_bytes == _process_peak(memory)


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
