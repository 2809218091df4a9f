"""One view of a measured row and of a pair of rows: every output reads its figures here.

The time of a row is the median of all samples of its first timing (`record.ESTIMATOR`), with an interval that allows
for interleaved samples (`stats.samples.location`). Verdicts use sharper locations of slots, which are shown only as a
ratio (`stats.decisions.paired`).
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import log
from statistics import fmean, stdev

import numpy as np

from dilabench.compare.pairing import common_timings, pair, slots_of
from dilabench.errors import ConfigError
from dilabench.metadata import NOTES, WAY
from dilabench.record import Measured, Memory, Row, RunRecord, Timing
from dilabench.stats.decisions.paired import Estimate, estimate_many
from dilabench.stats.samples.location import (
    Interval,
    Location,
    chosen_slots,
    locate_sessions,
    locate_slots,
    quantile,
)
from dilabench.workload.spec import flops

# More pairs at once save no more time, and each takes memory.
ESTIMATED_TOGETHER = 256
SessionSlots = list[Sequence[int]]

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
        return len(set(self.timing.columns.column("session")))

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
        """The memory of one call, where it was measured."""
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
    """The lengths in tokens, in ascending order, of which a record has no measured row.

    The lengths of a search (label `way`) do not count: it goes on until one is too long.
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

    'timed' counts the timed calls of which rows were checked; records of before have none.
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
    key = id(timing)
    known = _LOCATIONS.get(key)
    if known is None or known[0]() is not timing:
        known = weakref.ref(timing, lambda _: _LOCATIONS.pop(key, None)), _located(timing)
        _LOCATIONS[key] = known
    return known[1]


def _located(timing: Timing) -> Location:
    slots, sessions = slots_of(timing), np.asarray(timing.columns.column("session"))
    if not slots.sizes.all() or (sessions != sessions[0]).any():
        taken = np.flatnonzero(slots.sizes)
        _, first, session = np.unique(sessions[taken], return_index=True, return_inverse=True)
        # By session, in the order in which the sessions began.
        order = taken[np.argsort(first[session], kind="stable")]
        slots, sessions = chosen_slots(slots, order), sessions[order]
    return locate_slots(slots, sessions)


def median_over(timings: Sequence[Timing]) -> float:
    """The median of all samples of one case in one or several records, in ns."""
    return (location_of(timings[0]) if len(timings) == 1 else locate_sessions(sessions_of(timings))).median_ns


def sessions_of(timings: Iterable[Timing]) -> list[SessionSlots]:
    """The slots of one case by session, each record adding its own."""
    sessions: list[SessionSlots] = []
    for timing in timings:
        by_session: dict[int, SessionSlots] = {}
        columns = timing.columns
        for session, samples_ns in zip(columns.column("session"), columns.column("samples_ns"), strict=True):
            by_session.setdefault(session, []).append(samples_ns)
        sessions += by_session.values()
    return sessions


@dataclass(frozen=True, slots=True)
class PairView:
    """Time of a candidate / time of a baseline: from their common rounds, else from their medians.

    `interval`: of the ratio; None if there is too little evidence. `session_log_ratios`: ln(ratio) by session.
    """

    ratio: float
    interval: Interval | None
    session_log_ratios: tuple[float, ...]


def pair_views(pairs: Sequence[tuple[Row, Row]]) -> list[PairView]:
    """The view of each (baseline, candidate), both measured."""
    return [
        _of_medians(*both)
        if known.estimate is None
        else PairView(
            known.estimate.ratio,
            known.estimate.interval and known.estimate.interval.as_ratio(),
            known.estimate.session_log_ratios,
        )
        for both, known in zip(pairs, estimated(pairs), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Estimated:
    """What the common rounds of two rows say; None if there are none. `throttled`: too many were slowed down."""

    estimate: Estimate | None = None
    throttled: bool = False


# As for `_LOCATIONS`: ranking, answer and findings compare the same rows.
_ESTIMATED: dict[tuple[int, int], tuple[weakref.ref[Timing], weakref.ref[Timing], Estimated]] = {}


def estimated(pairs: Sequence[tuple[Row, Row]]) -> list[Estimated]:
    """What the common rounds of each (baseline, candidate) say; the statistics of many are computed together."""
    timings = [None if old is new else common_timings(old, new) for old, new in pairs]
    missing = {(id(both[0]), id(both[1])): both for both in timings if both is not None and not _is_known(both)}
    unknown = list(missing.items())
    for first in range(0, len(unknown), ESTIMATED_TOGETHER):
        batch = unknown[first : first + ESTIMATED_TOGETHER]
        pairings = [pair([both]) for _, both in batch]
        estimates = iter(
            estimate_many([known.rounds for known in pairings if known.rounds is not None], effect_size=False)
        )
        for (key, both), pairing in zip(batch, pairings, strict=True):
            found = Estimated(None if pairing.rounds is None else next(estimates), pairing.throttled)
            # The dead reference is what `pop` answers with if the other side's was faster.
            old, new = (weakref.ref(timing, partial(_ESTIMATED.pop, key)) for timing in both)
            _ESTIMATED[key] = old, new, found
    return [Estimated() if both is None else _ESTIMATED[id(both[0]), id(both[1])][2] for both in timings]


def _is_known(both: tuple[Timing, Timing]) -> bool:
    known = _ESTIMATED.get((id(both[0]), id(both[1])))
    return known is not None and all(ref() is timing for ref, timing in zip(known[:2], both, strict=True))


def _of_medians(baseline: Row, candidate: Row) -> PairView:
    """Return the ratio of the medians; its interval combines opposite ends of the two rows' intervals."""
    if baseline is candidate:
        return PairView(1.0, None, (0.0,))
    old, new = measured_view(baseline), measured_view(candidate)
    ratio, interval = new.median_ns / old.median_ns, None
    if old.interval and new.interval:
        low, high = new.interval.low / old.interval.high, new.interval.high / old.interval.low
        interval = Interval(low, high, min(old.interval.confidence, new.interval.confidence))
    return PairView(ratio, interval, (log(ratio),))


def tokens_per_second(tokens: int, time_ns: float) -> float:
    """Tokens (batch x length) per second. Raises ConfigError for a time that is not positive."""
    return tokens * 1e9 / _positive(time_ns)


def tflops_per_second(flops: float, time_ns: float) -> float:
    """10^12 floating-point operations per second; useful or dense-equivalent is the caller's choice of `flops`."""
    return flops / _positive(time_ns) / 1e3


def gigabytes_per_second(traffic_bytes: float, time_ns: float) -> float:
    """10^9 bytes per second."""
    return traffic_bytes / _positive(time_ns)


def speedup(baseline_ns: float, candidate_ns: float) -> float:
    """Baseline time / candidate time: above one the candidate is faster."""
    return _positive(baseline_ns) / _positive(candidate_ns)


def _positive(value: float) -> float:
    if not value > 0:
        raise ConfigError(f"{value} is not positive; a time or ratio that was not measured has no derived figures")
    return value
