"""New sessions against stored ones: a prediction interval (measurement.md §5.2).

Without interleaving, the spread between sessions is the error, and only the history shows it. With m_H and s_H of the
H baseline sessions, a mean of K new sessions of the same code is expected in

    m_H +- t(.975, H - 1) s_H sqrt(1/K + 1/H)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dilabench.errors import ConfigError
from dilabench.stats.samples.estimate import Estimate, Interval, t_quantile
from dilabench.stats.samples.location import a12
from dilabench.stats.samples.slots import Floats, flatten_slots, group_medians, group_quantiles

SESSIONS_FOR_GATE = 5
"""Fewer stored sessions than this are advisory: shown, never failing a gate."""

Slots = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class StoredSessions:
    """One comparison: the sessions of each side, each a list of slots of samples in ns."""

    baseline: Sequence[Slots]
    candidate: Sequence[Slots]


def estimate_from_history(
    baseline_sessions: Sequence[Slots],
    candidate_sessions: Sequence[Slots],
    *,
    level: float = 0.25,
    confidence: float = 0.95,
) -> Estimate:
    """Estimate of one pair; see `estimate_stored`."""
    return estimate_stored([StoredSessions(baseline_sessions, candidate_sessions)], level=level, confidence=confidence)[
        0
    ]


def estimate_stored(
    pairs: Sequence[StoredSessions], *, level: float = 0.25, confidence: float = 0.95
) -> list[Estimate]:
    """Estimates of ln(candidate / baseline) from records that were not measured together, in order.

    A session's location is the median of its slots' quantiles at `level`, the lower quartile unless told otherwise.
    With one baseline session there is no interval; below `SESSIONS_FOR_GATE` the estimate is advisory. Raises
    ConfigError when a side, a session or a slot is empty.
    """
    sides = [side for pair in pairs for side in (pair.baseline, pair.candidate)]
    logs = iter(_session_logs(sides, level))
    return [_estimate(pair, next(logs), next(logs), confidence) for pair in pairs]


def _estimate(pair: StoredSessions, baseline: Floats, candidate: Floats, confidence: float) -> Estimate:
    h, k = len(baseline), len(candidate)
    centre = float(np.mean(baseline))
    log_ratios = candidate - centre
    log_ratio = float(np.mean(log_ratios))
    variance = float(np.var(baseline, ddof=1)) if h > 1 else 0.0
    se, df = (variance * (1 / k + 1 / h)) ** 0.5, max(1.0, h - 1.0)
    reach = t_quantile(df, (1 + confidence) / 2) * se
    return Estimate(
        log_ratio=log_ratio,
        se=se,
        df=df,
        df_per_unit=0.0,
        interval=Interval(log_ratio - reach, log_ratio + reach, confidence) if h > 1 else None,
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
        advisory=h < SESSIONS_FOR_GATE,
    )


def _session_logs(sides: Sequence[Sequence[Slots]], level: float) -> list[Floats]:
    """Logarithms of the sessions' locations, one vector per side. All sides are worked on in one go."""
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
