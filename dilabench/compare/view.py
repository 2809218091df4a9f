"""One view of a measured row, of a pair of rows and of all rows of a workload: every output reads its figures here.

The time of a row is the median of all samples of its first timing (`record.ESTIMATOR`), with an interval that allows
for interleaved samples (`stats.samples.location`). Verdicts use sharper locations of slots, which are shown only as a
ratio (`stats.decisions.paired`).

The ratio of two rows comes from their common rounds, so that drift and load cancel. One is proven faster if the
interval of this ratio is beyond the margin of `compare`. Without common rounds the ratio of medians proves nothing.

Rounds are compared by their undisturbed samples. If most rounds of a row are disturbed (kernel launches on a busy host,
say), these samples differ from what its user sees: a row is proven faster only if its median is smaller, too.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log
from statistics import fmean, stdev
from typing import Literal

from dilabench.metadata import NOTES, WAY
from dilabench.record import Measured, Memory, Row, RunRecord, Slot, Timing
from dilabench.stats.decisions.decide import Policy, decide
from dilabench.stats.decisions.paired import Estimate, PairedRounds, estimate_many
from dilabench.stats.decisions.verdicts import Cause, Code
from dilabench.stats.samples.location import Interval, Location, locate_sessions, quantile
from dilabench.units import format_ratio, tflops_per_second, tokens_per_second
from dilabench.workload.spec import flops

# Thermal and hardware slow-downs are temporary faults; large GPUs normally run at their power limit under full load.
FAULTS = frozenset({"hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"})
MAX_FAULTY_SHARE = 0.2

Side = Literal["baseline", "candidate"]
SessionSlots = list[tuple[int, ...]]

# Keyed by the identity of live timings: comparing thousands of samples would take longer than locating them.
_LOCATIONS: dict[int, tuple[weakref.ref[Timing], Location]] = {}


@dataclass(frozen=True, slots=True)
class RowView:
    """A measured row with its first timing that has samples. Times are in ns, sizes in bytes."""

    row: Row
    timing: Timing
    location: Location

    @property
    def median_ns(self) -> float:
        """The median of all samples."""
        return self.location.median_ns

    @property
    def interval(self) -> Interval | None:
        """The interval of the median; None below five samples."""
        return self.location.interval

    @property
    def is_quotable(self) -> bool:
        """Return True if no note says that its time cannot be true."""
        return is_quotable(self.row)

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return self.location.n

    @property
    def sessions(self) -> int:
        """In how many sessions they were taken."""
        return len({slot.session for slot in self.timing.slots})

    @property
    def p25_ns(self) -> float:
        """The lower quartile."""
        return self.location.p25_ns

    @property
    def p75_ns(self) -> float:
        """The upper quartile."""
        return quantile(sorted(self.timing.samples_ns), 0.75)

    @property
    def min_ns(self) -> int:
        """The fastest sample."""
        return min(self.timing.samples_ns)

    @property
    def mean_ns(self) -> float:
        """The mean of all samples."""
        return fmean(self.timing.samples_ns)

    @property
    def std_ns(self) -> float | None:
        """The standard deviation, with n - 1; None of a single sample."""
        return stdev(self.timing.samples_ns) if self.samples > 1 else None

    @property
    def tokens_per_s(self) -> float:
        """Tokens (batch x length) per second, at the median."""
        return tokens_per_second(self.row.case.workload.tokens, self.median_ns)

    @property
    def tokens_per_s_interval(self) -> tuple[float, float] | None:
        """The interval of tokens per second."""
        if self.interval is None:
            return None
        tokens = self.row.case.workload.tokens
        return tokens_per_second(tokens, self.interval.high), tokens_per_second(tokens, self.interval.low)

    @property
    def tflops_per_s(self) -> float:
        """10^12 floating-point operations per second by the multiset formula (`workload.spec.flops`), at the median."""
        return tflops_per_second(flops(self.row.case.workload), self.median_ns)

    @property
    def memory(self) -> Memory | None:
        """The memory of one call; None if it was not measured."""
        return memory_of(self.row)

    @property
    def peak_bytes(self) -> int | None:
        """The peak memory of one call."""
        return peak_of(self.row)

    @property
    def density(self) -> float:
        """Pairs computed / pairs that full attention computes under the same mask and window."""
        return self.row.case.workload.pattern.density_of(self.row.case.workload.shapes)

    @property
    def verified(self) -> str:
        """How far its output was checked (`verified_text`)."""
        assert isinstance(self.row.outcome, Measured)
        return verified_text(self.row.outcome)


def view_of(row: Row) -> RowView | None:
    """The figures of a row; None when it was not measured."""
    timing = first_timing(row)
    return None if timing is None else RowView(row, timing, location_of(timing))


def measured_view(row: Row) -> RowView:
    """The figures of a row that is known to be measured."""
    view = view_of(row)
    assert view is not None
    return view


def is_quotable(row: Row) -> bool:
    """Return True if the row was measured and no note says that its time cannot be true."""
    if not isinstance(row.outcome, Measured) or not any(timing.has_samples for timing in row.outcome.timings):
        return False
    return not is_impossible(row)


def is_impossible(row: Row) -> bool:
    """Return True if a note says that the row's time cannot be true."""
    notes = row.outcome.notes if isinstance(row.outcome, Measured) else ()
    return any(kind.disqualifies for note in notes if (kind := NOTES.get(note.code)))


