"""The stop rule: measure until the interval is narrow.

Stopping when a difference becomes significant more than doubles false alarms (measurement.md §5.1); the width of an
interval does not look at the other side and cannot.
"""

from math import sqrt

import numpy as np
from numpy.typing import ArrayLike

from dilabench.stats.samples.location import checked_samples, effective_size, median_interval


def relative_half_width(locations_ns: ArrayLike, confidence: float = 0.95) -> float | None:
    """Half the width of the median's interval over the median, from one location per round in the order taken.

    The order-statistic interval is widened by sqrt(n / effective n), since neighbouring rounds are alike. None below
    `MIN_SAMPLES` rounds.
    """
    values = checked_samples(locations_ns)
    interval = median_interval(values, confidence)
    if interval is None:
        return None
    return interval.half_width / float(np.median(values)) * sqrt(values.size / effective_size(values))
