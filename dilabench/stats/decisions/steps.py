"""Level shifts in a history: the piecewise constant series that best explains it (L1 Potts).

Minimises  sum |y_i - level(i)| + penalty x (number of segments)  over all segmentations with segments of at least
`min_size` points, by dynamic programming (Friedrich, Kempe, Liebscher and Winkler, "Complexity penalized M-estimation",
2008). Absolute deviations ignore single outliers. A separation gate then removes steps that are too small to matter.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, inf, log

import numpy as np
from numpy.typing import NDArray

from dilabench.stats.samples.location import checked_samples


@dataclass(frozen=True, slots=True)
class Segment:
    """Points `start` (inclusive) to `stop` (exclusive) of the history, with their median."""

    start: int
    stop: int
    median_ns: float


@dataclass(frozen=True, slots=True)
class Step:
    """The level changed at point `index`; `ratio` is level after / level before."""

    index: int
    ratio: float


def segments(history_ns: Sequence[float], *, min_size: int = 2, min_change: float = 0.02) -> list[Segment]:
    """Segments of constant level of a history of times, oldest first; one segment when nothing changed.

    min_size: fewest points of a level. min_change: smallest relative change that is a step; besides, neighbouring
    levels must lie further apart than twice the larger spread (1.4826 MAD) of the two. Works on logarithms, so that
    scaling the history changes nothing. O(n^2 log n): half a second for 500 points.
    """
    y = np.log(checked_samples(history_ns))
    if len(y) < 2 * min_size:
        return [Segment(0, len(y), exp(float(np.median(y))))]
    starts = _separated(y, _potts(y, _penalty(y), min_size), log(1 + min_change))
    stops = [*starts[1:], len(y)]
    return [Segment(a, b, exp(float(np.median(y[a:b])))) for a, b in zip(starts, stops, strict=True)]


def steps(history_ns: Sequence[float], *, min_size: int = 2, min_change: float = 0.02) -> list[Step]:
    """The points at which the level of a history changed, and by how much; see `segments`."""
    levels = segments(history_ns, min_size=min_size, min_change=min_change)
    return [Step(after.start, after.median_ns / before.median_ns) for before, after in pairwise(levels)]


def _penalty(y: NDArray[np.float64]) -> float:
    """Two parameters per segment (level and place), each log n / 2 of log-likelihood at Laplace scale b, doubled.

    b comes from differences of neighbours, which steps barely touch: median |difference| = 0.954 sd and b = 0.80 sd
    for normal noise. Quantised histories may have a zero median difference; their mean difference stands in.
    """
    differences = np.abs(np.diff(y))
    scale = 0.84 * float(np.median(differences)) or float(np.mean(differences)) / 2
    return max(2 * scale * log(len(y)), 1e-12)


def _potts(y: NDArray[np.float64], penalty: float, min_size: int) -> list[int]:
    """Starts of the best segments."""
    values = y.tolist()
    best = [-penalty] + [inf] * len(values)
    origin = [0] * (len(values) + 1)
    for stop in range(1, len(values) + 1):
        window = _MedianWindow()
        for start in range(stop - 1, -1, -1):
            window.add(values[start])
            if stop - start >= min_size and best[start] + penalty + window.deviation < best[stop]:
                best[stop] = best[start] + penalty + window.deviation
                origin[stop] = start
            # costs before any point are at least -penalty, and a longer segment deviates no less: it cannot win
            if window.deviation > best[stop]:
                break
    starts, stop = [], len(values)
    while stop > 0:
        stop = origin[stop]
        starts.append(stop)
    return starts[::-1]


class _MedianWindow:
    """Sum of absolute deviations from the median of a growing sample."""

    __slots__ = ("_ordered", "deviation")

    def __init__(self) -> None:
        self._ordered: list[float] = []
        self.deviation = 0.0

    def add(self, value: float) -> None:
        """The sum grows by the distance of the new value to the median interval of the old ones."""
        n = len(self._ordered)
        if n:
            low, high = self._ordered[(n - 1) // 2], self._ordered[n // 2]
            self.deviation += max(low - value, value - high, 0.0)
        insort(self._ordered, value)


def _separated(y: NDArray[np.float64], starts: list[int], min_change: float) -> list[int]:
    """Merge the least separated neighbours until all that are left pass the gate."""
    while len(starts) > 1:
        parts = np.split(y, starts[1:])
        medians = [float(np.median(part)) for part in parts]
        spreads = [
            1.4826 * float(np.median(np.abs(part - median))) for part, median in zip(parts, medians, strict=True)
        ]
        excess = [
            abs(medians[i + 1] - medians[i]) - max(min_change, 2 * max(spreads[i], spreads[i + 1]))
            for i in range(len(parts) - 1)
        ]
        weakest = int(np.argmin(excess))
        if excess[weakest] >= 0:
            break
        del starts[weakest + 1]
    return starts
