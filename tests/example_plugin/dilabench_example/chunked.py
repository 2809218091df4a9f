"""Chunked local attention: rows see the keys of their own chunk and of some chunks before it."""

from collections.abc import Hashable, Iterator
from typing import Literal

import numpy as np
from pydantic import Field

from dilabench.patterns.pattern import KeyGroup, Pattern, Positions, SequenceShape


class ChunkedPattern(Pattern):
    """Row i sees key j where 0 <= i // chunk - j // chunk <= chunks_before."""

    kind: Literal["chunked"] = "chunked"
    chunk: int = Field(default=512, ge=1)
    chunks_before: int = Field(default=1, ge=0)

    @classmethod
    def examples(cls) -> tuple["ChunkedPattern", ...]:
        """Instances that test implementations."""
        return cls(chunk=10), cls(chunk=7, chunks_before=0)

    def counts(self, shape: SequenceShape, head: int, rows: Positions) -> Iterator[KeyGroup]:
        """The rows of a chunk have the same keys."""
        for own in np.unique(rows // self.chunk).tolist():
            start = max(0, own - self.chunks_before) * self.chunk
            keys = range(start, min(shape.length, (own + 1) * self.chunk))
            yield KeyGroup(rows[rows // self.chunk == own], (keys,))

    def head_key(self, shape: SequenceShape, head: int) -> Hashable:
        """All heads are alike."""
        return None
