"""What follows from a pattern's `counts` by counting: pairs, and their share in the cells of a picture. No torch."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dilabench.patterns.pattern import Pattern, Positions, SequenceShape

# Beyond this a picture drawn from `counts` would take longer than it is worth.
MAX_PICTURED_LENGTH = 2**17
ROWS_PER_LINE = 16

# Back and ahead; None is unbounded.
Reach = tuple[int | None, int | None]


def reach_of(window: tuple[int, int], causal: bool) -> Reach:
    """How many positions back and ahead a row sees under a window (-1: unbounded) and a causal mask."""
    left, right = (None if side < 0 else side for side in window)
    return left, 0 if causal else right


def windowed_pairs(rows: int, causal: bool, left: int, right: int) -> int:
    """Visible pairs among `rows` consecutive rows under a causal mask and a window (-1: unbounded)."""
    positions = range(rows)
    return visible_pairs(positions, positions, reach_of((left, right), causal))


def visible_pairs(rows: range, keys: range, reach: Reach) -> int:
    """Pairs of a row t and a key u with t - left <= u <= t + right (None: no bound)."""
    left, right = reach
    until = len(rows) * len(keys) if right is None else _up_to(rows, keys, right)
    return until - (0 if left is None else _up_to(rows, keys, -left - 1))


def _up_to(rows: range, keys: range, ahead: int) -> int:
    """Pairs with u <= t + ahead: the sum over rows of t + ahead + 1 - keys.start, held between 0 and their number."""
    shift = ahead + 1 - keys.start
    return _ramp(rows.stop + shift, len(keys)) - _ramp(rows.start + shift, len(keys))


def _ramp(stop: int, top: int) -> int:
    """The sum of min(t, top) over 0 <= t < stop."""
    rising = min(stop, top + 1)
    return max(0, rising * (rising - 1) // 2) + max(0, stop - top - 1) * top if stop > 0 else 0


def keys_between(part: range | Positions, first: Positions, stop: Positions) -> Positions:
    """How many positions of the part lie in [first, stop), for each pair of bounds."""
    import numpy as np

    if isinstance(part, range):
        below = [np.clip(-(-(edge - part.start) // part.step), 0, len(part)) for edge in (first, stop)]
    else:
        below = [np.searchsorted(part, edge) for edge in (first, stop)]
    counted: Positions = np.maximum(below[1] - below[0], 0)
    return counted


@lru_cache(maxsize=4096)
def counted_pairs(pattern: Pattern, shape: SequenceShape) -> tuple[int, int]:
    """Attended pairs, and those that differ, over all query heads."""
    import numpy as np

    alike: dict[Hashable, list[int]] = {}
    for head in range(shape.num_heads):
        alike.setdefault(pattern.head_key(shape, head), []).append(head)
    attended = least = 0
    for heads in alike.values():
        for group in pattern.counts(shape, heads[0], np.arange(shape.length)):
            first, stop = shape.bounds(group.rows)
            counted = [int(keys_between(part, first, stop).sum()) for part in group.parts]
            attended += len(heads) * sum(counted)
            least += len(heads) * (
                int(keys_between(group.keys(), first, stop).sum()) if len(counted) > 1 else sum(counted)
            )
    return attended, least


@lru_cache(maxsize=32)  # A picture is up to half a mebibyte.
def counted_shares(pattern: Pattern, shape: SequenceShape, lines: int, columns: int) -> NDArray[np.float64]:
    """[lines, columns] of a picture of head 0: the share of pairs in each cell that is computed, of a few rows each."""
    import numpy as np

    line_edges, key_edges = (
        np.arange(min(shape.length, size) + 1) * shape.length // min(shape.length, size) for size in (lines, columns)
    )
    shares = np.zeros((len(line_edges) - 1, len(key_edges) - 1))
    for line, (start, end) in enumerate(pairwise(line_edges.tolist())):
        rows = np.unique(np.linspace(start, end - 1, min(end - start, ROWS_PER_LINE)).astype(np.int64))
        for group in pattern.counts(shape, 0, rows):
            keys = group.keys()
            for first, stop in zip(*shape.bounds(group.rows), strict=True):
                seen = keys[np.searchsorted(keys, first) : np.searchsorted(keys, stop)]
                shares[line] += np.diff(np.searchsorted(seen, key_edges))
        shares[line] /= len(rows) * np.diff(key_edges)
    return shares
