"""A sliding window with attention sinks: the first keys of the sequence and the last ones of each row.

StreamingLLM (Xiao et al. 2023); also called A-shape. semantics.md §5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from pydantic import Field

from dilabench.patterns.answers import HiddenRows, SequenceShape
from dilabench.patterns.hidden_rows import HiddenRowsPattern, hidden_once
from dilabench.validation import Size

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from dilabench.patterns.answers import Positions
    from dilabench.patterns.pattern import Pattern


class WindowSinkPattern(HiddenRowsPattern):
    """C[h, i, j] = 1 where j < sinks or i - window_size < j <= i, else 0.

    All rows see the sinks; causal mask and window of the workload apply in addition, as everywhere.
    """

    kind: Literal["window_sink"] = "window_sink"
    sinks: int = Field(default=4, ge=0)
    window_size: Size = Field(default=512, ge=1)

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Sinks inside a block, no sinks, and a window longer than the sequence."""
        return cls(sinks=3, window_size=10), cls(sinks=0, window_size=7), cls(sinks=17, window_size=400)

    @classmethod
    def trials(cls) -> Mapping[str, Mapping[str, Any]]:
        """A window that is no multiple of blocks; no causal mask, so that rows see later sinks."""
        fields = {"sinks": 5, "window_size": 50}
        return {"window-sink": fields, "window-sink-full": {**fields, "causal": False}}

    @classmethod
    def densities(cls, length: int) -> tuple[Mapping[str, Any], ...]:
        """Windows of a half to a 32nd of the sequence, with 64 sinks."""
        return tuple({"sinks": 64, "window_size": max(1, length // part)} for part in (2, 8, 32))

    @classmethod
    def strategy(cls, max_seq_len: int) -> SearchStrategy[Self]:
        """Any sinks and window, also beyond the sequence."""
        from hypothesis import strategies as st

        return st.builds(cls, sinks=st.integers(0, max_seq_len + 1), window_size=st.integers(1, max_seq_len + 1))

    def hidden_rows(self, shape: SequenceShape) -> HiddenRows:
        """A key beyond the sinks is hidden from the rows before it, and from rows more than a window later."""
        return hidden_once(_hidden_rows, self, shape.length)

    def keys_per_row(self, length: int) -> int:
        """The sinks and the window."""
        return min(length, self.sinks + self.window_size)

    def near_misses(self) -> Mapping[str, Pattern]:
        """Windows with one key more or less, and no sinks."""
        sizes = {"window_size + 1": self.window_size + 1, "window_size - 1": self.window_size - 1}
        variants = {name: self.model_copy(update={"window_size": size}) for name, size in sizes.items() if size}
        return variants | ({"no sinks": self.model_copy(update={"sinks": 0})} if self.sinks else {})

    def edges(self, shape: SequenceShape) -> Positions:
        """The end of the sinks, and the first rows whose windows exclude the first key and the sinks."""
        edges = np.array([self.sinks, self.window_size, self.sinks + self.window_size])
        return np.unique(edges[(edges > 0) & (edges < shape.length)])


def _hidden_rows(pattern: WindowSinkPattern, length: int) -> HiddenRows:
    keys = np.arange(length)
    is_sink = keys < pattern.sinks
    nothing = np.zeros_like(keys)
    before = nothing, np.where(is_sink, 0, keys)
    behind = np.where(is_sink, length, keys + pattern.window_size), np.full_like(keys, length)
    return HiddenRows.of(length, before, behind)
