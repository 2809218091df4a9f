"""What this machine's noise does to verdicts: the floor between sessions, and how often a change is found."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betaincinv

from dilabench.errors import ConfigError
from dilabench.stats.decisions.verdicts import Code, Verdict
from dilabench.stats.samples.estimate import Interval


def noise_floor(session_log_ratios: ArrayLike) -> float:
    """sigma_AA: root mean square of the session log ratios D_k of identical code, in log units.

    The true ratio is one, so the mean is not estimated and a bias of the harness counts as noise. Raises ConfigError
    without any session.
    """
    values = np.asarray(session_log_ratios, np.float64)
    if values.size == 0:
        raise ConfigError("no A/A session to take the noise floor from; run `dilabench calibrate`")
    return float(np.sqrt(np.mean(values**2)))


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
        raise ConfigError(f"{hits} hits of {trials} trials; hits must lie between 0 and the trials, which must exist")
    tail = (1 - confidence) / 2
    low = float(betaincinv(hits, trials - hits + 1, tail)) if hits > 0 else 0.0
    high = float(betaincinv(hits + 1, trials - hits, 1 - tail)) if hits < trials else 1.0
    return Interval(low, high, confidence)


def detection_rate(verdicts: Sequence[Verdict], code: Code = Code.SLOWER) -> DetectionRate:
    """Rate of one code among verdicts on repeated measurements: a false-alarm rate on A/A, else a power."""
    hits = sum(verdict.code is code for verdict in verdicts)
    return DetectionRate(code, hits, len(verdicts), binomial_interval(hits, len(verdicts)))
