"""Paired analysis of rounds that interleave both sides (measurement.md §5.2).

In session k and round r both sides run one slot in random order. With L the slot location:

    y_kr = ln L(candidate) - ln L(baseline)     D_k = median_r y_kr     theta = mean_k D_k
    SE^2 = s^2(D) / K                  for K >= 3 sessions, with K - 1 degrees of freedom
    SE^2 = s^2(y) / R + sigma_AA^2     for K < 3, with s^2(y) pooled within sessions over R rounds

Drift, clocks and load that last longer than a round hit both sides alike and cancel in y. Remaining autocorrelation
between rounds makes R smaller (`_effective_rounds`). With few sessions the fastest sample of a slot is the sharpest
location, with three or more the lower quartile is.

The error for K < 3 is the error of a mean: on normal noise and without a noise floor its nominal 95 % cover 91 %, which
the margin makes up for. For K >= 3 the intervals cover what they say.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import exp, sqrt
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dilabench.errors import ConfigError
from dilabench.stats.samples.location import (
    SESSIONS_FOR_SPREAD,
    Counts,
    Floats,
    Interval,
    Slots,
    a12,
    checked_slots,
    flatten_slots,
    group_means,
    group_medians,
    group_quantiles,
    group_sums,
    joined_slots,
    t_quantile,
)

Session = Sequence[tuple[Sequence[float], Sequence[float]]]
SlotStatistic = Literal["auto", "min", "p25", "median"]

MIN_ROUNDS = 5
"""Fewest paired rounds for an interval if there are fewer than three sessions to show the spread between them."""

_LEVELS = {"p25": 0.25, "median": 0.5}


class PairedRounds:
    """One comparison: `rounds[session][round] = (baseline_samples_ns, candidate_samples_ns)`.

    Slots may hold different numbers of samples and sessions different numbers of rounds. `clocks_mhz` has the same
    nesting with one (baseline, candidate) clock per round, None if it was not read; None as a whole on a CPU.
    """

    __slots__ = ("clocks_mhz", "session_rounds", "slots")

    def __init__(
        self,
        rounds: Sequence[Session],
        clocks_mhz: Sequence[Sequence[tuple[float | None, float | None]]] | None = None,
    ) -> None:
        self.slots = flatten_slots([slot for session in rounds for turn in session for slot in turn])
        self.session_rounds = np.fromiter(map(len, rounds), np.intp, len(rounds))
        clocks = None if clocks_mhz is None else list(chain.from_iterable(clocks_mhz))
        self.clocks_mhz = None if clocks is None else np.array(clocks, np.float64).reshape(-1, 2)

    @classmethod
    def of_slots(cls, slots: Slots, session_rounds: Counts, clocks_mhz: Floats | None = None) -> "PairedRounds":
        """The rounds whose slots are laid out flat: the baseline's, then the candidate's of each round.

        `session_rounds`: rounds of each session, `[sessions]`. `clocks_mhz`: `[rounds, 2]`, NaN if it was not read.
        """
        pair = cls.__new__(cls)
        pair.slots, pair.session_rounds, pair.clocks_mhz = slots, session_rounds, clocks_mhz
        return pair

    @property
    def rounds(self) -> list[Session]:
        """The samples of each session and round."""
        ends = np.cumsum(self.slots.sizes)
        slots = iter([tuple(samples.tolist()) for samples in np.split(self.slots.samples_ns, ends[:-1])])
        return [[(next(slots), next(slots)) for _ in range(count)] for count in self.session_rounds]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """ln(candidate / baseline) with its error; positive means that the candidate is slower.

    The squared standard error is `reducible_variance / units + fixed_variance`: more units (independent rounds, or
    sessions) shrink the first term. More candidate samples do not shrink the second.

    log_ratio, se: natural-log units. df: degrees of freedom of the t interval; each further unit brings one more.
    interval: of `log_ratio`, None when the evidence is too thin for one. units, unit: how many independent repetitions
    the error rests on, and which kind. stored: sessions of the other side, measured at another time; 0: interleaved.
    session_log_ratios: one per session, `[sessions]`. baseline_ns, candidate_ns: typical slot location of each side.
    cycles_log_ratio, cycles_interval: the same in clock cycles, None when a slot's clock is unknown.
    advisory: too little history to fail a gate with. median_log_ratio: from the medians of the slots; None if stored.
    """

    log_ratio: float
    se: float
    df: float
    interval: Interval | None
    reducible_variance: float
    fixed_variance: float
    units: float
    unit: Literal["round", "session"]
    rounds: int
    sessions: int
    session_log_ratios: tuple[float, ...]
    baseline_ns: float
    candidate_ns: float
    a12: float | None
    stored: int = 0
    cycles_log_ratio: float | None = None
    cycles_interval: Interval | None = None
    advisory: bool = False
    median_log_ratio: float | None = None

    @property
    def ratio(self) -> float:
        """Candidate time / baseline time."""
        return exp(self.log_ratio)

    @property
    def typical_ns(self) -> float:
        """Geometric mean of both sides, so that exchanging them changes nothing."""
        return sqrt(self.baseline_ns * self.candidate_ns)

    def rounds_needed(self, half_width: float) -> int | None:
        """How many more rounds bring the interval's half width down to `half_width` (log units).

        None when none do within a hundred times the effort so far: the part of the error that rounds cannot shrink is
        too large already, or the true effect lies so close to the margin that no precision separates them.
        """
        if self.interval is None or half_width <= 0:
            return None
        level = (1 + self.interval.confidence) / 2
        units = self.units
        for _ in range(8):
            t = t_quantile(max(1.0, round(self.df + units - self.units, 3)), level)
            reducible = half_width**2 - t**2 * self.fixed_variance
            if reducible <= 0:
                return None
            needed = t**2 * self.reducible_variance / reducible
            if needed > 100 * self.units:
                return None
            units = (units + needed) / 2
        return max(1, round(self.rounds * (units / self.units - 1)))


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which rounds belong to which session and pair; all are stored in order."""

    sessions: Counts  # [pairs] sessions of each pair
    rounds: Counts  # [all sessions] rounds of each session
    pair_rounds: Counts  # [pairs] rounds of each pair


