"""From an estimate to a verdict (measurement.md §5.4), by a `Policy`: the user's margin, and a machine's spread.

With m = ln(1 + delta): SLOWER if a slow-down beyond m is proven, FASTER if a speed-up beyond -m is, with one false
claim in 200 comparisons. Otherwise SAME ("no change above x % seen") if the interval lies within the resolution,
UNDECIDED if it reaches further. The p-value of a slow-down beyond the margin is P(T_df > (theta - m) / SE).

A stored session that may be 4 % off cannot show that nothing changed by 10 %. Sessions at different times therefore
have a coarser resolution, too: within it they are SAME if the interval reaches into the margin, and more sessions
narrow it.

Many comparisons are corrected: uncorrected, 132 pairs give six false alarms at 5 %. Holm controls the chance of any
false claim. Slow-downs and speed-ups are two families, so that exchanging the sides mirrors every verdict.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, expm1, inf, isinf, log1p, pi

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv, stdtr

from dilabench.errors import ConfigError
from dilabench.machine import CUDA, device_named
from dilabench.stats.decisions.paired import MIN_ROUNDS, Estimate, PairedRounds, estimate_many, median_variance
from dilabench.stats.decisions.verdicts import Cause, Code, Numbers, Verdict
from dilabench.stats.samples.location import CONFIDENCE, Interval, t_quantile
from dilabench.units import change_text, counted, percent_text

MIN_CHANGE_NS = 2_000.0
"""Smallest absolute change in ns that is reported."""

RESOLUTION = 0.10
"""Without a threshold of the user's, "no change above x % seen" is an answer up to this x."""

STORED_RESOLUTION = 0.25
"""The same against stored sessions, if the interval reaches into the margin: a slow-down that one of them shows."""

MOST_SESSIONS = 50
"""A difference that needs more sessions than this is not decided by more of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How to decide; one per device of a record.

    user_margin: relative change of interest, as a fraction. resolution, stored_resolution: SAME is claimed if all
    larger changes are excluded. spread: default sd between sessions of identical code, in log units. sigma_sessions:
    the measured one, and sigma_aa that of the ratio of interleaved rounds, None when `dilabench calibrate` has not run.
    min_change_ns: absolute change of interest. confidence: of the two-sided interval. error_rate: of all claims of one
    direction together. look: number of this look at data that still grow, counted from one. Each look may err half as
    often as the one before (Bonferroni's inequality). power: of the minimum detectable effect.
    Raises ConfigError for a value out of range.
    """

    user_margin: float = CUDA.margin
    resolution: float = RESOLUTION
    stored_resolution: float = STORED_RESOLUTION
    spread: float = CUDA.session_spread
    sigma_aa: float | None = None
    sigma_sessions: float | None = None
    min_change_ns: float = MIN_CHANGE_NS
    confidence: float = 0.95
    error_rate: float = 1 / 200
    look: int = 1
    power: float = 0.80

    def __post_init__(self) -> None:
        for name in ("user_margin", "resolution", "stored_resolution", "spread", "min_change_ns"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} {getattr(self, name)} must not be negative; use 0 to switch it off")
        for name in ("sigma_aa", "sigma_sessions"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"{name} {value} must not be negative; run `dilabench calibrate` again")
        for name in ("confidence", "power"):
            if not 0.5 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)} must be in [0.5, 1), for example 0.95")

    @classmethod
    def for_device(
        cls,
        device: str,
        *,
        user_margin: float | None = None,
        sigma_aa: float | None = None,
        sigma_sessions: float | None = None,
    ) -> "Policy":
        """The defaults of a device: "cpu", "cuda", "cuda:1", "mps"."""
        facts = device_named(device)
        return cls(
            user_margin=facts.margin if user_margin is None else user_margin,
            resolution=RESOLUTION if user_margin is None else user_margin,
            stored_resolution=STORED_RESOLUTION if user_margin is None else user_margin,
            spread=facts.session_spread,
            sigma_aa=sigma_aa,
            sigma_sessions=sigma_sessions,
        )

    def confidence_at(self, look: int) -> float:
        """Confidence of the two-sided interval at a look, counted from one: 95 %, 97.5 %, 98.75 % and so on."""
        return 1 - (1 - self.confidence) / 2.0 ** (look - 1)

    @property
    def alpha(self) -> float:
        """One-sided error rate of all claims of a direction at this look."""
        return self.error_rate / 2.0 ** (self.look - 1)

    def margin(self, typical_ns: float) -> float:
        """The relative change that a claim must exceed, for a pair that takes `typical_ns`.

        The absolute term is part of it: SLOWER means that the change exceeds it.
        """
        return max(self.user_margin, self.min_change_ns / typical_ns)


