"""One view of a measured row, of a pair of rows and of all rows of a workload: every output reads its figures here.

The time of a row is the median of all samples of its first timing (`record.ESTIMATOR`), with an interval that allows
for interleaved samples (`stats.samples.location`).

The ratio of two rows is the quotient of their times. Its interval comes from their common rounds, so that drift and
load cancel (`stats.decisions.paired`). One is proven faster if the interval is beyond the margin of `compare`. Without
common rounds the ratio proves nothing: other sessions, and another load after `--resume`, stand between the two. One is
then probably faster if `compare` would decide so on one session of each.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import log, log1p
from statistics import fmean, stdev
from typing import Literal

import numpy as np

from dilabench.comparison.pairing import common_timings, pair_many, sessions_of
from dilabench.metadata import WAY
from dilabench.record import Measured, Memory, Row, RunRecord, Skipped, Timing
from dilabench.stats.decisions.decide import Policy, decide
from dilabench.stats.decisions.history import StoredSessions, estimate_stored
from dilabench.stats.decisions.paired import Estimate, estimate_many
from dilabench.stats.decisions.verdicts import Code
from dilabench.stats.samples.location import Interval, Location, locate_slots, quantile
from dilabench.units import format_ratio, tflops_per_second, tokens_per_second
from dilabench.workload.lower_bounds import least_bytes
from dilabench.workload.spec import flops

# More pairs, or samples, at once save no more time, and each takes memory.
ESTIMATED_TOGETHER, LOCATED_TOGETHER = 256, 2**15

Side = Literal["baseline", "candidate"]

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
        return not self.row.is_impossible

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return self.location.n

    @property
    def sessions(self) -> int:
        """In how many sessions they were taken."""
        return len(set(self.timing.columns.turns[0]))

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
        """The standard deviation, with n - 1; None for a single sample."""
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
    def bytes_per_s(self) -> float:
        """The least bytes of a call (`workload.lower_bounds`) per second, at the median: q, k and v read once, out
        written."""
        return least_bytes(self.row.case.workload) / self.median_ns * 1e9

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
        return self.row.case.workload.density

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
    return first_timing(row) is not None and not row.is_impossible


def lengths_without_rows(record: RunRecord) -> tuple[int, ...]:
    """The lengths in tokens, in ascending order, without a measured row in the record.

    An unranked reference is not enough if the budget kept other rows from a time. The lengths of a search (label `way`)
    do not count: it continues until one is too long.
    """
    planned = {row.case.workload.seq_len for row in record.rows if WAY.of(row.planned) is None}
    lengths: dict[tuple[str, bool], set[int]] = defaultdict(set)
    for row in record.rows:
        status = row.outcome.code if isinstance(row.outcome, Skipped) else row.outcome.status
        lengths[status, row.planned.role == "yardstick"].add(row.case.workload.seq_len)
    answered = lengths["measured", False] | (lengths["measured", True] - lengths["budget", False])
    return tuple(sorted(planned - answered))


def first_timing(row: Row) -> Timing | None:
    """The timing that is shown: the first one with samples; None when the row was not measured."""
    if isinstance(row.outcome, Measured):
        for timing in row.outcome.timings:
            if timing.has_samples:
                return timing
    return None


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
    known = _LOCATIONS.get(id(timing))
    if known is None or known[0]() is not timing:
        _locate([timing])
        known = _LOCATIONS[id(timing)]
    return known[1]


def locate_rows(rows: Iterable[Row]) -> None:
    """Locate the samples of all rows, so that `view_of` finds them; many together take half the time."""
    alike: dict[tuple[bytes, bytes], list[Timing]] = defaultdict(list)
    for timing in filter(None, map(first_timing, rows)):
        if id(timing) not in _LOCATIONS:
            alike[bytes(timing.columns.sizes), bytes(timing.columns.turns[0])].append(timing)
    for timings in alike.values():
        together = max(1, LOCATED_TOGETHER // len(timings[0].samples_ns))
        for first in range(0, len(timings), together):
            _locate(timings[first : first + together])


def _locate(timings: Sequence[Timing]) -> None:
    """Locate the samples of timings whose slots have equal sizes and sessions."""
    columns = timings[0].columns
    samples = np.array([timing.columns.samples_ns for timing in timings], np.float64)
    located = locate_slots(samples, np.asarray(columns.sizes, np.intp), np.asarray(columns.turns[0]))
    for timing, location in zip(timings, located, strict=True):
        # The dead reference is what `pop` answers with if there is nothing.
        _LOCATIONS[id(timing)] = weakref.ref(timing, partial(_LOCATIONS.pop, id(timing))), location


@dataclass(frozen=True, slots=True, kw_only=True)
class PairView:
    """Two measured rows compared: time of the candidate / time of the baseline, and which of them is faster.

    `ratio`: of their medians. `interval`: of the ratio, from their common rounds; None if fewer than five.
    `session_log_ratios`: ln(ratio) by session. `faster`: the side with the smaller time; None if undecided. `proven`:
    the interval lies beyond the margin of `compare`. Without such rounds `faster` is only probable: the times differ by
    more than sessions of identical code do. `too_few_rounds`: the common rounds are too few or too disturbed for a
    proof.
    """

    ratio: float
    interval: Interval | None
    session_log_ratios: tuple[float, ...]
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
    policy = Policy.for_device(device)
    estimated = _estimated(pairs, policy.sigma_aa or 0.0)
    # Rows are hashed by their samples, which takes longer.
    rows = {id(row): row for both in pairs for row in both}
    views = {key: measured_view(row) for key, row in rows.items()}
    sides = [(views[id(old)], views[id(new)]) for old, new in pairs]
    apart = [both for both, known in zip(sides, estimated, strict=True) if known.interval is None]
    faster = iter(_probably_faster(apart, policy))
    return [
        _of_rounds(known.estimate, known.interval, policy)
        if known.estimate is not None and known.interval is not None
        else _of_medians(*both, known.estimate, next(faster))
        for both, known in zip(sides, estimated, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Estimated:
    """The estimate from the common rounds of two rows; None without any. `throttled`: too many were slowed down."""

    estimate: Estimate | None = None
    throttled: bool = False

    @property
    def interval(self) -> Interval | None:
        """The interval of ln(ratio); None if the rounds are too few or too disturbed."""
        return None if self.estimate is None or self.throttled else self.estimate.interval


# As for `_LOCATIONS`: ranking, answer and findings compare the same rows.
_ESTIMATED: dict[tuple[int, int, float], tuple[weakref.ref[Timing], weakref.ref[Timing], _Estimated]] = {}


def _estimated(pairs: Sequence[tuple[Row, Row]], sigma_aa: float) -> list[_Estimated]:
    """The estimates from the common rounds of each (baseline, candidate), computed together for many pairs."""
    timings = [None if old is new else common_timings(old, new) for old, new in pairs]
    known = {(id(both[0]), id(both[1]), sigma_aa): both for both in timings if both is not None}
    unknown = [(key, both) for key, both in known.items() if not _is_known(key, both)]
    for first in range(0, len(unknown), ESTIMATED_TOGETHER):
        batch = unknown[first : first + ESTIMATED_TOGETHER]
        pairings = pair_many([both] for _, both in batch)
        in_common = [pairing.rounds for pairing in pairings if pairing.rounds is not None]
        times = [
            (location_of(old).median_ns, location_of(new).median_ns)
            for (_, (old, new)), pairing in zip(batch, pairings, strict=True)
            if pairing.rounds is not None
        ]
        estimates = iter(estimate_many(in_common, times, sigma_aa=sigma_aa, effect_size=False))
        for (key, both), pairing in zip(batch, pairings, strict=True):
            found = _Estimated(None if pairing.rounds is None else next(estimates), pairing.throttled)
            # As above; the other side's may be faster.
            old, new = (weakref.ref(timing, partial(_ESTIMATED.pop, key)) for timing in both)
            _ESTIMATED[key] = old, new, found
    return [_Estimated() if both is None else _ESTIMATED[id(both[0]), id(both[1]), sigma_aa][2] for both in timings]


def _is_known(key: tuple[int, int, float], both: tuple[Timing, Timing]) -> bool:
    known = _ESTIMATED.get(key)
    return known is not None and all(ref() is timing for ref, timing in zip(known[:2], both, strict=True))


def _of_rounds(estimate: Estimate, interval: Interval, policy: Policy) -> PairView:
    margin = log1p(policy.margin(estimate.typical_ns))
    faster: Side | None = "baseline" if interval.low > margin else "candidate" if interval.high < -margin else None
    return PairView(
        ratio=estimate.ratio,
        interval=interval.as_ratio(),
        session_log_ratios=estimate.session_log_ratios,
        faster=faster,
        proven=faster is not None,
        too_few_rounds=False,
    )


def _of_medians(baseline: RowView, candidate: RowView, estimate: Estimate | None, faster: Side | None) -> PairView:
    """Compare two rows with too few common rounds or none, which proves nothing."""
    ratio = candidate.median_ns / baseline.median_ns if estimate is None else estimate.ratio
    return PairView(
        ratio=ratio,
        interval=None,
        session_log_ratios=(log(ratio),) if estimate is None else estimate.session_log_ratios,
        faster=faster,
        proven=False,
        too_few_rounds=True,
    )


def _probably_faster(pairs: Sequence[tuple[RowView, RowView]], policy: Policy) -> list[Side | None]:
    """The faster side of each (baseline, candidate) by the rule for sessions at different times; None if undecided."""
    sides: dict[Code, Side] = {Code.SLOWER: "baseline", Code.FASTER: "candidate"}
    sessions = [StoredSessions(sessions_of([old.timing]), sessions_of([new.timing])) for old, new in pairs]
    estimates = estimate_stored(sessions, default=policy.spread)
    return [sides.get(decide(estimate, policy).code) for estimate in estimates]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Rows that compute the same function of the same inputs, compared.

    `baseline`: the row that speed-ups refer to. `speedups`: by case id, time of the baseline / time of the row.
    `unproven`: rows that are not proven slower than the fastest, whose median is the smallest. `tied`: unproven
    rows that are not probably slower either. `too_few_rounds`: all unproven rows shared too few
    rounds with the fastest.
    """

    fastest: Row
    baseline: Row
    speedups: dict[str, float]
    unproven: tuple[Row, ...]
    tied: tuple[Row, ...]
    too_few_rounds: bool

    @property
    def proven(self) -> bool:
        """Return True if every other row is proven to be slower by more than the margin."""
        return not self.unproven and len(self.speedups) > 1

    @property
    def probable(self) -> bool:
        """Return True if every other row is at least probably slower, and not all are proven to be."""
        return bool(self.unproven) and not self.tied


