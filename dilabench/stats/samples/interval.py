"""A confidence interval and its confidence."""

from dataclasses import dataclass
from functools import lru_cache
from math import exp

from scipy.special import stdtrit


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
