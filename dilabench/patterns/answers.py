"""Arguments and results of patterns: a sequence, groups of keys, pairs, blocks, hidden rows, pictures.

No torch; numpy is imported on use, because `--help` imports this file.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

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
    """One sequence of `length` positions, to which a pattern applies. `window` is (left, right), -1 unbounded."""

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
        """(query, key) pairs under causal mask and window, over all query heads, as full attention computes them."""
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
    number of parts that hold j. A detached merge takes the softmax of each part separately (semantics.md §2).
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
        # A boolean array is many times as fast as `np.unique`.
        first, last = min(part[0] for part in parts), max(part[-1] for part in parts)
        there = np.zeros(last - first + 1, bool)
        for part in parts:
            if isinstance(part, range):
                there[part.start - first : part.stop - first : part.step] = True
            else:
                there[part - first] = True
        keys: Positions = np.flatnonzero(there) + first
        return keys


class StridedSegments(NamedTuple):
    """Strided segments: i and j see each other if both are in one segment of `segment_length` positions, and on the
    residue `offset` of `rate` inside it."""

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
    """(query, key) pairs over all query heads of one sequence: counted with multiplicity, and a lower bound of the
    distinct ones, which an implementation that computes each pair once needs."""

    attended: int
    least: int


class LastRows(NamedTuple):
    """The work of the last rows of one sequence: their pairs, and a lower bound of the rows of q, over query
    heads, and of k, over key/value heads, that belong to any pair."""

    pairs: Pairs
    queries: int
    keys: int


class SelectedKeys(NamedTuple):
    """Selected blocks of `block_size` keys: of each query token and key/value head, or of each block of queries."""

    block_size: int
    per_token: bool


@dataclass(frozen=True, slots=True)
class Compression:
    """Compressed keys: number c stands for the `length` tokens from c · `stride` on, which is a multiple of `stride`.

    Raises ValueError for other lengths.
    """

    length: int
    stride: int

    def __post_init__(self) -> None:
        if self.stride < 1 or self.length < self.stride or self.length % self.stride:
            raise ValueError(
                f"compressed blocks of {self.length} tokens, one every {self.stride}: the length must be a multiple of "
                "the stride"
            )

    def count(self, tokens: int) -> int:
        """Whole blocks of a sequence."""
        return max(0, (tokens - self.length) // self.stride + 1)

    def lasts(self, tokens: int) -> Positions:
        """[C]: the last token of each block, from which on a causal mask shows it."""
        import numpy as np

        return np.arange(self.count(tokens)) * self.stride + self.length - 1


class Picture(NamedTuple):
    """Cells of a picture of head 0, first queries on top: the share that is computed, None if the mask hides the cell.

    `blocks`: units a side, of `block_size` positions each. `name`: stem of a file.
    """

    name: str
    title: str
    blocks: int
    block_size: int
    cells: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class WholeBlocks:
    """The blocks of `block_size` keys that a block of as many queries sees: bool `mask` [heads, n, n], n rounded up.

    `heads`: 1 if all query heads share a mask, else the number of key/value heads, or of query heads.
    """

    mask: NDArray[np.bool_]
    block_size: int


@dataclass(frozen=True, slots=True, eq=False)
class HiddenRows:
    """Key j is hidden from the rows starts[r, j] <= i < stops[r, j], for every range r of it.

    ``starts``, ``stops``: int64 [ranges, keys]. The ranges of a key are ascending and disjoint; an empty one has
    start == stop. Make it with `of`.
    """

    starts: Positions
    stops: Positions

    @classmethod
    def of(cls, rows: int, *ranges: tuple[Positions, Positions]) -> HiddenRows:
        """Normalise any (starts, stops), each [keys], over `rows` rows: clamped, sorted, and made disjoint."""
        import numpy as np

        starts, stops = (np.stack(side, dtype=np.int64) for side in zip(*ranges, strict=True))
        # In place: arrays of millions of bytes are slow to come by.
        for side in (starts, stops):
            side.clip(0, rows, out=side)
        empty = starts >= stops
        # Empty ranges are moved to the end, so that they do not separate others; a longer one before shorter ones.
        starts[empty] = stops[empty] = rows
        starts <<= 32
        starts |= np.subtract(rows, stops, out=stops)
        # Few of a key: to exchange whole rows takes a tenth of the time that sorting each column does.
        for last in range(len(starts) - 1, 0, -1):
            for at in range(last):
                later = np.maximum(starts[at], starts[at + 1])
                np.minimum(starts[at], starts[at + 1], out=starts[at])
                starts[at + 1] = later
        np.bitwise_and(starts, 0xFFFFFFFF, out=stops)
        np.subtract(rows, stops, out=stops)
        starts >>= 32
        for later in range(1, len(starts)):
            starts[later] = np.maximum(starts[later], stops[later - 1])
            stops[later] = np.maximum(stops[later], starts[later])
        used = (starts < stops).any(axis=1)
        if used.all():
            return cls(starts, stops)
        kept = np.flatnonzero(used) if used.any() else np.array([0])
        return cls(starts[kept], stops[kept])

    @property
    def keys(self) -> int:
        """The number of keys."""
        return int(self.starts.shape[1])

    def over(self, shape: SequenceShape, rows: Positions, keys: Positions) -> HiddenRows:
        """Restrict to some rows (ascending; their indices become the new positions) and some keys in any order.

        The result includes the causal mask and the window, because distances between the new positions mean nothing.
        """
        import numpy as np

        first, stop = shape.rows_in_reach(keys)
        beyond = (np.zeros_like(first), first), (stop, np.full_like(stop, shape.length))
        ranges = (*zip(self.starts[:, keys], self.stops[:, keys], strict=True), *beyond)
        return HiddenRows.of(len(rows), *(tuple(rows.searchsorted(edge) for edge in bounds) for bounds in ranges))

    def hides(self, rows: Positions, keys: Positions | slice) -> NDArray[np.bool_]:
        """[R, M]: True if a key of `keys` is hidden from a row of `rows` ([R])."""
        import numpy as np

        row = rows[:, None]
        hidden = np.zeros((len(rows), self.starts[0, keys].shape[0]), dtype=bool)
        for starts, stops in zip(self.starts[:, keys], self.stops[:, keys], strict=True):
            hidden |= (row >= starts) & (row < stops)
        return hidden

    def seen(self, first: Positions, stop: Positions) -> tuple[Positions, Positions]:
        """Return the visible part of the rows first[j] <= i < stop[j] of each key: ascending intervals (starts, stops),
        each [ranges + 1, keys]; start >= stop is an empty interval."""
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
    """Pairs with u <= t + ahead: the sum over rows of t + ahead + 1 - keys.start, clamped to [0, len(keys)]."""
    shift = ahead + 1 - keys.start
    return _ramp(rows.stop + shift, len(keys)) - _ramp(rows.start + shift, len(keys))


def _ramp(stop: int, top: int) -> int:
    """The sum of min(t, top) over 0 <= t < stop."""
    rising = min(stop, top + 1)
    return max(0, rising * (rising - 1) // 2) + max(0, stop - top - 1) * top if stop > 0 else 0


def holds(part: range | Positions, key: int) -> bool:
    """Return True if the part has the key."""
    if isinstance(part, range):
        return key in part
    at = int(part.searchsorted(key))
    return at < len(part) and int(part[at]) == key


def keys_between(part: range | Positions, first: Positions, stop: Positions) -> Positions:
    """The number of positions of the part in [first, stop), for each pair of bounds."""
    import numpy as np

    if isinstance(part, range):
        below = [np.clip(-(-(edge - part.start) // part.step), 0, len(part)) for edge in (first, stop)]
    else:
        below = [np.searchsorted(part, edge) for edge in (first, stop)]
    counted: Positions = np.maximum(below[1] - below[0], 0)
    return counted


@lru_cache(maxsize=4096)
def counted_once(count: Callable[..., Any], pattern: Hashable, shape: SequenceShape, *rows: int) -> Any:
    """The pairs that `count` gives, of all rows or of the last `rows`. Kept: every case of a workload needs them."""
    return count(pattern, shape, *rows)


class Counted(Protocol):
    """The definition of a pattern (`pattern.Pattern`)."""

    def counts(self, shape: SequenceShape, head: int, rows: Positions) -> Iterator[KeyGroup]: ...
    def head_key(self, shape: SequenceShape, head: int) -> Hashable: ...


def counted_pairs(pattern: Counted, shape: SequenceShape) -> Pairs:
    """Attended pairs, and distinct ones, over all query heads."""
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
    return Pairs(attended, least)


def counted_last_rows(pattern: Counted, shape: SequenceShape, rows: int) -> LastRows:
    """Count the pairs of the last rows and the keys that they see, once for key/value heads with the same keys."""
    import numpy as np

    group = shape.num_heads // shape.num_kv_heads
    of_kv_heads: dict[tuple[Hashable, ...], list[int]] = {}
    for kv_head in range(shape.num_kv_heads):
        heads = range(kv_head * group, (kv_head + 1) * group)
        of_kv_heads.setdefault(tuple(pattern.head_key(shape, head) for head in heads), []).append(kv_head)
    attended = least = queries = keys = 0
    positions = np.arange(shape.length - rows, shape.length)
    for of_heads, alike in of_kv_heads.items():
        reached = np.zeros(shape.length, bool)
        for key in dict.fromkeys(of_heads):
            head = alike[0] * group + of_heads.index(key)
            times = len(alike) * of_heads.count(key)
            for grouped in pattern.counts(shape, head, positions):
                first, stop = shape.bounds(grouped.rows)
                distinct = grouped.keys()
                seen = keys_between(distinct, first, stop)
                attended += times * sum(int(keys_between(part, first, stop).sum()) for part in grouped.parts)
                least += times * int(seen.sum())
                queries += times * int((seen > 0).sum())
                # Both bounds ascend, so the last row that begins at a key or before it is the one that ends last.
                last = first.searchsorted(distinct, "right") - 1
                reached[distinct[(last >= 0) & (distinct < stop[last])]] = True
        keys += len(alike) * int(reached.sum())
    return LastRows(Pairs(attended, least), queries, keys)
