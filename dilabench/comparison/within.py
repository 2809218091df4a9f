"""Rows of one record against each other: they were interleaved in the same rounds, so drift and load cancel.

Several records of the same request may be given; each adds its sessions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dilabench.comparison.comparison import (
    ComparedPair,
    Comparison,
    Selection,
    Uncompared,
    ending,
    everything,
    is_measured,
    lack_of,
)
from dilabench.comparison.pairing import Pairing, common_timings, pair_many
from dilabench.comparison.verdicts import corrected, decide_stored, medians_over, memory_verdict, row_notes
from dilabench.errors import unknown_name
from dilabench.record import Case, Row, RunRecord, Timing
from dilabench.stats.decisions.decide import Policy, judge_many
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

    by: what may differ inside a pair. base: its value on the baseline side; by default the plain method, else that of
    the record's first row. Raises ConfigError if no row has that value.
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
            match = _pair(baseline, candidate, rows)
            if isinstance(match, _Pair):
                pairs.append(match)
            else:
                rest.append(match)
    return Comparison(pairs=tuple(_compared(pairs, policy)), uncompared=tuple(rest))


def _groups(rows: Sequence[Row], by: By) -> list[list[Row]]:
    """Rows that may be compared: the same workload, taking the same inputs, and alike in the other dimensions."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        # Implementations are compared with any backend, the other dimensions with all else equal.
        fixed = (
            []
            if by == "implementation"
            else [_value(row.case, dimension) for dimension in DIMENSIONS if dimension != by]
        )
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
        wanted = candidate.case.backend, candidate.case.optimizations
        alike = [row for row in baselines if is_measured(row) and (row.case.backend, row.case.optimizations) == wanted]
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
        lack = "has no other row of this workload"
        return Uncompared(case=candidate.case, lack="not comparable", baseline=lack, candidate=ending(candidate))
    ids = baseline.case.case_id, candidate.case.case_id
    both = [(record[ids[0]], record[ids[1]]) for record in records if all(case_id in record for case_id in ids)]
    measured = [(old, new) for old, new in both if is_measured(old) and is_measured(new)]
    if not measured:
        return Uncompared(
            case=candidate.case,
            lack=lack_of(candidate) or "not comparable",
            baseline=f"{baseline.case.implementation} {ending(baseline)}",
            candidate=ending(candidate),
        )
    timings = [common for old, new in measured if (common := common_timings(old, new))]
    same_timer = [common for common in timings if common[0].timer == timings[0][0].timer]
    if not same_timer:
        text = "not measured by the same timer"
        return Uncompared(case=candidate.case, lack="not comparable", baseline=text, candidate=text)
    return _Pair(measured[-1][0], measured[-1][1], tuple(same_timer))


def _compared(pairs: Sequence[_Pair], policy: Policy) -> Iterator[ComparedPair]:
    pairings = pair_many(match.timings for match in pairs)
    medians = iter(medians_over([side for pair in pairs for side in _sides(pair)]))
    times_ns = [(next(medians), next(medians)) for _ in pairs]
    interleaved = [
        (pairing.rounds, times) for pairing, times in zip(pairings, times_ns, strict=True) if pairing.rounds is not None
    ]
    paired = iter(judge_many([rounds for rounds, _ in interleaved], policy, [times for _, times in interleaved]))
    verdicts = [
        next(paired) if pairing.rounds is not None else decide_stored([_sides(match)], policy)[0]
        for match, pairing in zip(pairs, pairings, strict=True)
    ]
    final = corrected(verdicts, [pairing.throttled for pairing in pairings], policy)
    for match, pairing, times, verdict in zip(pairs, pairings, times_ns, final, strict=True):
        memory, no_memory = memory_verdict([match.baseline], [match.candidate])
        notes = [*_pairing_notes(pairing), *([no_memory] if no_memory else [])]
        yield ComparedPair(
            baseline=match.baseline.case,
            candidate=match.candidate.case,
            timer=match.timings[0][0].timer,
            route="stored" if pairing.rounds is None else "interleaved",
            baseline_ns=times[0],
            candidate_ns=times[1],
            verdict=verdict,
            memory=memory,
            notes=(*notes, *row_notes(match.baseline, match.candidate)),
        )


def _sides(pair: _Pair) -> tuple[list[Timing], list[Timing]]:
    """The timings of the baseline and of the candidate."""
    return [old for old, _ in pair.timings], [new for _, new in pair.timings]


def _pairing_notes(pairing: Pairing) -> Iterator[str]:
    if pairing.rounds is None:
        yield "the two were not interleaved in the same rounds, so they are compared as if measured at different times"
    elif pairing.left_out:
        yield f"{counted(pairing.left_out, 'round')} without a sound partner omitted"
