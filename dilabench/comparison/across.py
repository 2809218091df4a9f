"""Two sides measured at different times, joined on `case_id`.

They were not interleaved, so the spread between sessions is the error (`stats.decisions.history`): measured, or assumed
if there are few sessions. Memory and correctness need no statistics.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dilabench.comparison.comparison import (
    ComparedPair,
    Comparison,
    Selection,
    Uncompared,
    everything,
    is_measured,
    uncompared,
)
from dilabench.comparison.fingerprint import Mismatch, hard_mismatches, soft_warnings
from dilabench.comparison.pairing import common_timings, is_throttled
from dilabench.comparison.relative import relative_to
from dilabench.comparison.verdicts import corrected, decide_stored, medians_over, memory_verdict, row_notes
from dilabench.comparison.view import RowView, is_quotable, measured_view
from dilabench.errors import DilabenchError
from dilabench.record import Case, Measured, Row, RunRecord, Timing
from dilabench.stats.decisions.decide import Policy
from dilabench.stats.decisions.verdicts import Verdict
from dilabench.units import change_text, format_latency


@dataclass(frozen=True, slots=True)
class _Match:
    """The rows of one case on both sides, oldest first, all of them measured by one timer."""

    baseline: tuple[Row, ...]
    candidate: tuple[Row, ...]
    timer: str

    def timings(self, rows: Sequence[Row]) -> list[Timing]:
        """The timings of the timer that both sides have."""
        outcomes = [row.outcome for row in rows]
        return [
            timing
            for outcome in outcomes
            if isinstance(outcome, Measured)
            for timing in outcome.timings
            if timing.timer == self.timer and timing.slots
        ]


def refusals(baseline: Sequence[RunRecord], candidate: Sequence[RunRecord]) -> tuple[Mismatch, ...]:
    """The hard fields in which any record of one side differs from any of the other, each named once."""
    distinct = {
        (mismatch.field, mismatch.baseline, mismatch.candidate): mismatch
        for a in baseline
        for b in candidate
        for mismatch in hard_mismatches(a, b)
    }
    return tuple(distinct.values())


def refuse_other_machine(
    baseline: Sequence[RunRecord], candidate: Sequence[RunRecord], error: type[DilabenchError]
) -> None:
    """Raise `error` naming every hard field in which the sides differ, with both values."""
    differing = refusals(baseline, candidate)
    if differing:
        fields = "; ".join(map(str, differing))
        raise error(
            f"the two sides cannot be compared, they differ in {fields}; measure the baseline again on this machine, "
            "in this state (`dilabench run`, then `dilabench baseline save NAME`); `dilabench compare` with "
            "--across-machines shows the ratios of two machines without a verdict"
        )


def compare_across(
    baseline: Sequence[RunRecord],
    candidate: Sequence[RunRecord],
    *,
    policy: Policy,
    select: Selection = everything,
    reference: str | None = None,
) -> Comparison:
    """Every case of both sides; each record of a side adds its sessions, and the last record gives everything else.

    reference: the implementation that times are relative to (`relative.relative_to`); its own times become a warning,
    not verdicts. Call `refusals` first: this function does not check whether the sides are comparable.
    """
    return compare_each([(baseline, candidate)], policy=policy, select=select, reference=reference)[0]


def compare_each(
    pairs: Sequence[tuple[Sequence[RunRecord], Sequence[RunRecord]]],
    *,
    policy: Policy,
    select: Selection = everything,
    reference: str | None = None,
) -> list[Comparison]:
    """Run `compare_across` on each (baseline, candidate) and correct the verdicts of all pairs together."""
    joined = [_joined(*pair, select, reference) for pair in pairs]
    timings = [
        (match.timings(match.baseline), match.timings(match.candidate)) for matches, _ in joined for match in matches
    ]
    throttled = [is_throttled(old) or is_throttled(new) for old, new in timings]
    verdicts = corrected(decide_stored(timings, policy), throttled, policy)
    medians = iter(medians_over([side for pair in timings for side in pair]))
    judged = iter([(verdict, next(medians), next(medians)) for verdict in verdicts])
    return [
        _comparison(pair, [_compared(match, *next(judged)) for match in matches], rest, reference)
        for pair, (matches, rest) in zip(pairs, joined, strict=True)
    ]


def _joined(
    baseline: Sequence[RunRecord], candidate: Sequence[RunRecord], select: Selection, reference: str | None
) -> tuple[list[_Match], list[Uncompared]]:
    """Return the cases that both sides measured, the reference's included, and the remaining ones."""
    sides = (baseline, candidate) if reference is None else relative_to(reference, baseline, candidate)
    old, new = (_rows_by_case(side, lambda case: select(case) or case.implementation == reference) for side in sides)
    matches: list[_Match] = []
    rest: list[Uncompared] = []
    for case_id in dict.fromkeys([*old, *new]):
        match = _match(old.get(case_id, []), new.get(case_id, []))
        if isinstance(match, _Match):
            matches.append(match)
        elif select(match.case):
            rest.append(match)
    return matches, rest


