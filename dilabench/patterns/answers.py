"""What patterns are asked about and answer with: a sequence, groups of keys, pairs, blocks, hidden rows, pictures.

No torch; numpy is imported on use, for `--help` reads this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Positions = NDArray[np.int64]
else:
    Positions = Any

# Back and ahead; None is unbounded.
Reach = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class SequenceShape:
    """What a pattern lies over: one sequence of `length` positions. `window` is (left, right), -1 unbounded."""

    length: int
    num_heads: int
    num_kv_heads: int
    causal: bool
    window: tuple[int, int]

    @property
    def reach(self) -> Reach:
        """How many positions back and ahead a row sees under window and causal mask; None is unbounded."""
        return reach_of(self.window, self.causal)

    @property
    def visible_pairs(self) -> int:
        """(query, key) pairs under causal mask and window, over all query heads: those of full attention."""
        return self.num_heads * windowed_pairs(self.length, self.causal, *self.window)

    def bounds(self, rows: Positions) -> tuple[Positions, Positions]:
        """The first key and one past the last key that the window and the causal mask let each row see."""
        import numpy as np

        left, right = self.reach
        first = np.zeros_like(rows) if left is None else np.maximum(rows - left, 0)
        stop = np.full_like(rows, self.length) if right is None else np.minimum(rows + right + 1, self.length)
        return first, stop

    def rows_in_reach(self, keys: Positions) -> tuple[Positions, Positions]:
        """The first row and one past the last row that the window and the causal mask let see each key."""
        import numpy as np

        left, right = self.reach
        first = np.zeros_like(keys) if right is None else np.maximum(keys - right, 0)
        stop = np.full_like(keys, self.length) if left is None else np.minimum(keys + left + 1, self.length)
        return first, stop


@dataclass(frozen=True, slots=True)
class KeyGroup:
    """Rows of one head that have the same keys. `rows`: [R] positions, ascending.

    `parts`: positions of keys, ascending and each once inside a part, as a range or an array. C[h, row, j] is the
    number of parts that hold j. A detached merge takes the softmax of each part apart (semantics.md §2).
    """

    rows: Positions
    parts: tuple[range | Positions, ...]

    def keys(self) -> Positions:
        """The distinct keys, ascending."""
        import numpy as np

        if len(self.parts) == 1:
            return np.asarray(self.parts[0], dtype=np.int64)
        parts = [part for part in self.parts if len(part)]
        if not parts:
            return np.empty(0, np.int64)
        # Marks are many times as fast as `np.unique`.
        first, last = min(part[0] for part in parts), max(part[-1] for part in parts)
        there = np.zeros(last - first + 1, bool)
        for part in parts:
            if isinstance(part, range):
                there[part.start - first : part.stop - first : part.step] = True
            else:
                there[part - first] = True
        found: Positions = np.flatnonzero(there) + first
        return found


class StridedSegments(NamedTuple):
    """Strided segments: i and j see each other where both lie in one segment of `segment_length` positions, and on
    the residue `offset` of `rate` inside it."""

    segment_length: int
    rate: int
    offset: int


@dataclass(frozen=True, slots=True)
class ZeroKeys:
    """Keys of score 0 and value 0 that part `part` (as in `KeyGroup`) adds to a head: each of `rows` sees `count`."""

    part: int
    rows: range
    count: int


class Pairs(NamedTuple):
    """(query, key) pairs over all query heads of one sequence: as often as they count, and a lower bound of those
    that differ, which an implementation that computes each pair once cannot avoid."""

    attended: int
    least: int


class Picture(NamedTuple):
    """Cells of a picture of head 0, first queries on top: the share that is computed, None where the mask hides all.

    `blocks`: units a side, of `block_size` positions each. `name`: stem of a file.
    """

    name: str
    title: str
    blocks: int
    block_size: int
    cells: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class WholeBlocks:
    """Which blocks of `block_size` keys a block of as many queries sees: bool `mask` [heads, n, n], n rounded up.

    `heads`: 1 where all query heads share a mask, or as many as there are key/value heads, or query heads.
    """

    mask: NDArray[np.bool_]
    block_size: int


@dataclass(frozen=True, slots=True, eq=False)
class HiddenRows:
    """Key j is hidden from the rows starts[r, j] <= i < stops[r, j], for every range r of it.

    ``starts``, ``stops``: int64 [ranges, keys]. Of one key the ranges rise and do not touch each other's inside; an
    empty one has start == stop. Make it with `of`.
    """

    starts: Positions
    stops: Positions

    @classmethod
    def of(cls, rows: int, *ranges: tuple[Positions, Positions]) -> HiddenRows:
        """From any (starts, stops), each [keys], over `rows` rows: cut to the rows, put in order, joined where they
        overlap."""
        import numpy as np

        starts, stops = (np.clip(np.stack(side).astype(np.int64), 0, rows) for side in zip(*ranges, strict=True))
        # An empty range would otherwise stand between others and keep them apart.
        starts = np.where(starts < stops, starts, rows)
        stops = np.where(starts < stops, stops, rows)
        order = np.argsort(starts, axis=0, kind="stable")
        starts, stops = np.take_along_axis(starts, order, 0), np.take_along_axis(stops, order, 0)
        for later in range(1, len(starts)):
            starts[later] = np.maximum(starts[later], stops[later - 1])
            stops[later] = np.maximum(stops[later], starts[later])
        used = np.flatnonzero((starts < stops).any(axis=1))
        used = used if len(used) else np.array([0])
        return cls(starts[used], stops[used])

    @property
    def keys(self) -> int:
        """How many keys there are."""
        return int(self.starts.shape[1])

    def over(self, shape: SequenceShape, rows: Positions, keys: Positions) -> HiddenRows:
        """For some rows, rising and counted from the first of them, and some keys in any order.

        With what causal mask and window hide besides: between these rows and keys there are no distances any more.
        """
        import numpy as np

        first, stop = shape.rows_in_reach(keys)
        beyond = (np.zeros_like(first), first), (stop, np.full_like(stop, shape.length))
        ranges = (*zip(self.starts[:, keys], self.stops[:, keys], strict=True), *beyond)
        return HiddenRows.of(len(rows), *(tuple(rows.searchsorted(edge) for edge in one) for one in ranges))

    def hides(self, rows: Positions, keys: Positions | slice) -> NDArray[np.bool_]:
        """[R, M]: whether each of `rows` ([R]) is kept from each of `keys`."""
        import numpy as np

        row = rows[:, None]
        hidden = np.zeros((len(rows), self.starts[0, keys].shape[0]), dtype=bool)
        for starts, stops in zip(self.starts[:, keys], self.stops[:, keys], strict=True):
            hidden |= (row >= starts) & (row < stops)
        return hidden

    def seen(self, first: Positions, stop: Positions) -> tuple[Positions, Positions]:
        """What is left of the rows first[j] <= i < stop[j] of each key: rising intervals (starts, stops), each
        [ranges + 1, keys], with start >= stop where nothing is."""
        import numpy as np

        starts = np.maximum(np.concatenate([first[None], self.stops]), first)
        stops = np.minimum(np.concatenate([self.starts, stop[None]]), stop)
        return starts, stops


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
