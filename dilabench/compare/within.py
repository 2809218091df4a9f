"""Rows of one record against each other: they were interleaved in the same rounds, so drift and load cancel.

Several records of the same request may be given; each adds its sessions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dilabench.compare.comparison import (
    ComparedPair,
    Comparison,
    Selection,
    Uncompared,
    ending,
    everything,
    is_measured,
    lack_of,
)
from dilabench.compare.verdicts import corrected, memory_verdict, row_notes
from dilabench.compare.view import Pairing, common_timings, median_over, pair, sessions_of
from dilabench.errors import unknown_name
from dilabench.record import Case, Row, RunRecord, Timing
from dilabench.stats.decisions.decide import Policy, decide, judge_many
from dilabench.stats.decisions.history import StoredSessions, estimate_stored
from dilabench.stats.decisions.verdicts import Verdict
from dilabench.units import counted

By = Literal["implementation", "backend", "optimizations"]
DIMENSIONS: tuple[By, ...] = ("implementation", "backend", "optimizations")


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two cases of one workload group with their timings in every record that measured both."""

    baseline: Row
    candidate: Row
    timings: tuple[tuple[Timing, Timing], ...]


def compare_within(
    records: Sequence[RunRecord],
    *,
    policy: Policy,
    by: By = "implementation",
    base: str | None = None,
    select: Selection = everything,
) -> Comparison:
    """Every row against the baseline row of its workload group.

    by: what may differ inside a pair. base: its value on the baseline side; by default the plain method, else whatever
    the record has first. Raises ConfigError when no row has that value.
    """
    rows = [{row.case.case_id: row for row in record.rows} for record in records]
    first = {case_id: row for record in reversed(rows) for case_id, row in record.items()}
    chosen = [row for row in first.values() if select(row.case)]
    if base is not None and not any(_value(row.case, by) == base for row in first.values()):
        raise unknown_name(f"baseline {by}", base, {_value(row.case, by) for row in first.values()})
    pairs: list[_Pair] = []
    rest: list[Uncompared] = []
    for group in _groups(chosen, by):
        for baseline, candidate in _baseline_of_each(group, by, base):
            found = _pair(baseline, candidate, rows)
            if isinstance(found, _Pair):
                pairs.append(found)
            else:
                rest.append(found)
    return Comparison(pairs=tuple(_compared(pairs, policy)), uncompared=tuple(rest))


def _groups(rows: Sequence[Row], by: By) -> list[list[Row]]:
    """Rows that may be compared: the same workload, taking the same inputs, and alike in the other dimensions."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        # an implementation brings its backend with it, the other two are compared with all else equal
        fixed = [] if by == "implementation" else [_value(row.case, one) for one in DIMENSIONS if one != by]
        groups.setdefault((row.case.group_id, row.planned.takes, *fixed), []).append(row)
    return list(groups.values())


def _baseline_of_each(group: Sequence[Row], by: By, base: str | None) -> Iterator[tuple[Row | None, Row]]:
    """(baseline, candidate) for every candidate of a group; a baseline of the candidate's own backend is preferred."""
    measured = [row for row in group if is_measured(row)]
    plain = [row for row in measured if row.planned.role == "plain"]
    named = base or _value(next(iter([*plain, *measured, *group])).case, by)
    baselines = [row for row in group if _value(row.case, by) == named]
    baselines.sort(key=lambda row: not is_measured(row))
    candidates = [row for row in group if _value(row.case, by) != named]
    for candidate in candidates:
        own = candidate.case.backend, candidate.case.optimizations
        alike = [row for row in baselines if is_measured(row) and (row.case.backend, row.case.optimizations) == own]
        yield next(iter([*alike, *baselines]), None), candidate
    if not candidates:
        yield from ((None, row) for row in baselines)


def _value(case: Case, by: By) -> str:
    if by == "optimizations":
        switched = case.optimizations.model_dump(exclude_defaults=True)
        return ",".join(f"{name}={value}" for name, value in switched.items()) or "default"
    return case.implementation if by == "implementation" else case.backend or "none"


def _pair(baseline: Row | None, candidate: Row, records: Sequence[dict[str, Row]]) -> _Pair | Uncompared:
    """The timings of a pair in all records, or why it cannot be compared."""
    if baseline is None:
        other = "has no other row of this workload"
        return Uncompared(case=candidate.case, lack="not comparable", baseline=other, candidate=ending(candidate))
    ids = baseline.case.case_id, candidate.case.case_id
    both = [(record[ids[0]], record[ids[1]]) for record in records if all(one in record for one in ids)]
    measured = [(one, other) for one, other in both if is_measured(one) and is_measured(other)]
    if not measured:
        return Uncompared(
            case=candidate.case,
            lack=lack_of(candidate) or "not comparable",
            baseline=f"{baseline.case.implementation} {ending(baseline)}",
            candidate=ending(candidate),
        )
    timings = [found for one, other in measured if (found := common_timings(one, other))]
    same_timer = [found for found in timings if found[0].timer == timings[0][0].timer]
    if not same_timer:
        text = "not measured by the same timer"
        return Uncompared(case=candidate.case, lack="not comparable", baseline=text, candidate=text)
    return _Pair(measured[-1][0], measured[-1][1], tuple(same_timer))


def _compared(pairs: Sequence[_Pair], policy: Policy) -> Iterator[ComparedPair]:
    pairings = [pair(found.timings) for found in pairs]
    paired = iter(judge_many([one.rounds for one in pairings if one.rounds is not None], policy))
    verdicts = [
        next(paired) if one.rounds is not None else _by_sessions(found, policy)
        for found, one in zip(pairs, pairings, strict=True)
    ]
    final = corrected(verdicts, [one.throttled for one in pairings], policy)
    for found, pairing, verdict in zip(pairs, pairings, final, strict=True):
        memory, no_memory = memory_verdict([found.baseline], [found.candidate])
        notes = [*_pairing_notes(pairing), *([no_memory] if no_memory else [])]
        yield ComparedPair(
            baseline=found.baseline.case,
            candidate=found.candidate.case,
            timer=found.timings[0][0].timer,
            route="stored" if pairing.rounds is None else "interleaved",
            baseline_ns=median_over([old for old, _ in found.timings]),
            candidate_ns=median_over([new for _, new in found.timings]),
            verdict=verdict,
            memory=memory,
            notes=(*notes, *row_notes(found.baseline, found.candidate)),
        )


def _by_sessions(found: _Pair, policy: Policy) -> Verdict:
    """The verdict on cases that were not interleaved (both did not fit into memory, say), from their sessions."""
    baseline, candidate = zip(*found.timings, strict=True)
    sides = StoredSessions(sessions_of(baseline), sessions_of(candidate))
    return decide(estimate_stored([sides], confidence=policy.confidence)[0], policy)


def _pairing_notes(pairing: Pairing) -> Iterator[str]:
    if pairing.rounds is None:
        yield "the two did not take turns in the same rounds, so they are compared as if measured at different times"
    elif pairing.left_out:
        yield f"{counted(pairing.left_out, 'round')} without a sound partner left out"
