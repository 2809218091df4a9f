"""From an estimate to a verdict (measurement.md §5.2), by a `Policy`: the user's margin, and a machine's resolution.

With m = ln(1 + delta): SLOWER if the interval is above m, FASTER if it is below -m, SAME if it is inside [-m, m] (two
one-sided tests: Schuirmann 1987), INCONCLUSIVE otherwise. If the clock of every slot is known, time and cycles must
agree. The p-value of a slow-down beyond the margin is P(T_df > (theta - m) / SE).

Many comparisons are corrected: uncorrected, 132 pairs give six false alarms at 5 %. Holm controls the chance of any
false claim. Slow-downs and speed-ups are two families, so that exchanging the sides mirrors every verdict.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, expm1, log1p, sqrt
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv, ndtri, stdtr

from dilabench.errors import ConfigError
from dilabench.machine import CUDA, device_named
from dilabench.stats.decisions.history import LOOK_SESSIONS
from dilabench.stats.decisions.paired import MIN_ROUNDS, Estimate, PairedRounds, SlotStatistic, estimate_many
from dilabench.stats.decisions.verdicts import Cause, Code, Numbers, Verdict
from dilabench.stats.samples.location import Interval, t_quantile
from dilabench.units import counted

MIN_CHANGE_NS = 2_000.0
"""Smallest absolute change in ns that is reported."""

MarginSource = Literal["user", "noise", "timer", "absolute"]


@dataclass(frozen=True, slots=True)
class Margin:
    """Relative change that a verdict must exceed, and the term that set it."""

    delta: float
    source: MarginSource

    @property
    def log(self) -> float:
        """The margin on the scale of log ratios: the region of no change is [-log, +log]."""
        return log1p(self.delta)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How to decide; one per device of a record.

    user_margin: relative change of interest, as a fraction. sigma_aa: sd between sessions of identical code in log
    units, None when `dilabench calibrate` has not run. timer_floor_ns: resolution or launch floor of the timer.
    min_change_ns: absolute change of interest. confidence: of the two-sided interval, so one-sided claims are made at
    (1 - confidence) / 2. look: number of this look at data that still grow, counted from one. Each look may err half
    as often as the one before; by Bonferroni's inequality all of them together err at most at 1 - confidence.
    power: of the minimum detectable effect. Raises ConfigError for a value out of range.
    """

    user_margin: float = CUDA.margin
    sigma_aa: float | None = None
    timer_floor_ns: float = 0.0
    min_change_ns: float = MIN_CHANGE_NS
    confidence: float = 0.95
    look: int = 1
    power: float = 0.80
    statistic: SlotStatistic = "auto"

    def __post_init__(self) -> None:
        for name in ("user_margin", "timer_floor_ns", "min_change_ns"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} {getattr(self, name)} must not be negative; use 0 to switch it off")
        if self.sigma_aa is not None and not self.sigma_aa >= 0:
            raise ConfigError(f"sigma_aa {self.sigma_aa} must not be negative; run `dilabench calibrate` again")
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
        timer_floor_ns: float = 0.0,
    ) -> "Policy":
        """The defaults of a device: "cpu", "cuda", "cuda:1", "mps"."""
        margin = device_named(device).margin if user_margin is None else user_margin
        return cls(user_margin=margin, sigma_aa=sigma_aa, timer_floor_ns=timer_floor_ns)

    def confidence_at(self, look: int) -> float:
        """Confidence of the two-sided interval at a look, counted from one: 95 %, 97.5 %, 98.75 % and so on."""
        return 1 - (1 - self.confidence) / 2.0 ** (look - 1)

    @property
    def alpha(self) -> float:
        """One-sided error rate of a claim at this look."""
        return (1 - self.confidence_at(self.look)) / 2

    def margin(self, typical_ns: float) -> Margin:
        """max(user, 2 sigma_AA, 2 timer floor / L, least change / L) for a pair whose slots take `typical_ns`.

        The absolute terms are part of the margin: SLOWER means that the whole interval exceeds them, SAME that any
        remaining change is too small to report.
        """
        terms: dict[MarginSource, float] = {
            "user": self.user_margin,
            "noise": 2 * (self.sigma_aa or 0.0),
            "timer": 2 * self.timer_floor_ns / typical_ns,
            "absolute": self.min_change_ns / typical_ns,
        }
        source = max(terms, key=lambda name: terms[name])
        return Margin(terms[source], source)


_MARGIN_SOURCE = {
    "user": "the threshold",
    "noise": "twice the noise floor of this machine",
    "timer": "twice the floor of the timer",
    "absolute": "the least change in absolute time",
}


