"""From an estimate to a verdict (measurement.md §5.2).

With m = ln(1 + delta): SLOWER when the interval lies above m, FASTER when it lies below -m, SAME when it lies inside
[-m, m] (two one-sided tests: Schuirmann 1987), INCONCLUSIVE otherwise. Where the clock of every slot is known, time and
cycles must agree. The p-value of a slow-down beyond the margin is P(T_df > (theta - m) / SE).
"""

from collections.abc import Sequence
from dataclasses import replace
from math import expm1

from scipy.special import stdtr

from dilabench.stats.decisions import explain
from dilabench.stats.decisions.history import sessions_needed
from dilabench.stats.decisions.paired import PairedRounds, estimate_many
from dilabench.stats.decisions.policy import Margin, Policy
from dilabench.stats.decisions.verdicts import Cause, Code, Numbers, Verdict
from dilabench.stats.samples.estimate import Estimate, Interval, t_quantile


def judge(pair: PairedRounds, policy: Policy) -> Verdict:
    """Verdict on one interleaved comparison, before any correction for multiple pairs."""
    return judge_many([pair], policy)[0]


def judge_many(pairs: Sequence[PairedRounds], policy: Policy) -> list[Verdict]:
    """Verdicts on many interleaved comparisons, in order; pass them to `multiplicity.control_family` before gating.

    Raises ConfigError for a pair without rounds, a slot without samples or a time that is not positive.
    """
    estimates = estimate_many(
        pairs, sigma_aa=policy.sigma_aa or 0.0, statistic=policy.statistic, confidence=policy.confidence
    )
    return [decide(estimate, policy) for estimate in estimates]


def decide(estimate: Estimate, policy: Policy) -> Verdict:
    """Verdict on one estimate, paired or from a history, before any correction for multiple pairs."""
    margin = policy.margin(estimate.typical_ns)
    if estimate.interval is None:
        code, cause = Code.INCONCLUSIVE, Cause.TOO_FEW_ROUNDS if estimate.unit == "round" else Cause.TOO_FEW_SESSIONS
    else:
        code = _position(estimate.interval, margin)
        cause = Cause.IMPRECISE if code is Code.INCONCLUSIVE else Cause.PROVEN
        in_cycles = estimate.cycles_interval
        if code is not Code.INCONCLUSIVE and in_cycles is not None and _position(in_cycles, margin) is not code:
            code, cause = Code.INCONCLUSIVE, Cause.CLOCK
    numbers = _numbers(estimate, margin, policy)
    if cause is Cause.IMPRECISE and estimate.stored:
        if sessions_needed(estimate, margin.log, policy, at_best=True) is None:
            cause = Cause.OUT_OF_REACH
    elif cause is Cause.IMPRECISE:
        needed = estimate.rounds_needed(abs(abs(estimate.log_ratio) - margin.log))
        numbers = replace(numbers, rounds_needed=needed)
    elif cause is Cause.TOO_FEW_ROUNDS:
        numbers = replace(numbers, rounds_needed=explain.rounds_missing(estimate))
    return Verdict(
        code=code,
        cause=cause,
        numbers=numbers,
        threshold=margin.delta,
        threshold_source=margin.source,
        reason=explain.reason(code, cause, estimate, numbers, margin),
        hint=explain.hint(code, cause, estimate, numbers, policy),
        advisory=estimate.advisory,
    )


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