def lengths_without_rows(record: RunRecord) -> tuple[int, ...]:
    """The lengths in tokens, in ascending order, without a measured row in the record.

    The lengths of a search (label `way`) do not count: it continues until one is too long.
    """
    planned = {row.case.workload.seq_len for row in record.rows if WAY.of(row.planned) is None}
    measured = {row.case.workload.seq_len for row in record.rows if isinstance(row.outcome, Measured)}
    return tuple(sorted(planned - measured))


def first_timing(row: Row) -> Timing | None:
    """The timing that is shown: the first one with samples; None when the row was not measured."""
    if not isinstance(row.outcome, Measured):
        return None
    return next((timing for timing in row.outcome.timings if timing.has_samples), None)


def memory_of(row: Row) -> Memory | None:
    """The memory of one call of a row; None if it was not measured."""
    return row.outcome.memory if isinstance(row.outcome, Measured) else None


def peak_of(row: Row) -> int | None:
    """The peak memory of one call of a row, in bytes; None if it was not measured."""
    memory = memory_of(row)
    return memory.peak_bytes if memory else None


def verified_text(outcome: Measured) -> str:
    """How far a row was checked: every output row, those compared with a built-in, or the number sampled.

    'timed' counts timed calls whose rows were checked; older records have none.
    """
    verification = outcome.verification
    if not verification.passed:
        return "no"
    timed = f", {verification.timed_calls} timed" if verification.timed_calls else ""
    if verification.sampled_rows is None:
        return f"✓ all{timed}"
    rows = f"all vs {verification.against}" if verification.against else verification.sampled_rows
    return f"✓ {rows}{timed}"


def location_of(timing: Timing) -> Location:
    """Return median and interval of a timing's samples; cached, because tables, rankings and plots all use it."""
    key, known = id(timing), _LOCATIONS.get(id(timing))
    if known is None or known[0]() is not timing:
        known = weakref.ref(timing, lambda _: _LOCATIONS.pop(key, None)), locate_sessions(sessions_of([timing]))
        _LOCATIONS[key] = known
    return known[1]


def median_over(timings: Sequence[Timing]) -> float:
    """The median of all samples of one case in one or several records, in ns."""
    return (location_of(timings[0]) if len(timings) == 1 else locate_sessions(sessions_of(timings))).median_ns


def sessions_of(timings: Iterable[Timing]) -> list[SessionSlots]:
    """The slots of one case by session, each record adding its own."""
    sessions: list[SessionSlots] = []
    for timing in timings:
        by_session: dict[int, SessionSlots] = {}
        for slot in timing.slots:
            by_session.setdefault(slot.session, []).append(slot.samples_ns)
        sessions += by_session.values()
    return sessions


@dataclass(frozen=True, slots=True)
class Pairing:
    """The rounds of two cases. `rounds`: None if they were never interleaved. `throttled`: too many rounds were."""

    rounds: PairedRounds | None
    left_out: int = 0
    throttled: bool = False


def common_timings(baseline: Row, candidate: Row) -> tuple[Timing, Timing] | None:
    """The timings of the first timer that took samples of both; None when they share none."""
    assert isinstance(baseline.outcome, Measured)
    assert isinstance(candidate.outcome, Measured)
    others = {timing.timer: timing for timing in candidate.outcome.timings if timing.slots}
    for timing in baseline.outcome.timings:
        if timing.slots and timing.timer in others:
            return timing, others[timing.timer]
    return None


