"""New sessions against stored ones, which were measured at another time.

Without interleaving the spread between sessions is the error. Code that did not change spreads alike on both sides, so
it is pooled over the H stored and K new sessions, as in Student's two-sample test:

    s^2 = (sum (b_h - b)^2 + sum (c_k - c)^2) / (H + K - 2)        c - b +- t(., H + K - 2) s sqrt(1/K + 1/H)

Growing data are judged again each time they have doubled (`LOOK_SESSIONS`). Every look has its own confidence level
(`Policy.confidence_at`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from dilabench.errors import ConfigError
from dilabench.stats.decisions.paired import Estimate
from dilabench.stats.samples.location import (
    Floats,
    Interval,
    a12,
    flatten_slots,
    group_medians,
    group_quantiles,
    t_quantile,
)

SESSIONS_FOR_GATE = 5
"""Fewer stored sessions than this are advisory: shown, never failing a gate."""

LOOK_SESSIONS = (3, 6, 12, 24, 48, 96, 192, 384)
"""New sessions at each look. One disturbed session of three widens the interval more than it moves the mean."""

Slots = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class StoredSessions:
    """One comparison: the sessions of each side, each a list of slots of samples in ns."""

    baseline: Sequence[Slots]
    candidate: Sequence[Slots]


def estimate_stored(
    pairs: Sequence[StoredSessions], *, level: float = 0.25, confidence: float = 0.95
) -> list[Estimate]:
    """Estimates of ln(candidate / baseline) from records that were not measured together, in order.

    A session's location is the median of its slots' quantiles at `level`, by default the lower quartile.
    Two sessions alone give no interval; below `SESSIONS_FOR_GATE` stored ones the estimate is advisory. Raises
    ConfigError when a side, a session or a slot is empty.
    """
    sides = [side for pair in pairs for side in (pair.baseline, pair.candidate)]
    logs = iter(_session_logs(sides, level))
    return [_estimate(pair, next(logs), next(logs), confidence) for pair in pairs]


def noise_floor(session_log_ratios: ArrayLike) -> float:
    """sigma_AA: root mean square of the session log ratios D_k of identical code, in log units.

    The true ratio is one, so the mean is not estimated and a bias of the harness counts as noise. Raises ConfigError
    without any session.
    """
    values = np.asarray(session_log_ratios, np.float64)
    if values.size == 0:
        raise ConfigError("no A/A session to take the noise floor from; run `dilabench calibrate`")
    return float(np.sqrt(np.mean(values**2)))


def _estimate(pair: StoredSessions, baseline: Floats, candidate: Floats, confidence: float) -> Estimate:
    h, k = len(baseline), len(candidate)
    centre = float(np.mean(baseline))
    log_ratios = candidate - centre
    log_ratio, df = float(np.mean(log_ratios)), max(1, h + k - 2)
    variance = (h * float(np.var(baseline)) + k * float(np.var(candidate))) / df
    se = (variance * (1 / k + 1 / h)) ** 0.5
    reach = t_quantile(df, (1 + confidence) / 2) * se
    return Estimate(
        log_ratio=log_ratio,
        se=se,
        df=df,
        interval=Interval(log_ratio - reach, log_ratio + reach, confidence) if h + k > 2 else None,
        reducible_variance=variance,
        fixed_variance=variance / h,
        units=float(k),
        unit="session",
        rounds=sum(map(len, pair.candidate)),
        sessions=k,
        session_log_ratios=tuple(log_ratios.tolist()),
        baseline_ns=float(np.exp(centre)),
        candidate_ns=float(np.exp(np.mean(candidate))),
        a12=a12(_pooled(pair.baseline), _pooled(pair.candidate)),
        stored=h,
        advisory=h < SESSIONS_FOR_GATE,
    )


def _session_logs(sides: Sequence[Sequence[Slots]], level: float) -> list[Floats]:
    """Logarithms of the sessions' locations, one vector per side. All sides are computed together."""
    if not all(side and all(map(len, side)) for side in sides):
        raise ConfigError("a side has no session, or a session no slots; compare only cases that were measured")
    if not sides:
        return []
    sessions = [session for side in sides for session in side]
    slots = flatten_slots([slot for session in sessions for slot in session])
    locations = group_quantiles(slots.samples_ns, slots.sizes, np.full(len(slots.sizes), level))
    medians = group_medians(np.log(locations), np.fromiter(map(len, sessions), np.intp, len(sessions)))
    return np.split(medians, np.cumsum([len(side) for side in sides])[:-1])


def _pooled(sessions: Sequence[Slots]) -> list[float]:
    return [sample for session in sessions for slot in session for sample in slot]
