"""Many short samples at once: locations of slots and statistics of groups of unequal size.

A comparison of 10,000 pairs holds millions of samples in slots of five. Here they lie in one flat array, and each
operation runs over all of them; group sizes may differ (a session stopped early, 20 samples against 21).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from dilabench.errors import ConfigError
from dilabench.stats.samples.location import checked_samples

Floats = NDArray[np.float64]
Counts = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Slots:
    """Samples of many slots one after the other: slot i is the next `sizes[i]` of `samples_ns`."""

    samples_ns: Floats
    sizes: Counts


def flatten_slots(slots: Sequence[Sequence[float]]) -> Slots:
    """Lay the slots out flat. Raises ConfigError for an empty slot or a sample that is not a positive finite time."""
    sizes = np.fromiter(map(len, slots), np.intp, len(slots))
    if sizes.size == 0 or sizes.min() == 0:
        raise ConfigError("a slot (one turn of a case) holds no samples; leave it out of the record")
    return Slots(checked_samples(np.fromiter(chain.from_iterable(slots), np.float64, int(sizes.sum()))), sizes)


def group_quantiles(values: Floats, counts: Counts, levels: Floats) -> Floats:
    """Quantile of each group at its own level (`location.quantile`); group g is the next `counts[g]` values.

    Groups of one size are sorted together, as the rows of a matrix.
    """
    result = np.empty(len(counts))
    starts = np.cumsum(counts) - counts
    for count in np.unique(counts):
        chosen = np.flatnonzero(counts == count)
        ordered = np.sort(values[starts[chosen][:, None] + np.arange(count)], axis=1)
        position = np.clip((count + 1 / 3) * levels[chosen] - 2 / 3, 0, count - 1)
        below = position.astype(np.intp)
        rows = np.arange(len(chosen))
        low, high = ordered[rows, below], ordered[rows, np.minimum(below + 1, count - 1)]
        result[chosen] = low + (position - below) * (high - low)
    return result


def group_medians(values: Floats, counts: Counts) -> Floats:
    """Median of each group; group g is the next `counts[g]` values (at least one)."""
    return group_quantiles(values, counts, np.full(len(counts), 0.5))


def group_sums(values: Floats, counts: Counts) -> Floats:
    """Sum of each group; group g is the next `counts[g]` values (at least one)."""
    return np.add.reduceat(values, np.cumsum(counts) - counts)


def group_means(values: Floats, counts: Counts) -> Floats:
    """Mean of each group; group g is the next `counts[g]` values (at least one)."""
    return group_sums(values, counts) / counts
