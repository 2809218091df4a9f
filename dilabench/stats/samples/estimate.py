"""A confidence interval, and an estimated log ratio candidate / baseline, whatever experiment it came from."""

from dataclasses import dataclass
from functools import lru_cache
from math import exp, sqrt
from typing import Literal

from scipy.special import stdtrit

MIN_ROUNDS = 5
"""Fewest paired rounds for an interval when fewer than three sessions tell the spread between sessions."""

SESSIONS_FOR_SPREAD = 3
"""From this many sessions on, their own spread is the error."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Closed interval. `confidence`: attained by order statistics, which cannot choose it freely; nominal otherwise."""

    low: float
    high: float
    confidence: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def as_ratio(self) -> "Interval":
        """The interval of a ratio, from the interval of its logarithm."""
        return Interval(exp(self.low), exp(self.high), self.confidence)


@lru_cache(maxsize=4096)
def t_quantile(df: float, level: float) -> float:
    """Quantile of Student's t with `df` degrees of freedom (not necessarily whole) at `level` in (0, 1)."""
    return float(stdtrit(df, level))


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """ln(candidate / baseline) with its error; positive means that the candidate is slower.

    The squared standard error is `reducible_variance / units + fixed_variance`: more units (independent rounds, or
    sessions) shrink the first term, nothing that the candidate's side can do shrinks the second.

    log_ratio, se: natural-log units. df: degrees of freedom of the t interval; each further unit brings one more.
    interval: of `log_ratio`, None when the evidence is too thin for one. units, unit: how many independent repetitions
    the error rests on, and which kind. stored: sessions of the other side, measured at another time; 0: in turns.
    session_log_ratios: one per session, `[sessions]`. baseline_ns, candidate_ns: typical slot location of each side.
    cycles_log_ratio, cycles_interval: the same in clock cycles, None when a slot's clock is unknown.
    advisory: too little history to fail a gate with.
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
    a12: float
    stored: int = 0
    cycles_log_ratio: float | None = None
    cycles_interval: Interval | None = None
    advisory: bool = False

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