def pair(timings: Iterable[tuple[Timing, Timing]]) -> Pairing:
    """Pair the slots of two cases, (baseline, candidate) per record; each record adds its sessions.

    Slots pair if they belong to one round and have different positions in it: equal positions mean that the cases were
    measured one after the other, even if the round numbers agree. Rounds slowed down by heat are omitted while they
    are few (a fifth at most).
    """
    sessions: list[list[tuple[Slot, Slot]]] = []
    left_out = 0
    for baseline, candidate in timings:
        slot_pairs = matched(baseline, candidate)
        left_out += max(len(baseline.slots), len(candidate.slots)) - sum(map(len, slot_pairs))
        sessions += slot_pairs
    count = sum(map(len, sessions))
    if not count:
        return Pairing(None, left_out)
    sound = [
        [turn for turn in session if all(FAULTS.isdisjoint(slot.throttle) for slot in turn)] for session in sessions
    ]
    faulty = count - sum(map(len, sound))
    throttled = faulty > MAX_FAULTY_SHARE * count
    if not throttled:
        sessions, left_out = [session for session in sound if session], left_out + faulty
    rounds = PairedRounds(
        rounds=[[(a.samples_ns, b.samples_ns) for a, b in session] for session in sessions],
        clocks_mhz=[[(a.sm_clock_mhz, b.sm_clock_mhz) for a, b in session] for session in sessions],
    )
    return Pairing(rounds, left_out, throttled)


def is_throttled(timings: Sequence[Timing]) -> bool:
    """More than a fifth of the slots were slowed down by heat or power delivery."""
    slots = [slot for timing in timings for slot in timing.slots]
    return sum(bool(FAULTS.intersection(slot.throttle)) for slot in slots) > MAX_FAULTY_SHARE * len(slots)


def matched(baseline: Timing, candidate: Timing) -> list[list[tuple[Slot, Slot]]]:
    """Pairs of slots by session.

    If round numbers are unique, they alone decide: a case whose worker died continues in a new session, while the other
    cases stay in the old one.
    """
    alone = _rounds_are_unique(baseline) and _rounds_are_unique(candidate)
    partners = {slot.round if alone else (slot.session, slot.round): slot for slot in candidate.slots}
    sessions: dict[tuple[int, int], list[tuple[Slot, Slot]]] = {}
    for slot in baseline.slots:
        partner = partners.get(slot.round if alone else (slot.session, slot.round))
        if partner is not None and partner.position != slot.position:
            sessions.setdefault((slot.session, partner.session), []).append((slot, partner))
    return list(sessions.values())


