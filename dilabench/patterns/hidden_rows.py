"""Patterns that are told column by column: from which ranges of rows each key is hidden (FlashMask, Wang et al. 2024).

Memory is O(N): sliding windows, documents, prefixes and shared questions need two ranges per key. No torch; numpy is
imported on use.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dilabench.patterns.pattern import KeyGroup, Pairs, Pattern, Positions, SequenceShape

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


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


class HiddenRowsPattern(Pattern):
    """A pattern that is the same for all heads and says for every key from which rows it is hidden."""

    @abstractmethod
    def hidden_rows(self, shape: SequenceShape) -> HiddenRows:
        """Before causal mask and window."""

    def counts(self, shape: SequenceShape, head: int, rows: Positions) -> Iterator[KeyGroup]:  # noqa: ARG002
        """Rows between which no range starts or stops have the same keys."""
        import numpy as np

        hidden = self.hidden_rows(shape)
        edges = np.unique(np.concatenate([hidden.starts.ravel(), hidden.stops.ravel()]))
        between = edges.searchsorted(rows, side="right")
        _, first = np.unique(between, return_index=True)
        for members in np.split(rows, first[1:]):
            if len(members):
                yield KeyGroup(members, (np.flatnonzero(~hidden.hides(members[:1], slice(None))[0]),))

    def head_key(self, shape: SequenceShape, head: int) -> Hashable:  # noqa: ARG002
        """All heads are alike."""
        return None

    def rows_seeing(self, shape: SequenceShape, head: int, key: int) -> Positions:  # noqa: ARG002
        """All but its ranges."""
        import numpy as np

        rows = np.arange(shape.length)
        found: Positions = rows[~self.hidden_rows(shape).hides(rows, slice(key, key + 1))[:, 0]]
        return found

    def covered(self, shape: SequenceShape, head: int) -> NDArray[np.bool_]:  # noqa: ARG002
        """By how many keys begin and cease to be seen at each row."""
        import numpy as np

        starts, stops = self._seen(shape)
        some = starts < stops
        change = np.bincount(starts[some], minlength=shape.length + 1)
        change = change - np.bincount(stops[some], minlength=shape.length + 1)
        return np.asarray(change.cumsum()[: shape.length] > 0)

    def pairs(self, shape: SequenceShape) -> Pairs:
        """Column by column."""
        import numpy as np

        starts, stops = self._seen(shape)
        pairs = shape.num_heads * int(np.maximum(stops - starts, 0).sum())
        return Pairs(pairs, pairs)

    def is_dense(self, shape: SequenceShape) -> bool:
        """Whether no key is hidden from any row."""
        hidden = self.hidden_rows(shape)
        return not (hidden.starts < hidden.stops).any()

    def _seen(self, shape: SequenceShape) -> tuple[Positions, Positions]:
        """`HiddenRows.seen` of every key under causal mask and window."""
        import numpy as np

        return self.hidden_rows(shape).seen(*shape.rows_in_reach(np.arange(shape.length)))
