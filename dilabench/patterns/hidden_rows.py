"""Patterns given column by column: the ranges of rows from which each key is hidden (FlashMask, Wang et al. 2024).

Memory is O(N): sliding windows, documents, prefixes and shared questions need two ranges per key. No torch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilabench.patterns.answers import HiddenRows, KeyGroup, Pairs, Positions, SequenceShape
from dilabench.patterns.pattern import Pattern


class HiddenRowsPattern(Pattern):
    """A pattern, the same for all heads, that is defined by the rows from which each key is hidden."""

    @abstractmethod
    def hidden_rows(self, shape: SequenceShape) -> HiddenRows:
        """The ranges of rows from which each key is hidden, before causal mask and window."""

    def counts(self, shape: SequenceShape, head: int, rows: Positions) -> Iterator[KeyGroup]:  # noqa: ARG002
        """Consecutive rows have the same keys if no range starts or stops between them."""
        hidden = self.hidden_rows(shape)
        changes = np.zeros(len(rows) + 1, dtype=bool)
        for edges in (hidden.starts, hidden.stops):
            changes[rows.searchsorted(edges)] = True
        for members in np.split(rows, 1 + np.flatnonzero(changes[1 : len(rows)])):
            if len(members):
                yield KeyGroup(members, (np.flatnonzero(~hidden.hides(members[:1], slice(None))[0]),))

    def keys_in_columns(self, shape: SequenceShape, rows: Positions, edges: Positions) -> NDArray[np.int64]:
        """Computed from the rows at which each key becomes visible and hidden."""
        column = edges.searchsorted(np.arange(shape.length), side="right") - 1
        change = np.zeros((len(rows) + 1, len(edges) - 1), np.int64)
        for start, stop in zip(*self._seen(shape), strict=True):
            nonempty = start < stop
            np.add.at(change, (rows.searchsorted(start[nonempty]), column[nonempty]), 1)
            np.subtract.at(change, (rows.searchsorted(stop[nonempty]), column[nonempty]), 1)
        return change[:-1].cumsum(axis=0)

    def head_key(self, shape: SequenceShape, head: int) -> Hashable:  # noqa: ARG002
        """All heads are equal."""
        return None

    def rows_seeing(self, shape: SequenceShape, head: int, key: int) -> Positions:  # noqa: ARG002
        """All rows except those in the key's ranges."""
        rows = np.arange(shape.length)
        visible: Positions = rows[~self.hidden_rows(shape).hides(rows, slice(key, key + 1))[:, 0]]
        return visible

    def covered(self, shape: SequenceShape, head: int) -> NDArray[np.bool_]:  # noqa: ARG002
        """Computed from the numbers of keys that become visible and hidden at each row."""
        starts, stops = self._seen(shape)
        nonempty = starts < stops
        change = np.bincount(starts[nonempty], minlength=shape.length + 1)
        change = change - np.bincount(stops[nonempty], minlength=shape.length + 1)
        return np.asarray(change.cumsum()[: shape.length] > 0)

    def pairs(self, shape: SequenceShape) -> Pairs:
        """Counted column by column."""
        starts, stops = self._seen(shape)
        pairs = shape.num_heads * int(np.maximum(stops - starts, 0).sum())
        return Pairs(pairs, pairs)

    def is_dense(self, shape: SequenceShape) -> bool:
        """Return True if no key is hidden from any row."""
        hidden = self.hidden_rows(shape)
        return not (hidden.starts < hidden.stops).any()

    def _seen(self, shape: SequenceShape) -> tuple[Positions, Positions]:
        """`HiddenRows.seen` of every key under causal mask and window."""
        return self.hidden_rows(shape).seen(*shape.rows_in_reach(np.arange(shape.length)))


@lru_cache(maxsize=8)
def hidden_once(make: Callable[[Any, int], HiddenRows], pattern: HiddenRowsPattern, length: int) -> HiddenRows:
    """The hidden rows that `make` gives: every derived answer asks for them."""
    return make(pattern, length)