@dataclass(frozen=True, slots=True)
class _ErrorTerms:
    """Squared error = reducible / units + fixed, with `df` degrees of freedom."""

    df: float
    reducible: float
    fixed: float
    units: float

    @property
    def se(self) -> float:
        return float((self.reducible / self.units + self.fixed) ** 0.5)


@dataclass(frozen=True, slots=True)
class _Moments:
    """theta `[pairs]`, D `[all sessions]`, s^2(D) `[pairs]`, pooled s^2(y) `[pairs]`, effective rounds `[pairs]`."""

    theta: Floats
    session_medians: Floats
    between: Floats
    within: Floats
    effective_rounds: Floats

    def error_terms(self, pair: int, sessions: int, sigma_aa: float) -> _ErrorTerms:
        """The error of theta of one pair, from its sessions when they are enough, else from its rounds."""
        if sessions >= SESSIONS_FOR_SPREAD:
            return _ErrorTerms(sessions - 1.0, float(self.between[pair]), 0.0, float(sessions))
        units = float(self.effective_rounds[pair])
        # rounded, so that the quantiles of t are found in the cache
        return _ErrorTerms(max(1.0, round(units - sessions, 2)), float(self.within[pair]), sigma_aa**2, units)


def estimate(
    pair: PairedRounds, *, sigma_aa: float = 0.0, statistic: SlotStatistic = "auto", confidence: float = 0.95
) -> Estimate:
    """Estimate of one pair; see `estimate_many`."""
    return estimate_many([pair], sigma_aa=sigma_aa, statistic=statistic, confidence=confidence)[0]


