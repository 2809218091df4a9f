"""Dense attention: every query sees every key. Also the function of every backend."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dilabench.patterns.answers import KeyGroup, LastRows, Pairs, SequenceShape, StridedSegments, visible_pairs
from dilabench.patterns.pattern import Pattern

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dilabench.patterns.answers import Positions


class DensePattern(Pattern):
    """Every query sees every key once."""

    kind: Literal["dense"] = "dense"
    drawn_in_reports: ClassVar[bool] = False

    def counts(self, shape: SequenceShape, head: int, rows: Positions) -> Iterator[KeyGroup]:  # noqa: ARG002
        """All rows have all keys."""
        yield KeyGroup(rows, (range(shape.length),))

    @classmethod
    def trials(cls) -> Mapping[str, Mapping[str, Any]]:
        """Under each mask."""
        return {"dense": {}, "dense-full": {"causal": False}, "dense-window": {"window": (40, 0)}}

    def head_key(self, shape: SequenceShape, head: int) -> Hashable:  # noqa: ARG002
        """All heads are equal."""
        return None

    def rows_seeing(self, shape: SequenceShape, head: int, key: int) -> Positions:  # noqa: ARG002
        """All rows."""
        import numpy as np

        return np.arange(shape.length)

    def covered(self, shape: SequenceShape, head: int) -> NDArray[np.bool_]:  # noqa: ARG002
        """Every row sees at least itself."""
        import numpy as np

        return np.ones(shape.length, dtype=bool)

    def pairs(self, shape: SequenceShape) -> Pairs:
        """Computed in closed form."""
        return Pairs(shape.visible_pairs, shape.visible_pairs)

    def reached_rows(self, shape: SequenceShape) -> tuple[int, int]:
        """All of them."""
        return shape.length * shape.num_heads, shape.length * shape.num_kv_heads

    def last_rows(self, shape: SequenceShape, rows: int) -> LastRows:
        """In closed form: the keys from the first that the first of these rows sees."""
        left, _ = shape.reach
        first = shape.length - rows
        positions, keys = range(first, shape.length), range(shape.length)
        pairs = shape.num_heads * visible_pairs(positions, keys, shape.reach)
        reached = shape.length if left is None else min(shape.length, rows + left)
        return LastRows(Pairs(pairs, pairs), rows * shape.num_heads, reached * shape.num_kv_heads)

    def strided_segments(self, shape: SequenceShape, head: int) -> tuple[StridedSegments, ...]:  # noqa: ARG002
        """One segment that holds the whole sequence."""
        return (StridedSegments(shape.length, 1, 0),)

    def shares(self, shape: SequenceShape, lines: int, columns: int) -> None:
        """None: a full square is not drawn."""


# There is no field to check.
DENSE = DensePattern.model_construct()
