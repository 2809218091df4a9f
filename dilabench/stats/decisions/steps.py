"""Level shifts in a history: the piecewise constant series that best explains it (L1 Potts).

Minimises  sum |y_i - level(i)| + penalty x (number of segments)  over all segmentations with segments of at least
`min_size` points, by dynamic programming (Friedrich, Kempe, Liebscher and Winkler, "Complexity penalized M-estimation",
2008). Absolute deviations ignore single outliers. A separation gate then removes steps that are too small to matter.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import exp, inf, log

import numpy as np
from numpy.typing import NDArray

from dilabench.stats.samples.location import checked_samples

MOST_LEVELS = 1024
# Points of a level, and of the shortest history that may have a step.
MIN_SIZE = 2
FEWEST_POINTS = 2 * MIN_SIZE


@dataclass(frozen=True, slots=True)
class Segment:
    """Points `start` (inclusive) to `stop` (exclusive) of the history, with their median."""

    start: int
    stop: int
    median_ns: float


@dataclass(frozen=True, slots=True)
class Step:
    """The level (the median of its points) changed at point `index`."""

    index: int
    before_ns: float
    after_ns: float

    @property
    def ratio(self) -> float:
        """The level after / the level before."""
        return self.after_ns / self.before_ns


def segments(history_ns: Sequence[float], *, min_size: int = MIN_SIZE, min_change: float = 0.02) -> list[Segment]:
    """Segments of constant level of a history of times, oldest first; one segment when nothing changed.

    min_size: fewest points of a level. min_change: smallest relative change that is a step; neighbouring levels must
    also differ by more than twice the larger spread (1.4826 MAD) of the two. Works on logarithms, so that scaling the
    history changes nothing. The time grows with the points: some 0.1 s for 5,000.
    """
    y = np.log(checked_samples(history_ns))
    if len(y) < 2 * min_size:
        return [Segment(0, len(y), exp(float(np.median(y))))]
    starts = _separated(y, _potts(y, _penalty(y), min_size), log(1 + min_change))
    stops = [*starts[1:], len(y)]
    return [Segment(a, b, exp(float(np.median(y[a:b])))) for a, b in zip(starts, stops, strict=True)]


def steps(history_ns: Sequence[float], *, min_size: int = MIN_SIZE, min_change: float = 0.02) -> list[Step]:
    """The points at which the level of a history changed, and by how much; see `segments`."""
    levels = segments(history_ns, min_size=min_size, min_change=min_change)
    return [Step(after.start, before.median_ns, after.median_ns) for before, after in pairwise(levels)]


def _penalty(y: NDArray[np.float64]) -> float:
    """Two parameters per segment (level and place), each log n / 2 of log-likelihood at Laplace scale b, doubled.

    b comes from differences of neighbours, which steps barely touch: median |difference| = 0.954 sd and b = 0.80 sd
    for normal noise. Quantised histories may have a zero median difference; their mean difference stands in.
    """
    differences = np.abs(np.diff(y))
    scale = 0.84 * float(np.median(differences)) or float(np.mean(differences)) / 2
    return max(2 * scale * log(len(y)), 1e-12)


def _potts(y: NDArray[np.float64], penalty: float, min_size: int) -> list[int]:
    """Starts of the best segments.

    A segment's level is a median, so one of the values. For each, the least cost of a series whose last segment has
    that level is carried from point to point (Storath, Weinmann and Unser, "Jump-penalized least absolute values
    estimation of scalar or circle-valued signals", 2017). More than `MOST_LEVELS` values are represented by quantiles.
    """
    levels = np.unique(y)
    if len(levels) > MOST_LEVELS:
        levels = np.unique(np.quantile(y, np.linspace(0, 1, MOST_LEVELS), method="nearest"))
    distances: deque[NDArray[np.float64]] = deque(maxlen=min_size)
    cost = np.full(len(levels), inf)
    start = np.zeros(len(levels), np.intp)
    best, origin = [-penalty], [0]
    for stop, value in enumerate(y.tolist(), 1):
        distances.append(np.abs(levels - value))
        cost += distances[-1]
        if stop >= min_size:
            begun = best[stop - min_size] + penalty + sum(distances)
            start[begun <= cost] = stop - min_size
            np.minimum(cost, begun, out=cost)
        least = int(cost.argmin())
        best.append(float(cost[least]))
        origin.append(int(start[least]))
    starts, stop = [], len(y)
    while stop > 0:
        stop = origin[stop]
        starts.append(stop)
    return starts[::-1]


def _separated(y: NDArray[np.float64], starts: list[int], min_change: float) -> list[int]:
    """Merge the least separated neighbours until all that are left pass the gate."""
    parts = np.split(y, starts[1:])
    levels = list(map(_level, parts))
    while len(parts) > 1:
        excess = [
            abs(after - before) - max(min_change, 2 * max(spread, other))
            for (before, spread), (after, other) in pairwise(levels)
        ]
        weakest = int(np.argmin(excess))
        if excess[weakest] >= 0:
            break
        parts[weakest : weakest + 2] = [np.concatenate(parts[weakest : weakest + 2])]
        levels[weakest : weakest + 2] = [_level(parts[weakest])]
    return list(accumulate(map(len, parts[:-1]), initial=0))


def _level(part: NDArray[np.float64]) -> tuple[float, float]:
    """Median and spread (1.4826 MAD) of a segment."""
    median = float(np.median(part))
    return median, 1.4826 * float(np.median(np.abs(part - median)))
