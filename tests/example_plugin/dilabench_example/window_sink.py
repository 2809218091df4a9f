"""Sliding window with attention sinks (StreamingLLM, Xiao et al. 2023): the first keys, and the last ones."""

from collections.abc import Hashable, Iterator
from typing import Literal

import numpy as np
from pydantic import Field

from dilabench.patterns.pattern import KeyGroup, Pattern, Positions, SequenceShape


class WindowSinkPattern(Pattern):
    """Row i sees the first `sinks` keys and the `window_size` keys up to its own."""

    kind: Literal["window_sink"] = "window_sink"
    sinks: int = Field(default=4, ge=0)
    window_size: int = Field(default=512, ge=1)

    @classmethod
    def examples(cls) -> tuple["WindowSinkPattern", ...]:
        """What implementations are held to."""
        return cls(sinks=3, window_size=10), cls(sinks=0, window_size=7)

    def counts(self, shape: SequenceShape, head: int, rows: Positions) -> Iterator[KeyGroup]:
        """Each row has its own window; where it reaches the sinks, they are one range."""
        for row in rows.tolist():
            first = max(0, row + 1 - self.window_size)
            sinks = range(min(self.sinks, first))
            keys = np.concatenate([np.arange(sinks.stop), np.arange(first, row + 1)])
            yield KeyGroup(np.array([row]), (keys,))

    def head_key(self, shape: SequenceShape, head: int) -> Hashable:
        """All heads are alike."""
        return None