def judge(pair: PairedRounds, policy: Policy) -> Verdict:
    """Verdict on one interleaved comparison, before any correction for multiple pairs."""
    return judge_many([pair], policy)[0]


def judge_many(pairs: Sequence[PairedRounds], policy: Policy, *, effect_size: bool = True) -> list[Verdict]:
    """Verdicts on many interleaved comparisons, in order; pass them to `control_family` before gating.

    Without `effect_size` they have no A12, which takes the longest where slots hold many samples.

    Raises ConfigError for a pair without rounds, a slot without samples or a time that is not positive.
    """
    estimates = estimate_many(
        pairs,
        sigma_aa=policy.sigma_aa or 0.0,
        statistic=policy.statistic,
        confidence=policy.confidence,
        effect_size=effect_size,
    )
    return [decide(estimate, policy) for estimate in estimates]


def position(estimate: Estimate, policy: Policy) -> tuple[Code, Cause, Margin]:
    """Where the interval lies: what `decide` decides by, without the figures of a verdict."""
    margin = policy.margin(estimate.typical_ns)
    if estimate.interval is None:
        cause = Cause.TOO_FEW_ROUNDS if estimate.unit == "round" else Cause.TOO_FEW_SESSIONS
        return Code.INCONCLUSIVE, cause, margin
    code = _position(estimate.interval, margin)
    in_cycles = estimate.cycles_interval
    if code is Code.INCONCLUSIVE:
        return code, Cause.IMPRECISE, margin
    if in_cycles is not None and _position(in_cycles, margin) is not code:
        return Code.INCONCLUSIVE, Cause.CLOCK, margin
    return code, Cause.PROVEN, margin


def decide(estimate: Estimate, policy: Policy) -> Verdict:
    """Verdict on one estimate, paired or from a history, before any correction for multiple pairs."""
    code, cause, margin = position(estimate, policy)
    numbers = _numbers(estimate, margin, policy)
    if cause is Cause.IMPRECISE and estimate.stored:
        if sessions_needed(estimate, margin.log, policy, at_best=True) is None:
            cause = Cause.OUT_OF_REACH
    elif cause is Cause.IMPRECISE:
        needed = estimate.rounds_needed(abs(abs(estimate.log_ratio) - margin.log))
        numbers = replace(numbers, rounds_needed=needed)
    elif cause is Cause.TOO_FEW_ROUNDS:
        numbers = replace(numbers, rounds_needed=_rounds_missing(estimate))
    return Verdict(
        code=code,
        cause=cause,
        numbers=numbers,
        threshold=margin.delta,
        threshold_source=margin.source,
        reason=_reason(code, cause, estimate, numbers, margin),
        hint=_hint(code, cause, estimate, numbers, policy),
        advisory=estimate.advisory,
    )


def sessions_needed(
    estimate: Estimate, margin: float, policy: Policy, *, both: bool = False, at_best: bool = False
) -> int | None:
    """Return the number of new sessions after which a case should be decided, or None if even the last look is too few.

    With probability `policy.power` that many decide unchanged code (a gate's usual case) and the estimated change, if
    it is the true one. margin: in log units. both: the same number on either side, for unchanged code. at_best: the
    number that decides the most favourable true change.
    """
    change = abs(estimate.log_ratio)
    gap = max(margin, change - margin)
    power, max_reach = (0.0, gap) if at_best else (policy.power, gap if both else abs(change - margin))
    for look, k in enumerate(LOOK_SESSIONS, start=1):
        df = 2 * k - 2 if both else estimate.stored + k - 2
        fixed = estimate.reducible_variance / k if both else estimate.fixed_variance
        se = (estimate.reducible_variance / k + fixed) ** 0.5
        reach = t_quantile(df, (1 + policy.confidence_at(look)) / 2)
        if (reach + t_quantile(df, (1 + power) / 2)) * se < gap and reach * se < max_reach:
            return k
    return None


def _position(interval: Interval, margin: Margin) -> Code:
    if interval.low > margin.log:
        return Code.SLOWER
    if interval.high < -margin.log:
        return Code.FASTER
    if -margin.log < interval.low and interval.high < margin.log:
        return Code.SAME
    return Code.INCONCLUSIVE


