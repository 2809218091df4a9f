"""How time grows with length, and where one implementation overtakes another."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, isfinite, log

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dilabench.errors import ConfigError
from dilabench.stats.samples.location import Interval, checked_samples, t_quantile


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerLaw:
    """time_ns = coefficient_ns x length^exponent. `exponent_interval` is None with two times."""

    exponent: float
    exponent_interval: Interval | None
    coefficient_ns: float
    r_squared: float

    def predict_ns(self, length: float) -> float:
        """Time at `length`; outside the fitted lengths it is a projection and must be labelled so."""
        return self.coefficient_ns * exp(self.exponent * log(length))


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossover:
    """The length at which two implementations take the same time.

    length: None when one side wins at every length measured. low, high: interval of the length over sessions; None
    where it reaches beyond the lengths measured, both without `length` or with fewer than three sessions (then
    `confidence` is None too).
    """

    length: float | None
    low: float | None
    high: float | None
    confidence: float | None


def fit_power_law(lengths: ArrayLike, times_ns: ArrayLike, confidence: float = 0.95) -> PowerLaw:
    """Least squares on logarithms; a length may occur more than once (one time per session).

    Raises ConfigError with fewer than two distinct lengths or values that are not positive.
    """
    x, y = np.log(checked_samples(lengths)), np.log(checked_samples(times_ns))
    if len(x) != len(y) or np.ptp(x) == 0:
        raise ConfigError(f"{len(x)} lengths and {len(y)} times; a power law needs a time at two different lengths")
    centred = x - x.mean()
    exponent = float(centred @ y / (centred @ centred))
    intercept = float(y.mean() - exponent * x.mean())
    residual = y - intercept - exponent * x
    total = float(np.sum((y - y.mean()) ** 2))
    interval = None
    if len(x) > 2:
        se = float(np.sqrt(residual @ residual / (len(x) - 2) / (centred @ centred)))
        reach = t_quantile(len(x) - 2, (1 + confidence) / 2) * se
        interval = Interval(exponent - reach, exponent + reach, confidence)
    r_squared = 1 - float(residual @ residual) / total if total > 0 else 1.0
    return PowerLaw(exponent=exponent, exponent_interval=interval, coefficient_ns=exp(intercept), r_squared=r_squared)


def crossover(
    lengths: Sequence[int],
    session_log_ratios: ArrayLike,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Crossover:
    """Length at which the mean log ratio candidate / baseline changes sign, with a bootstrap interval over sessions.

    lengths: ascending, `[L]`. session_log_ratios: `[sessions, L]`, D_k of every length. The ratio is interpolated
    linearly in ln(length). With several sign changes the last one counts: beyond it one side wins for good. Sessions
    are resampled whole, since their lengths share a process, clocks and placement. Raises ConfigError when lengths do
    not ascend or the shapes differ.
    """
    x = np.log(checked_samples(lengths))
    ratios = np.atleast_2d(np.asarray(session_log_ratios, np.float64))
    if ratios.shape[1] != len(x) or len(x) < 2 or np.any(np.diff(x) <= 0):
        raise ConfigError(
            f"{len(x)} lengths against ratios {ratios.shape}; give ascending lengths, one column for each"
        )
    mean = ratios.mean(axis=0)
    k, baseline_wins_above = len(ratios), bool(mean[-1] > 0)
    place = float(_last_sign_change(x, mean[None], baseline_wins_above)[0])
    low = high = None
    known = isfinite(place)
    if known and k >= 3:
        draws = np.random.default_rng(seed).multinomial(k, np.full(k, 1 / k), size=resamples) / k
        places = np.sort(_last_sign_change(x, draws @ ratios, baseline_wins_above))
        cut = int((1 - confidence) / 2 * resamples)
        low, high = (exp(end) if isfinite(end) else None for end in (float(places[cut]), float(places[-1 - cut])))
    return Crossover(
        length=exp(place) if known else None,
        low=low,
        high=high,
        confidence=confidence if known and k >= 3 else None,
    )


def _last_sign_change(
    x: NDArray[np.float64], curves: NDArray[np.float64], baseline_wins_above: bool
) -> NDArray[np.float64]:
    """ln(length) of the last zero of each curve, `[curves]`.

    A curve without one lies beyond the lengths measured: the crossing is at -inf when the side that finally wins does
    so at every length, at +inf when it does at none.
    """
    before, after = curves[:, :-1], curves[:, 1:]
    crosses = (before > 0) != (after > 0)
    last = crosses.shape[1] - 1 - np.argmax(crosses[:, ::-1], axis=1)
    rows = np.arange(len(curves))
    y0, y1 = before[rows, last], after[rows, last]
    crosses_zero = crosses.any(axis=1)
    place = x[last] + (x[last + 1] - x[last]) * y0 / np.where(crosses_zero, y0 - y1, 1.0)
    already_won = (curves[:, -1] > 0) == baseline_wins_above
    return np.where(crosses_zero, place, np.where(already_won, -inf, inf))