def estimate_many(
    pairs: Sequence[PairedRounds],
    *,
    sigma_aa: float = 0.0,
    statistic: SlotStatistic = "auto",
    confidence: float = 0.95,
    effect_size: bool = True,
) -> list[Estimate]:
    """Estimates of all pairs, in order.

    sigma_aa: sd of D_k between sessions of identical code on this machine (log units), used below three sessions.
    statistic: slot location; "auto" is the fastest sample below three sessions, else the lower quartile.
    effect_size: compute A12, which sorts all samples.
    Raises ConfigError for a pair without rounds, a slot without samples or a time that is not positive.
    """
    if not pairs:
        return []
    layout = _layout(pairs)
    slots = checked_slots(joined_slots([pair.slots for pair in pairs]))
    levels = np.stack([_slot_levels(slots, layout, statistic), np.full(len(slots.sizes), _LEVELS["median"])])
    locations, medians = group_quantiles(slots.samples_ns, slots.sizes, levels).reshape(2, -1, 2)
    y, y_medians = (np.log(side[:, 1] / side[:, 0]) for side in (locations, medians))
    typical = [np.exp(group_medians(np.log(side), layout.pair_rounds)) for side in locations.T]
    effects = _effects(slots, layout) if effect_size else [None] * len(pairs)
    in_time = _paired_moments(y, layout)
    by_median = group_means(group_medians(y_medians, layout.rounds), layout.sessions)
    shift, clocks_known = _clock_shift(pairs, layout)
    in_cycles = _paired_moments(y + shift, layout) if clocks_known.any() else in_time

    first = np.cumsum(layout.sessions) - layout.sessions
    estimates = []
    for i in range(len(pairs)):
        k, pair_rounds = int(layout.sessions[i]), int(layout.pair_rounds[i])
        terms = in_time.error_terms(i, k, sigma_aa)
        thin = k < SESSIONS_FOR_SPREAD and pair_rounds < MIN_ROUNDS
        theta, theta_cycles = float(in_time.theta[i]), float(in_cycles.theta[i])
        cycles_terms, clocked = in_cycles.error_terms(i, k, sigma_aa), bool(clocks_known[i])
        estimates.append(
            Estimate(
                log_ratio=theta,
                se=terms.se,
                df=terms.df,
                interval=None if thin else _interval(theta, terms, confidence),
                reducible_variance=terms.reducible,
                fixed_variance=terms.fixed,
                units=terms.units,
                unit="session" if k >= SESSIONS_FOR_SPREAD else "round",
                rounds=pair_rounds,
                sessions=k,
                session_log_ratios=tuple(in_time.session_medians[first[i] : first[i] + k].tolist()),
                baseline_ns=float(typical[0][i]),
                candidate_ns=float(typical[1][i]),
                a12=effects[i],
                cycles_log_ratio=theta_cycles if clocked else None,
                cycles_interval=_interval(theta_cycles, cycles_terms, confidence) if clocked and not thin else None,
                median_log_ratio=float(by_median[i]),
            )
        )
    return estimates


def _interval(theta: float, terms: _ErrorTerms, confidence: float) -> Interval:
    reach = t_quantile(terms.df, (1 + confidence) / 2) * terms.se
    return Interval(theta - reach, theta + reach, confidence)


def _layout(pairs: Sequence[PairedRounds]) -> _Layout:
    sessions = np.fromiter((len(pair.session_rounds) for pair in pairs), np.intp, len(pairs))
    rounds = np.concatenate([pair.session_rounds for pair in pairs])
    if sessions.min() == 0 or rounds.min() == 0:
        raise ConfigError("a pair has a session without rounds; drop the session, or the pair when nothing is left")
    return _Layout(sessions, rounds, np.add.reduceat(rounds, np.cumsum(sessions) - sessions))