def _numbers(estimate: Estimate, margin: Margin, policy: Policy) -> Numbers:
    interval = estimate.interval
    known = interval is not None
    mde = needed = both_needed = None
    if interval is not None:
        reach = t_quantile(estimate.df, (1 + interval.confidence) / 2) + t_quantile(estimate.df, policy.power)
        mde = expm1(margin.log + reach * estimate.se)
        if estimate.stored:
            needed = sessions_needed(estimate, margin.log, policy)
            both_needed = sessions_needed(estimate, margin.log, policy, both=True)
    ratio_interval = interval.as_ratio() if interval is not None else None
    return Numbers(
        ratio=estimate.ratio,
        ratio_low=ratio_interval.low if ratio_interval else None,
        ratio_high=ratio_interval.high if ratio_interval else None,
        confidence=ratio_interval.confidence if ratio_interval else None,
        log_ratio=estimate.log_ratio,
        se=estimate.se if known else None,
        df=estimate.df if known else None,
        p_slower=_p_beyond(estimate.log_ratio - margin.log, estimate) if known else None,
        p_faster=_p_beyond(-estimate.log_ratio - margin.log, estimate) if known else None,
        mde=mde,
        a12=estimate.a12,
        sessions=estimate.sessions,
        rounds=estimate.rounds,
        sessions_needed=needed,
        both_needed=both_needed,
        cycles_ratio=None if estimate.cycles_log_ratio is None else expm1(estimate.cycles_log_ratio) + 1,
    )


def _p_beyond(excess: float, estimate: Estimate) -> float:
    """P(T_df > excess / SE); without any spread the excess decides alone."""
    if estimate.se > 0:
        return float(stdtr(estimate.df, -excess / estimate.se))
    return 0.0 if excess > 0 else 1.0


def _percent(fraction: float) -> str:
    """A signless fraction as per cent with the digits that matter: 0.0312 -> "3.12 %", 0.25 -> "25 %"."""
    return f"{100 * fraction:.3g} %" if fraction < 0.1 else f"{100 * fraction:.0f} %"


def _rounds_missing(estimate: Estimate) -> int:
    """Return how many more rounds the first interval needs."""
    return max(1, MIN_ROUNDS - estimate.rounds)


def _reason(code: Code, cause: Cause, estimate: Estimate, numbers: Numbers, margin: Margin) -> str:
    """One sentence that holds the figures the verdict rests on."""
    if cause is Cause.TOO_FEW_ROUNDS:
        return f"{counted(estimate.rounds, 'round')}; {MIN_ROUNDS} are the least that give an interval"
    if cause is Cause.TOO_FEW_SESSIONS:
        apart = _percent(abs(numbers.ratio - 1))
        return f"{apart} difference, but one session on each side does not show the spread between sessions"
    within = f"the margin of {_percent(margin.delta)} ({_MARGIN_SOURCE[margin.source]})"
    interval = f"{numbers.ratio:.4g}x the baseline's time, {numbers.ratio_low:.4g} to {numbers.ratio_high:.4g}"
    assert numbers.confidence is not None
    interval += f" ({100 * numbers.confidence:.4g} %)"
    if cause is Cause.CLOCK:
        assert estimate.cycles_log_ratio is not None
        in_cycles = expm1(estimate.cycles_log_ratio) + 1
        return f"{interval}; but {in_cycles:.4g}x its clock cycles: the clock changed between the sides"
    where = {
        Code.SLOWER: "wholly above",
        Code.FASTER: "wholly below",
        Code.SAME: "wholly within",
        Code.INCONCLUSIVE: "not clear of",
    }[code]
    return f"{interval}: {where} {within}"


def _hint(code: Code, cause: Cause, estimate: Estimate, numbers: Numbers, policy: Policy) -> str:
    """Return the reader's next step; empty if there is none."""
    hints: list[str] = []
    if cause is Cause.TOO_FEW_ROUNDS:
        hints.append(f"measure {_effort(_rounds_missing(estimate), estimate)}")
    elif cause is Cause.TOO_FEW_SESSIONS:
        hints.append("add runs to the baseline (`dilabench baseline save NAME RUN --add`), five at least for a gate")
    elif cause is Cause.CLOCK:
        hints.append("lock the clock or let the device cool down, then measure again (`dilabench doctor`)")
    elif cause in (Cause.IMPRECISE, Cause.OUT_OF_REACH):
        hints.append(_more_sessions(estimate, numbers) if estimate.stored else _more_effort(estimate, numbers))
    elif code in (Code.SLOWER, Code.FASTER) and not estimate.advisory:
        hints.append("measure again in fresh sessions; only the second data decide")
    elif code is Code.SAME and numbers.mde is not None:
        hints.append(f"a slow-down of {_percent(numbers.mde)} would have been found four times in five")
    if estimate.advisory:
        hints.append("advisory only: five stored sessions are the least a gate rests on")
    if policy.sigma_aa is None and cause is not Cause.TOO_FEW_ROUNDS and estimate.unit == "round":
        hints.append("the noise between sessions is unknown: run `dilabench calibrate`, or measure three sessions")
    return "; ".join(hints)


