"""Patterns that are told column by column: from which ranges of rows each key is hidden (FlashMask, Wang et al. 2024).

Memory is O(N): sliding windows, documents, prefixes and shared questions need two ranges per key. No torch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterator

import numpy as np
from numpy.typing import NDArray

from dilabench.patterns.answers import HiddenRows, KeyGroup, Pairs, Positions, SequenceShape
from dilabench.patterns.pattern import Pattern


class HiddenRowsPattern(Pattern):
    """A pattern that is the same for all heads and says for every key from which rows it is hidden."""

    @abstractmethod
    def hidden_rows(self, shape: SequenceShape) -> HiddenRows:
        """Before causal mask and window."""

    def counts(self, shape: SequenceShape, head: int, rows: Positions) -> Iterator[KeyGroup]:  # noqa: ARG002
        """Rows between which no range starts or stops have the same keys."""
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
        rows = np.arange(shape.length)
        found: Positions = rows[~self.hidden_rows(shape).hides(rows, slice(key, key + 1))[:, 0]]
        return found

    def covered(self, shape: SequenceShape, head: int) -> NDArray[np.bool_]:  # noqa: ARG002
        """By how many keys begin and cease to be seen at each row."""
        starts, stops = self._seen(shape)
        some = starts < stops
        change = np.bincount(starts[some], minlength=shape.length + 1)
        change = change - np.bincount(stops[some], minlength=shape.length + 1)
        return np.asarray(change.cumsum()[: shape.length] > 0)

    def pairs(self, shape: SequenceShape) -> Pairs:
        """Column by column."""
        starts, stops = self._seen(shape)
        pairs = shape.num_heads * int(np.maximum(stops - starts, 0).sum())
        return Pairs(pairs, pairs)

    def is_dense(self, shape: SequenceShape) -> bool:
        """Whether no key is hidden from any row."""
        hidden = self.hidden_rows(shape)
        return not (hidden.starts < hidden.stops).any()

    def _seen(self, shape: SequenceShape) -> tuple[Positions, Positions]:
        """`HiddenRows.seen` of every key under causal mask and window."""
        return self.hidden_rows(shape).seen(*shape.rows_in_reach(np.arange(shape.length)))
