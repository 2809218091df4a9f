"""How many independent samples is a correlated series worth?"""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def autocorrelation(series: ArrayLike, max_lag: int) -> NDArray[np.float64]:
    """Autocorrelation at lags 0..max_lag, `[max_lag + 1]`, with the biased (positive definite) normalisation.

    A constant series has correlation 1 at lag 0 and 0 elsewhere.
    """
    values = np.asarray(series, np.float64)
    centred = values - values.mean()
    n = len(centred)
    lags = min(max_lag, n - 1)
    products = np.array([centred[: n - lag] @ centred[lag:] for lag in range(lags + 1)])
    correlation = np.zeros(max_lag + 1)
    correlation[0] = 1.0
    if products[0] > 0:
        correlation[: lags + 1] = products / products[0]
    return correlation


def effective_size(series: ArrayLike) -> float:
    """n / (1 + 2 sum of autocorrelations), in [1, n]: never more than the samples there are.

    The sum stops by Geyer's initial positive sequence: pairs of neighbouring lags are added while their sum is
    positive ("Practical Markov chain Monte Carlo", 1992).
    """
    values = np.asarray(series, np.float64)
    n = len(values)
    if n < 3:
        return float(n)
    correlation = autocorrelation(values, n - 1)
    pairs = correlation[: 2 * (n // 2)].reshape(-1, 2).sum(axis=1)
    ends = np.flatnonzero(pairs <= 0)
    kept = pairs[: ends[0]] if ends.size else pairs
    return float(min(n, max(1.0, n / max(1.0, 2 * kept.sum() - 1))))