def _more_effort(estimate: Estimate, numbers: Numbers) -> str:
    if numbers.rounds_needed is not None:
        return f"about {_effort(numbers.rounds_needed, estimate)} would decide"
    if estimate.fixed_variance > 0:
        return "more rounds will not decide, the noise between sessions is too large: measure three sessions or more"
    return "the effect is too close to the margin for any reasonable number of rounds: choose another margin"


def _more_sessions(estimate: Estimate, numbers: Numbers) -> str:
    spread = _percent(sqrt(estimate.reducible_variance))
    if numbers.sessions_needed is not None:
        needed = max(numbers.sessions_needed, 2 * estimate.sessions)
        return f"sessions differ by {spread}: {needed} new ones should decide"
    if numbers.both_needed is not None:
        what = f"{numbers.both_needed} on either side should decide (`baseline save --add`)"
        return f"sessions differ by {spread}, too much for the baseline's {estimate.stored}: {what}"
    return f"sessions differ by {spread}, too much for this margin: choose a wider one (`--threshold`)"


def _effort(rounds: int, estimate: Estimate) -> str:
    """Return further rounds as text; as sessions if the error is the spread between sessions."""
    count = rounds if estimate.unit == "round" else ceil(rounds * estimate.sessions / estimate.rounds)
    return f"one more {estimate.unit}" if count == 1 else f"{count} more {estimate.unit}s"


def holm(p_values: ArrayLike) -> NDArray[np.float64]:
    """Holm's step-down adjusted p-values, in the given order. Raises ConfigError for a p outside [0, 1]."""
    p = np.asarray(p_values, np.float64)
    if not np.all((p >= 0) & (p <= 1)):
        raise ConfigError(f"p-values must be in [0, 1], got {p[~((p >= 0) & (p <= 1))][0]}; pass raw p-values")
    order, m = np.argsort(p, kind="stable"), len(p)
    adjusted = np.empty(m)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * (m - np.arange(m))))
    return adjusted


def control_family(verdicts: Sequence[Verdict], *, alpha: float = 0.025) -> list[Verdict]:
    """The verdicts with adjusted p-values; a SLOWER or FASTER that does not survive becomes INCONCLUSIVE.

    `alpha` is one-sided and by default fits intervals of 95 %, so that one pair alone is judged as its interval says.
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
        if claimed is None or p <= alpha or verdict.code not in (Code.SLOWER, Code.FASTER):
            controlled.append(replace(verdict, numbers=numbers))
            continue
        # More rounds until p falls below its limit, by the normal law: the score grows with the root of rounds.
        score, limit = ndtri(claimed), ndtri(alpha / len(verdicts))
        needed = max(1, ceil(numbers.rounds * ((limit / score) ** 2 - 1)))
        controlled.append(
            replace(
                verdict,
                code=Code.INCONCLUSIVE,
                cause=Cause.MULTIPLICITY,
                numbers=replace(numbers, rounds_needed=needed),
                reason=f"{verdict.reason}; among {len(verdicts)} pairs that may be chance (adjusted p = {p:.2g})",
                hint=f"about {needed} more rounds (better in further sessions) or fewer pairs would decide",
            )
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


def binomial_interval(hits: int, trials: int, confidence: float = 0.95) -> Interval:
    """Exact interval of a proportion (Clopper and Pearson, 1934). Raises ConfigError unless 0 <= hits <= trials."""
    if not 0 <= hits <= trials or trials == 0:
        raise ConfigError(
            f"{hits} hits of {trials} trials; hits must be between 0 and the number of trials, which must be positive"
        )
    tail = (1 - confidence) / 2
    low = float(betaincinv(hits, trials - hits + 1, tail)) if hits > 0 else 0.0
    high = float(betaincinv(hits + 1, trials - hits, 1 - tail)) if hits < trials else 1.0
    return Interval(low, high, confidence)


def detection_rate(verdicts: Sequence[Verdict], code: Code = Code.SLOWER) -> DetectionRate:
    """Rate of one code among verdicts on repeated measurements: a false-alarm rate on A/A, else a power."""
    hits = sum(verdict.code is code for verdict in verdicts)
    return DetectionRate(code, hits, len(verdicts), binomial_interval(hits, len(verdicts)))