def _slot_levels(slots: Slots, layout: _Layout, statistic: SlotStatistic) -> Floats:
    """Level at which every slot is read.

    "min" reads both slots of a pair at the level of the smallest sample of the smaller one, 2 / (3 n + 1), so that more
    samples on one side are no advantage.
    """
    smaller = slots.sizes.reshape(-1, 2).min(axis=1)
    if statistic in _LEVELS:
        levels = np.full(len(smaller), _LEVELS[statistic])
    else:
        levels = 2 / (3.0 * smaller + 1)
        if statistic == "auto":
            enough = np.repeat(layout.sessions >= SESSIONS_FOR_SPREAD, layout.pair_rounds)
            levels = np.where(enough, _LEVELS["p25"], levels)
    return np.repeat(levels, 2)


def _clock_shift(pairs: Sequence[PairedRounds], layout: _Layout) -> tuple[Floats, NDArray[np.bool_]]:
    """ln(candidate clock / baseline clock) of every round, and of which pairs all clocks are known.

    Cycles are time x clock, so a log ratio in cycles is the log ratio in time plus this.
    """
    shift = np.zeros(int(layout.pair_rounds.sum()))
    known = np.zeros(len(pairs), np.bool_)
    ends = np.cumsum(layout.pair_rounds)
    for i, pair in enumerate(pairs):
        if pair.clocks_mhz is None:
            continue
        readings = pair.clocks_mhz
        if len(readings) != layout.pair_rounds[i]:
            rounds = layout.pair_rounds[i]
            raise ConfigError(f"{len(readings)} clock readings for {rounds} rounds; give one pair each, None if unread")
        if (readings > 0).all():
            shift[ends[i] - len(readings) : ends[i]] = np.log(readings[:, 1] / readings[:, 0])
            known[i] = True
    return shift, known


def _effects(slots: Slots, layout: _Layout) -> list[float]:
    """A12 of each pair over all samples of each side."""
    is_candidate = np.repeat(np.arange(len(slots.sizes)) % 2 == 1, slots.sizes)
    stops = np.cumsum(slots.sizes)[np.cumsum(2 * layout.pair_rounds) - 1].tolist()
    effects = []
    for start, stop in zip([0, *stops[:-1]], stops, strict=True):
        samples, chosen = slots.samples_ns[start:stop], is_candidate[start:stop]
        effects.append(a12(samples[~chosen], samples[chosen]))
    return effects


def _paired_moments(y: Floats, layout: _Layout) -> _Moments:
    """_Moments of the log ratios `y`, `[all rounds]`."""
    medians = group_medians(y, layout.rounds)
    theta = group_means(medians, layout.sessions)
    between = group_sums((medians - np.repeat(theta, layout.sessions)) ** 2, layout.sessions)
    residual = y - np.repeat(group_means(y, layout.rounds), layout.rounds)
    squares = group_sums(residual**2, layout.pair_rounds)
    return _Moments(
        theta=theta,
        session_medians=medians,
        between=between / np.maximum(1, layout.sessions - 1),
        within=squares / np.maximum(1, layout.pair_rounds - layout.sessions),
        effective_rounds=_effective_rounds(residual, squares, layout),
    )


def _effective_rounds(residual: Floats, squares: Floats, layout: _Layout) -> Floats:
    """R (1 - r1) / (1 + r1) where the lag-one correlation within sessions is significantly positive, else R."""
    session = np.repeat(np.arange(len(layout.rounds)), layout.rounds)
    products = np.zeros_like(residual)
    products[1:] = np.where(session[1:] == session[:-1], residual[1:] * residual[:-1], 0.0)
    lag_one = group_sums(products, layout.pair_rounds) / np.where(squares > 0, squares, 1.0)
    r1 = np.where(lag_one > 1.645 / np.sqrt(layout.pair_rounds), lag_one, 0.0)
    effective = layout.pair_rounds * (1 - r1) / (1 + r1)
    return np.asarray(np.minimum(np.maximum(2.0, effective), layout.pair_rounds))
