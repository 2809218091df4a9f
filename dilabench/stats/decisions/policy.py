"""What counts as a change: the user's margin, and what this machine and timer can resolve at all."""

from dataclasses import dataclass
from math import log1p
from typing import Literal

from dilabench.errors import ConfigError
from dilabench.machine import CUDA, device_named
from dilabench.stats.decisions.paired import SlotStatistic

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
    (1 - confidence) / 2. look: how often data that still grow have been judged, this time included; each look may err
    half as often as the one before, so that all of them err at most at 1 - confidence, by Bonferroni's inequality.
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
                raise ConfigError(f"{name} {getattr(self, name)} must lie in [0.5, 1), for example 0.95")

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

        The absolute terms are part of the margin, so SLOWER means that the whole interval lies beyond them, and SAME
        that no change worth telling is left.
        """
        terms: dict[MarginSource, float] = {
            "user": self.user_margin,
            "noise": 2 * (self.sigma_aa or 0.0),
            "timer": 2 * self.timer_floor_ns / typical_ns,
            "absolute": self.min_change_ns / typical_ns,
        }
        source = max(terms, key=lambda name: terms[name])
        return Margin(terms[source], source)