def _comparison(
    sides: tuple[Sequence[RunRecord], Sequence[RunRecord]],
    pairs: Sequence[ComparedPair],
    rest: Sequence[Uncompared],
    reference: str | None,
) -> Comparison:
    shared = set.intersection(*({record.run_id for record in side} for side in sides))
    warnings = [*soft_warnings(*sides), *(f"run {run_id} is on both sides" for run_id in sorted(shared))]
    of_reference = [pair for pair in pairs if pair.candidate.implementation == reference]
    judged = tuple(pair for pair in pairs if pair.candidate.implementation != reference)
    if of_reference:
        changes = ", ".join(
            f"{format_latency(pair.baseline_ns)} before, {format_latency(pair.candidate_ns)} after "
            f"({change_text(pair.verdict.numbers.ratio)})"
            for pair in of_reference
        )
        warnings.append(f"times are relative to {reference} in the same rounds, which itself took {changes}")
    return Comparison(pairs=judged, uncompared=tuple(rest), warnings=tuple(warnings))


def _rows_by_case(records: Sequence[RunRecord], select: Selection) -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = {}
    for record in records:
        for row in record.rows:
            if select(row.case):
                rows.setdefault(row.case.case_id, []).append(row)
    return rows


def _match(old: Sequence[Row], new: Sequence[Row]) -> _Match | Uncompared:
    baseline = tuple(row for row in old if is_measured(row))
    candidate = tuple(row for row in new if is_measured(row))
    # The candidate must work now, in its newest row; the baseline in any row.
    if not baseline or not new or not is_measured(new[-1]):
        latest_old = baseline[-1] if baseline else next(reversed(old), None)
        return uncompared(latest_old, new[-1] if new else None)
    timings = common_timings(baseline[-1], candidate[-1])
    if timings is None:
        old_timers, new_timers = (_timers(rows[-1]) for rows in (baseline, candidate))
        text = "measured by {}"
        return Uncompared(
            case=new[-1].case,
            lack="not comparable",
            baseline=text.format(old_timers),
            candidate=text.format(new_timers),
        )
    return _Match(baseline, candidate, timings[0].timer)


def _timers(row: Row) -> str:
    assert isinstance(row.outcome, Measured)
    return ", ".join(timing.timer for timing in row.outcome.timings) or "no timer"


def _compared(match: _Match, verdict: Verdict, baseline_ns: float, candidate_ns: float) -> ComparedPair:
    memory, no_memory = memory_verdict(match.baseline, match.candidate)
    notes = row_notes(match.baseline[-1], match.candidate[-1])
    return ComparedPair(
        baseline=match.baseline[-1].case,
        candidate=match.candidate[-1].case,
        timer=match.timer,
        route="stored",
        baseline_ns=baseline_ns,
        candidate_ns=candidate_ns,
        verdict=verdict,
        memory=memory,
        notes=(*([no_memory] if no_memory else []), *notes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRatio:
    """One implementation and workload on two machines, a CPU and a GPU for example, each over its fastest backend.

    Times of different machines are not interleaved, and backends and drivers differ, so only the ratio of the medians
    is reported, without a verdict.
    """

    base: Case
    new: Case
    base_time: RowView
    new_time: RowView

    @property
    def ratio(self) -> float:
        """How many times as fast the new machine is."""
        return self.base_time.median_ns / self.new_time.median_ns


def machine_ratios(base: RunRecord, new: RunRecord) -> Iterator[MachineRatio]:
    """Yield the ratio of each workload that both measured with the same dtype, implementation and optimizations."""
    old = _fastest(base.rows)
    for key, (row, time) in _fastest(new.rows).items():
        if key in old:
            other, other_time = old[key]
            yield MachineRatio(base=other.case, new=row.case, base_time=other_time, new_time=time)


def _fastest(rows: Iterable[Row]) -> dict[str, tuple[Row, RowView]]:
    fastest: dict[str, tuple[Row, RowView]] = {}
    for row in rows:
        if not is_quotable(row):
            continue
        time = measured_view(row)
        key = row.case.model_copy(update={"backend": None}).case_id
        if key not in fastest or time.median_ns < fastest[key][1].median_ns:
            fastest[key] = row, time
    return fastest