def _rounds_are_unique(timing: Timing) -> bool:
    return len({slot.round for slot in timing.slots}) == len(timing.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairView:
    """Two measured rows compared: time of the candidate / time of the baseline, and which of them is faster.

    `ratio`: from their common rounds, else from their medians. `interval`: of the ratio over their common rounds; None
    if fewer than five. `session_log_ratios`: ln(ratio) by session. `median_ratio`: by the medians of slots, not by
    their undisturbed samples. `faster`: the side with the smaller time; None if undecided. `proven`: the interval lies
    beyond the margin of `compare`, and the medians agree. Without such rounds `faster` is only probable: the intervals
    of the two medians do not overlap. `too_few_rounds`: the common rounds are too few or too disturbed for a proof.
    """

    ratio: float
    interval: Interval | None
    session_log_ratios: tuple[float, ...]
    median_ratio: float
    faster: Side | None
    proven: bool
    too_few_rounds: bool

    @property
    def text(self) -> str:
        """'1.35x (1.33–1.37)', or '1.35x' without an interval."""
        if self.interval is None:
            return format_ratio(self.ratio)
        low, high = (format_ratio(end).removesuffix("x") for end in (self.interval.low, self.interval.high))
        return f"{format_ratio(self.ratio)} ({low}–{high})"


def pair_views(pairs: Sequence[tuple[Row, Row]], device: str) -> list[PairView]:
    """Compare each (baseline, candidate), both measured, by the rule of `compare` on that device."""
    timings = [None if old is new else common_timings(old, new) for old, new in pairs]
    pairings = [pair([both]) if both else Pairing(None) for both in timings]
    in_common = [pairing.rounds for pairing in pairings if pairing.rounds is not None]
    policy = Policy.for_device(device)
    estimates = estimate_many(in_common, sigma_aa=policy.sigma_aa or 0.0, effect_size=False)
    estimated = iter(zip(estimates, estimate_many(in_common, statistic="median", effect_size=False), strict=True))
    return [
        _of_medians(*both) if pairing.rounds is None else _of_rounds(*both, pairing, *next(estimated), policy)
        for both, pairing in zip(pairs, pairings, strict=True)
    ]


def _of_rounds(
    baseline: Row, candidate: Row, pairing: Pairing, estimate: Estimate, by_median: Estimate, policy: Policy
) -> PairView:
    verdict = decide(estimate, policy)
    too_few = pairing.throttled or verdict.cause is Cause.TOO_FEW_ROUNDS
    if too_few:
        faster = _disjoint(baseline, candidate)
    elif verdict.code is Code.SLOWER and by_median.ratio >= 1:
        faster = "baseline"
    else:
        faster = "candidate" if verdict.code is Code.FASTER and by_median.ratio <= 1 else None
    return PairView(
        ratio=estimate.ratio,
        interval=None if too_few or estimate.interval is None else estimate.interval.as_ratio(),
        session_log_ratios=estimate.session_log_ratios,
        median_ratio=by_median.ratio,
        faster=faster,
        proven=faster is not None and not too_few,
        too_few_rounds=too_few,
    )


def _of_medians(baseline: Row, candidate: Row) -> PairView:
    """Compare two rows that were never interleaved, which proves nothing."""
    ratio = measured_view(candidate).median_ns / measured_view(baseline).median_ns
    return PairView(
        ratio=ratio,
        interval=None,
        session_log_ratios=(log(ratio),),
        median_ratio=ratio,
        faster=_disjoint(baseline, candidate),
        proven=False,
        too_few_rounds=True,
    )


def _disjoint(baseline: Row, candidate: Row) -> Side | None:
    """The side with the smaller median if the intervals of the two do not overlap."""
    (old_low, old_high), (new_low, new_high) = _reach(baseline), _reach(candidate)
    return "baseline" if old_high < new_low else "candidate" if new_high < old_low else None


def _reach(row: Row) -> tuple[float, float]:
    """The ends of the interval of its median in ns; below five samples the smallest and the largest."""
    view = measured_view(row)
    samples = view.timing.samples_ns
    return (view.interval.low, view.interval.high) if view.interval else (min(samples), max(samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Rows that compute the same function of the same inputs, compared.

    `baseline`: the row that speed-ups refer to. `speedups`: by case id, time of the baseline / time of the row.
    `tied`: rows that are not proven slower than the fastest; its median is the smallest of them.
    `too_few_rounds`: all of `tied` shared too few rounds with the fastest to be decided. `probable`: then the intervals
    of their medians do not overlap its own.
    """

    fastest: Row
    baseline: Row
    speedups: dict[str, float]
    tied: tuple[Row, ...]
    too_few_rounds: bool
    probable: bool

    @property
    def proven(self) -> bool:
        """Return True if every other row is proven to be slower by more than the margin."""
        return not self.tied and len(self.speedups) > 1


def rank(rows: Sequence[Row], device: str) -> Ranking | None:
    """Rank the quotable rows; None if there is none. Speed-ups refer to the plain method, else to the first row.

    A row of a plug-in is the baseline only if no row of dilabench's has a time to quote.
    """
    quotable = [row for row in rows if is_quotable(row)]
    if not quotable:
        return None
    baseline = min(quotable, key=lambda row: (row.planned.source is not None, row.planned.role != "plain"))
    ratios = [view.ratio for view in pair_views([(baseline, row) for row in quotable], device)]
    speedups = {row.case.case_id: 1 / ratio for row, ratio in zip(quotable, ratios, strict=True)}
    sharpest = quotable[ratios.index(min(ratios))]
    others = [row for row in quotable if row is not sharpest]
    views = list(zip(others, pair_views([(sharpest, row) for row in others], device), strict=True))
    undecided = [(row, view) for row, view in views if not view.proven or view.faster != "baseline"]
    too_few_rounds = bool(undecided) and all(view.too_few_rounds for _, view in undecided)
    # Another row may have the smallest median in common rounds.
    by_median = [(sharpest, 1.0), *((row, view.median_ratio) for row, view in undecided)]
    fastest, _ = min(by_median, key=lambda entry: entry[1])
    tied = tuple(row for row, _ in by_median if row is not fastest)
    return Ranking(
        fastest=fastest,
        baseline=baseline,
        speedups=speedups,
        tied=tied,
        too_few_rounds=too_few_rounds,
        probable=too_few_rounds and all(_disjoint(fastest, row) == "baseline" for row in tied),
    )