def rank(rows: Sequence[Row], device: str) -> Ranking | None:
    """The ranking of one group of rows; see `rankings`."""
    return rankings([rows], device)[0]


def rankings(groups: Sequence[Sequence[Row]], device: str) -> list[Ranking | None]:
    """Rank the quotable rows of each group; None if it has none. The statistics of all groups are computed together.

    Speed-ups refer to the plain method, else to the first row. A row of a plug-in is the baseline only if no row of
    dilabench's has a time to quote.
    """
    quotable = [[row for row in rows if is_quotable(row)] for rows in groups]
    ranked = [rows for rows in quotable if rows]
    fastest = [min(rows, key=lambda row: measured_view(row).median_ns) for rows in ranked]
    others = [[row for row in rows if row is not best] for rows, best in zip(ranked, fastest, strict=True)]
    found = map(_ranking, ranked, fastest, others, _views(fastest, others, device))
    return [next(found) if rows else None for rows in quotable]


def _views(baselines: Sequence[Row], groups: Sequence[Sequence[Row]], device: str) -> list[list[PairView]]:
    """The view of each row of each group against the group's baseline."""
    pairs = [(baseline, row) for baseline, rows in zip(baselines, groups, strict=True) for row in rows]
    views = iter(pair_views(pairs, device))
    return [list(islice(views, len(rows))) for rows in groups]


def _ranking(rows: Sequence[Row], fastest: Row, others: Sequence[Row], views: Sequence[PairView]) -> Ranking:
    compared = zip(others, views, strict=True)
    undecided = [(row, view) for row, view in compared if not view.proven or view.faster != "baseline"]
    baseline = min(rows, key=lambda row: (row.planned.source is not None, row.planned.role != "plain"))
    baseline_ns = measured_view(baseline).median_ns
    return Ranking(
        fastest=fastest,
        baseline=baseline,
        speedups={row.case.case_id: baseline_ns / measured_view(row).median_ns for row in rows},
        unproven=tuple(row for row, _ in undecided),
        tied=tuple(row for row, view in undecided if view.faster != "baseline"),
        too_few_rounds=bool(undecided) and all(view.too_few_rounds for _, view in undecided),
    )