def judge_many(
    pairs: Sequence[PairedRounds],
    policy: Policy,
    times_ns: Sequence[tuple[float, float]] | None = None,
) -> list[Verdict]:
    """Verdicts on many interleaved comparisons, in order; pass them to `control_family` before gating.

    `times_ns`: as of `estimate_many`.

    Raises ConfigError for a pair without rounds, a slot without samples or a time that is not positive.
    """
    estimates = estimate_many(pairs, times_ns, sigma_aa=policy.sigma_aa or 0.0, confidence=policy.confidence)
    return [decide(estimate, policy) for estimate in estimates]


def decide(estimate: Estimate, policy: Policy) -> Verdict:
    """Verdict on one estimate, paired or from a history, before any correction for multiple pairs."""
    margin = policy.margin(estimate.typical_ns)
    numbers = _numbers(estimate, margin, policy)
    code, cause = _unclaimed(numbers, margin, policy)
    if numbers.p_slower is not None and numbers.p_slower <= policy.alpha:
        code, cause = Code.SLOWER, Cause.PROVEN
    elif numbers.p_faster is not None and numbers.p_faster <= policy.alpha:
        code, cause = Code.FASTER, Cause.PROVEN
    if cause is Cause.IMPRECISE:
        resolution = policy.stored_resolution if code is Code.UNDECIDED and numbers.stored else policy.resolution
        numbers = _with_sessions_needed(numbers, estimate, margin, max(resolution, margin), policy)
    return _verdict(code, cause, numbers, margin)


def _unclaimed(numbers: Numbers, margin: float, policy: Policy) -> tuple[Code, Cause]:
    """The code and cause of a pair of which no change is claimed."""
    if numbers.unchanged_within is None:
        return Code.UNDECIDED, Cause.TOO_FEW_ROUNDS
    if numbers.unchanged_within <= max(policy.resolution, margin):
        return Code.SAME, Cause.PROVEN
    if numbers.stored and numbers.unchanged_within <= policy.stored_resolution and _reaches(numbers, margin):
        return Code.SAME, Cause.IMPRECISE
    return Code.UNDECIDED, Cause.IMPRECISE


def _reaches(numbers: Numbers, margin: float) -> bool:
    """Return True if the interval of the ratio holds a change within the margin."""
    low, high = numbers.ratio_low, numbers.ratio_high
    return low is not None and high is not None and low <= 1 + margin and high >= 1 / (1 + margin)


def _verdict(code: Code, cause: Cause, numbers: Numbers, margin: float) -> Verdict:
    return Verdict(
        code=code,
        cause=cause,
        numbers=numbers,
        threshold=margin,
        reason=f"{_finding(code, numbers)}; {evidence([numbers])}",
        hint="" if code is Code.SAME else _hint(cause, numbers),
    )


def _numbers(estimate: Estimate, margin: float, policy: Policy) -> Numbers:
    interval, theta = estimate.interval, estimate.log_ratio
    known = interval is not None
    mde = within = low = high = None
    if interval is not None:
        reach = t_quantile(estimate.df, 1 - policy.alpha) + t_quantile(estimate.df, policy.power)
        mde = expm1(log1p(margin) + reach * estimate.se)
        ratio = interval.as_ratio()
        low, high = ratio.low, ratio.high
        within = max(high - 1, 1 - low)
    return Numbers(
        ratio=estimate.ratio,
        ratio_low=low,
        ratio_high=high,
        confidence=interval.confidence if interval is not None else None,
        unchanged_within=within,
        log_ratio=theta,
        se=estimate.se if known else None,
        df=estimate.df if known and not isinf(estimate.df) else None,
        p_slower=_p_beyond(theta - log1p(margin), estimate) if known else None,
        p_faster=_p_beyond(-theta - log1p(margin), estimate) if known else None,
        mde=mde,
        a12=estimate.a12,
        sessions=estimate.sessions,
        stored=estimate.stored,
        rounds=estimate.rounds,
        spread=estimate.spread,
        spread_source=estimate.spread_source,
    )


