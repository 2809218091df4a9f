"""Every n-th key: a pattern of a few lines, where everything but the definition is derived."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from dilabench.patterns.pattern import KeyGroup, Pattern, Positions, SequenceShape


class Stripes(Pattern):
    """All rows see keys 0, n, 2n, ..."""

    kind: Literal["stripes"] = "stripes"
    every: int = Field(default=2, ge=1)

    def counts(self, shape: SequenceShape, head: int, rows: Positions) -> Iterator[KeyGroup]:
        yield KeyGroup(rows, (range(0, shape.length, self.every),))
