"""The median of samples that were taken in blocks, with an interval that allows for that.

The samples of one turn share the moment they were taken in, and so do the turns of one process: a hundred samples in
twenty turns say little more than twenty do. The median is that of all samples; its error is taken from how the share of
samples below it varies from block to block. Blocks are turns; from three sessions on, sessions (as in `paired`).
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from math import sqrt

import numpy as np

from dilabench.stats.samples.autocorrelation import effective_size
from dilabench.stats.samples.estimate import Interval, t_quantile
from dilabench.stats.samples.location import Location, locate, quantile
from dilabench.stats.samples.moments import SESSIONS_FOR_SPREAD
from dilabench.stats.samples.slots import Floats

Session = Sequence[Sequence[float]]


def locate_sessions(sessions: Sequence[Session], confidence: float = 0.95) -> Location:
    """Summary of one case's samples, `sessions[session][turn] = samples_ns`, every turn with at least one.

    As `location.locate` gives it, with the interval of `_interval`. Raises ConfigError for no or impossible samples.
    """
    turns = list(chain.from_iterable(sessions))
    samples = list(chain.from_iterable(turns))
    pooled = locate(samples, confidence)
    if pooled.interval is None:
        return pooled
    by_session = len(sessions) >= SESSIONS_FOR_SPREAD
    counts = [sum(map(len, one)) for one in sessions] if by_session else [len(one) for one in turns]
    sizes, values = np.array(counts, np.float64), np.asarray(samples, np.float64)
    starts = np.cumsum([0, *counts[:-1]])
    below, upto = (
        np.add.reduceat(side(values, pooled.median_ns).astype(np.intp), starts) / sizes
        for side in (np.less, np.less_equal)
    )
    shares = (below + upto) / 2
    units = float(len(sizes)) if by_session else effective_size(shares)
    return replace(pooled, interval=_interval(np.sort(values), sizes, shares, units, confidence))


def _interval(ordered: Floats, sizes: Floats, shares: Floats, units: float, confidence: float) -> Interval:
    """Quantiles at the levels 1/2 ± t SE (Woodruff, "Confidence intervals for medians and other position measures",
    1952) of all n samples in ascending order, from B blocks that are worth `units` independent ones.

    With `shares` p_b of the m_b samples of a block below the median (those equal to it count half), and m the mean of
    m_b (`sizes`):

        SE^2 = sum_b (m_b / m)^2 (p_b - 1/2)^2 / (B - 1) / units,    at least 1 / (4 n) as for independent samples

    with units - 1 degrees of freedom. Where that reaches past the samples, the interval is their whole range, which
    covers the median of independent blocks with probability 1 - 2^(1 - units).
    """
    whole = Interval(float(ordered[0]), float(ordered[-1]), 1 - 2 ** (1 - units))
    if len(shares) < 2:
        return whole
    deviations = sizes / sizes.mean() * (shares - 0.5)
    variance = float(deviations @ deviations) / (len(shares) - 1) / units
    # rounded, so that the quantiles of t are found in the cache
    df = max(1.0, round(units - 1, 2))
    reach = t_quantile(df, (1 + confidence) / 2) * sqrt(max(variance, 0.25 / len(ordered)))
    if reach >= 0.5:
        return whole
    return Interval(quantile(ordered, 0.5 - reach), quantile(ordered, 0.5 + reach), confidence)