def _p_beyond(excess: float, estimate: Estimate) -> float:
    """P(T_df > excess / SE); without any spread the excess decides alone."""
    if estimate.se > 0:
        return float(stdtr(estimate.df, -excess / estimate.se))
    return 0.0 if excess > 0 else 1.0


def _with_sessions_needed(
    numbers: Numbers, estimate: Estimate, margin: float, resolution: float, policy: Policy
) -> Numbers:
    """The numbers with the sessions that should decide: with probability `power`, given this spread and this change."""
    theta, df, limit = abs(estimate.log_ratio), estimate.df, log1p(resolution)
    reach = t_quantile(df, (1 + policy.confidence) / 2)
    # Standard errors at which unchanged code lies within the resolution, and this change beyond the margin.
    unchanged = min((limit - theta) / reach, limit / (reach + t_quantile(df, (1 + policy.power) / 2)))
    changed = (theta - log1p(margin)) / (t_quantile(df, 1 - policy.alpha) + t_quantile(df, policy.power))
    squared = max(0.0, unchanged, changed) ** 2
    if estimate.spread is None:
        needed, both = _sessions(estimate.sessions * estimate.se**2, squared), None
    else:
        variance = pi / 2 * estimate.spread**2
        left = squared - estimate.spread**2 * median_variance(estimate.stored)
        needed, both = _sessions(variance, left), _sessions(2 * variance, squared)
    return replace(numbers, sessions_needed=needed, both_needed=both)


def _sessions(variance: float, squared_error: float) -> int | None:
    """Sessions after which a variance of one session falls to the squared error; three at least, None if too many."""
    needed = variance / squared_error if squared_error > 0 else inf
    return max(3, ceil(needed)) if needed <= MOST_SESSIONS else None


def _finding(code: Code, numbers: Numbers) -> str:
    if code in (Code.SLOWER, Code.FASTER):
        return change_text(numbers.ratio)
    if numbers.unchanged_within is None:
        return f"{counted(numbers.rounds, 'round')} in common; {MIN_ROUNDS} are the least that give an interval"
    seen = percent_text(numbers.unchanged_within)
    if code is Code.SAME:
        return f"no change above {seen} seen"
    reach = f"a change of up to {seen}" if numbers.unchanged_within <= 1 else "a change of more than 100 %"
    return f"{change_text(numbers.ratio)}, and {reach} is not excluded"


SPREAD_TEXTS = {
    "calibrated": "measured by `dilabench calibrate` to spread by",
    "sessions": "measured here to spread by",
    "slots": "whose own times spread by",
    "assumed": "assumed to spread by",
}


def evidence(numbers: Sequence[Numbers]) -> str:
    """The evidence of verdicts: 'one session each, assumed to spread by 2 %'; equal parts are said once."""
    spreads: dict[str, list[float]] = {}
    for number in numbers:
        if number.spread is None:
            spreads.setdefault(f"{counted(number.sessions, 'session')} with both in the same rounds", [])
        else:
            count = "one session" if number.sessions == 1 else f"{number.sessions} sessions"
            sides = "each" if number.sessions == number.stored else f"against {number.stored}"
            text = f"{count} {sides}, {SPREAD_TEXTS[number.spread_source]}"
            spreads.setdefault(text, []).append(number.spread)
    return "; ".join(" ".join([text, *_range(values)]) for text, values in spreads.items())


def _range(values: Sequence[float]) -> list[str]:
    """'2 %', or '2 % to 7 %'."""
    ends = dict.fromkeys(map(percent_text, (min(values), max(values)))) if values else {}
    return [" to ".join(ends)] if ends else []


