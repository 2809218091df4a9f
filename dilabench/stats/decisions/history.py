"""Two sides that were measured at different times (measurement.md §5.4).

The time of a side is the median of all its samples. Without interleaving the spread between sessions is the error: with
its standard deviation s in log units, n sessions of the baseline and m of the candidate,

    SE^2 = s^2 (1/n + 1/m) + within^2,     within^2 = sum over the sides of (spread of slot medians)^2 / slots

where 1/n is pi / 2n from three sessions on, because a median varies so much more than a mean. s is what `dilabench
calibrate` measured on this machine, else the pooled spread of the sessions at hand if they leave `DF_FOR_SPREAD`
degrees of freedom (three sessions on either side, or one and five), else the default of the device. A calibrated or
default spread is widened to the spread of slots within a session, and to that of the sessions at hand.

Growing data are judged again each time they have doubled (`LOOK_SESSIONS`). Every look has its own confidence level
(`Policy.confidence_at`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log

import numpy as np
from numpy.typing import ArrayLike

from dilabench.errors import ConfigError
from dilabench.stats.decisions.paired import Estimate, interval_around, median_variance
from dilabench.stats.decisions.verdicts import SpreadSource
from dilabench.stats.samples.location import (
    Counts,
    Floats,
    Slots,
    a12,
    checked_slots,
    group_counts,
    group_medians,
    group_quantiles,
    joined_slots,
)

LOOK_SESSIONS = (3, 6, 12, 24, 48, 96, 192, 384)
"""New sessions at each look. One disturbed session of three widens the interval more than it moves the median."""

DF_FOR_SPREAD = 4
"""Degrees of freedom from which the spread of the sessions at hand replaces the assumed one."""

QUARTILES_OF_NORMAL = 1.349
"""Distance of the quartiles of a normal distribution, in standard deviations."""


@dataclass(frozen=True, slots=True)
class Sessions:
    """The slots of one case, session after session: session i has the next `counts[i]` of them."""

    slots: Slots
    counts: Counts


@dataclass(frozen=True, slots=True)
class StoredSessions:
    """One comparison: the sessions of each side."""

    baseline: Sessions
    candidate: Sessions


@dataclass(frozen=True, slots=True)
class _Side:
    """One side: its median in ns, ln of the medians of its sessions, the spread of slots, and how many there are."""

    median_ns: float
    session_logs: Floats
    slot_spread: float
    slots: int

    @property
    def squares(self) -> float:
        """Sum of the squared deviations of its sessions."""
        return len(self.session_logs) * float(np.var(self.session_logs))


def estimate_stored(
    pairs: Sequence[StoredSessions], *, default: float, calibrated: float | None = None, confidence: float = 0.95
) -> list[Estimate]:
    """Estimates of ln(candidate / baseline) from records that were not measured together, in order.

    default, calibrated: spread between sessions of identical code, in log units. Many pairs together take a fraction of
    the time. Raises ConfigError when a side, a session or a slot is empty.
    """
    sides = iter(_sides([side for pair in pairs for side in (pair.baseline, pair.candidate)]))
    return [_estimate(pair, next(sides), next(sides), default, calibrated, confidence) for pair in pairs]


def noise_floor(session_log_ratios: ArrayLike) -> float:
    """sigma_AA: root mean square of the session log ratios D_k of identical code, in log units.

    The true ratio is one, so the mean is not estimated and a bias of the harness counts as noise. Raises ConfigError
    without any session.
    """
    values = np.asarray(session_log_ratios, np.float64)
    if values.size == 0:
        raise ConfigError("no A/A session to take the noise floor from; run `dilabench calibrate`")
    return float(np.sqrt(np.mean(values**2)))


def spread_of(sessions: Sessions) -> float:
    """The spread between sessions of one case: sd of ln of their medians. Raises ConfigError for fewer than two."""
    if len(sessions.counts) < 2:
        raise ConfigError("one session does not show the spread between sessions; measure two or more")
    return float((_sides([sessions])[0].squares / (len(sessions.counts) - 1)) ** 0.5)


def _estimate(
    pair: StoredSessions,
    baseline: _Side,
    candidate: _Side,
    default: float,
    calibrated: float | None,
    confidence: float,
) -> Estimate:
    spread, df, source = _spread(baseline, candidate, default, calibrated)
    n, m = len(baseline.session_logs), len(candidate.session_logs)
    within = sum(side.slot_spread**2 / side.slots for side in (baseline, candidate))
    log_ratio = log(candidate.median_ns / baseline.median_ns)
    se = (spread**2 * (median_variance(n) + median_variance(m)) + within) ** 0.5
    return Estimate(
        log_ratio=log_ratio,
        se=se,
        df=df,
        interval=interval_around(log_ratio, se, df, confidence),
        rounds=candidate.slots,
        sessions=m,
        session_log_ratios=tuple((candidate.session_logs - log(baseline.median_ns)).tolist()),
        baseline_ns=baseline.median_ns,
        candidate_ns=candidate.median_ns,
        a12=a12(pair.baseline.slots.samples_ns, pair.candidate.slots.samples_ns),
        stored=n,
        spread=spread,
        spread_source=source,
    )


def _spread(
    baseline: _Side, candidate: _Side, default: float, calibrated: float | None
) -> tuple[float, float, SpreadSource]:
    """The spread between sessions, its degrees of freedom (infinite: taken as known), and what it comes from."""
    df = len(baseline.session_logs) + len(candidate.session_logs) - 2
    at_hand = ((baseline.squares + candidate.squares) / df) ** 0.5 if df else 0.0
    if calibrated is None and df >= DF_FOR_SPREAD:
        return at_hand, float(df), "sessions"
    known: tuple[float, SpreadSource] = (default, "assumed") if calibrated is None else (calibrated, "calibrated")
    spread, source = max(known, (at_hand, "sessions"), (max(baseline.slot_spread, candidate.slot_spread), "slots"))
    return spread, inf, source


def _sides(sides: Sequence[Sessions]) -> list[_Side]:
    if not sides:
        return []
    if not all(len(side.counts) and side.counts.all() for side in sides):
        raise ConfigError("a side has no session, or a session no slots; compare only cases that were measured")
    slots = checked_slots(joined_slots([side.slots for side in sides]))
    # The slots of each session, the sessions of each side, and the slots of each side.
    session_slots = np.concatenate([side.counts for side in sides])
    sessions = np.fromiter((len(side.counts) for side in sides), np.intp, len(sides))
    side_slots = group_counts(session_slots, sessions)
    logs = np.log(group_medians(slots.samples_ns, group_counts(slots.sizes, session_slots)))
    deviations = np.log(group_medians(slots.samples_ns, slots.sizes)) - np.repeat(logs, session_slots)
    low, high = group_quantiles(deviations, side_slots, np.repeat([[0.25], [0.75]], len(sides), axis=1))
    spreads = (high - low) / QUARTILES_OF_NORMAL
    return [
        _Side(float(np.median(side.slots.samples_ns)), side_logs, spread, count)
        for side, side_logs, spread, count in zip(
            sides, np.split(logs, np.cumsum(sessions)[:-1]), spreads.tolist(), side_slots.tolist(), strict=True
        )
    ]