def _hint(cause: Cause, numbers: Numbers) -> str:
    """The measurement that would decide; empty if it is decided."""
    if cause is Cause.TOO_FEW_ROUNDS:
        return f"measure {counted(MIN_ROUNDS - numbers.rounds, 'more round')}"
    if cause is not Cause.IMPRECISE:
        return ""
    if numbers.sessions_needed is not None:
        return f"{counted(numbers.sessions_needed, 'session')} should decide"
    if numbers.both_needed is not None:
        return f"{counted(numbers.both_needed, 'session')} on either side should decide"
    return f"more than {MOST_SESSIONS} sessions would be needed: a quieter machine, or another `--threshold`, decides"


def holm(p_values: ArrayLike) -> NDArray[np.float64]:
    """Holm's step-down adjusted p-values, in the given order. Raises ConfigError for a p outside [0, 1]."""
    p = np.asarray(p_values, np.float64)
    if not np.all((p >= 0) & (p <= 1)):
        raise ConfigError(f"p-values must be in [0, 1], got {p[~((p >= 0) & (p <= 1))][0]}; pass raw p-values")
    order, m = np.argsort(p, kind="stable"), len(p)
    adjusted = np.empty(m)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * (m - np.arange(m))))
    return adjusted


def control_family(verdicts: Sequence[Verdict], policy: Policy) -> list[Verdict]:
    """The verdicts with adjusted p-values; a SLOWER or FASTER that does not survive is SAME or UNDECIDED.

    A pair without p-value counts as p = 1. SAME needs no correction: it makes no claim of a change.
    """
    slower = holm([_or_one(verdict.numbers.p_slower) for verdict in verdicts])
    faster = holm([_or_one(verdict.numbers.p_faster) for verdict in verdicts])
    controlled = []
    for verdict, p_slower, p_faster in zip(verdicts, slower.tolist(), faster.tolist(), strict=True):
        faster_claimed = verdict.code is Code.FASTER
        claimed = verdict.numbers.p_faster if faster_claimed else verdict.numbers.p_slower
        p = p_faster if faster_claimed else p_slower
        numbers = replace(verdict.numbers, p_adjusted=None if claimed is None else p)
        if claimed is None or p <= policy.alpha or not verdict.flagged:
            controlled.append(replace(verdict, numbers=numbers))
            continue
        code, cause = _unclaimed(numbers, verdict.threshold, policy)
        if code is Code.UNDECIDED:
            # As many again more than halve p.
            cause, needed = Cause.MULTIPLICITY, 2 * numbers.sessions
            numbers = replace(numbers, sessions_needed=needed, both_needed=needed if numbers.stored else None)
        withdrawn = _verdict(code, cause, numbers, verdict.threshold)
        chance = f"among {len(verdicts)} pairs that may be chance (adjusted p = {p:.2g})"
        controlled.append(
            replace(withdrawn, reason=f"{withdrawn.reason}; {chance}") if code is Code.UNDECIDED else withdrawn
        )
    return controlled


def _or_one(p: float | None) -> float:
    return 1.0 if p is None else p


@dataclass(frozen=True, slots=True)
class DetectionRate:
    """How often `code` was the verdict, with the exact (Clopper-Pearson) interval of the rate."""

    code: Code
    hits: int
    trials: int
    interval: Interval

    @property
    def rate(self) -> float:
        return self.hits / self.trials


def binomial_interval(hits: int, trials: int) -> Interval:
    """Exact 95 % interval of a proportion (Clopper and Pearson, 1934).

    Raises ConfigError unless 0 <= hits <= trials.
    """
    if not 0 <= hits <= trials or trials == 0:
        raise ConfigError(
            f"{hits} hits of {trials} trials; hits must be between 0 and the number of trials, which must be positive"
        )
    tail = (1 - CONFIDENCE) / 2
    low = float(betaincinv(hits, trials - hits + 1, tail)) if hits > 0 else 0.0
    high = float(betaincinv(hits + 1, trials - hits, 1 - tail)) if hits < trials else 1.0
    return Interval(low, high, CONFIDENCE)


def detection_rate(verdicts: Sequence[Verdict], code: Code = Code.SLOWER) -> DetectionRate:
    """Rate of one code among verdicts on repeated measurements: a false-alarm rate on A/A, else a power."""
    hits = sum(verdict.code is code for verdict in verdicts)
    return DetectionRate(code, hits, len(verdicts), binomial_interval(hits, len(verdicts)))
