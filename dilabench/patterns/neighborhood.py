"""Dilated neighbourhood attention in one dimension (DiNAT, Hassani and Shi 2022; NATTEN). semantics.md §5."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator

from dilabench.patterns.pattern import KeyGroup, Pairs, Pattern, SequenceShape
from dilabench.validation import read_count

if TYPE_CHECKING:
    import numpy as np
    from hypothesis.strategies import SearchStrategy
    from numpy.typing import NDArray

    from dilabench.patterns.pattern import Positions


class NeighborhoodPattern(Pattern):
    """C[h, i, j] = 1 for the `kernel_size` positions j nearest to i of those with its residue mod `dilation`.

    With p = i // dilation, and L positions on the residue, these are places s to s + kernel_size - 1 of the residue,
    s = min(max(p - kernel_size // 2, 0), L - kernel_size): windows keep their size at both ends of the sequence. In a
    causal workload they are the kernel_size places up to p. A residue with fewer places is seen as a whole.
    """

    kind: Literal["neighborhood"] = "neighborhood"
    kernel_size: int = Field(default=512, ge=1)
    dilation: int = Field(default=1, ge=1)

    @field_validator("kernel_size", "dilation", mode="before")
    @classmethod
    def _sizes(cls, value: Any, info: ValidationInfo) -> Any:
        return read_count(value, str(info.field_name))

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Odd and even windows, dilated and not, one key, and windows that reach over everything."""
        sizes = ((7, 1), (8, 3), (1, 2), (400, 5))
        return tuple(cls(kernel_size=size, dilation=dilation) for size, dilation in sizes)

    @classmethod
    def trials(cls) -> Mapping[str, Mapping[str, Any]]:
        """Dilated; without a causal mask windows lie around the row."""
        fields = {"kernel_size": 20, "dilation": 3}
        return {"neighborhood": fields, "neighborhood-full": {**fields, "causal": False}}

    @classmethod
    def strategy(cls, max_seq_len: int) -> SearchStrategy[Self]:
        """Any window and dilation, also beyond the sequence."""
        from hypothesis import strategies as st

        sizes = st.integers(1, max_seq_len + 1)
        return st.builds(cls, kernel_size=sizes, dilation=sizes)

    def counts(self, shape: SequenceShape, head: int, rows: Positions) -> Iterator[KeyGroup]:  # noqa: ARG002
        """One row each, but for rows that share a window at an end."""
        import numpy as np

        starts, stops = self._windows(shape, rows)
        residues = rows % self.dilation
        order = np.lexsort((rows, stops, starts, residues))
        alike = np.stack([residues, starts, stops])[:, order]
        edges = np.flatnonzero(np.any(alike[:, 1:] != alike[:, :-1], axis=0)) + 1
        for members in np.split(order, edges) if len(order) else ():
            residue, start, stop = (int(one[members[0]]) for one in (residues, starts, stops))
            keys = range(residue + start * self.dilation, residue + stop * self.dilation, self.dilation)
            yield KeyGroup(rows[members], (keys,))

    def head_key(self, shape: SequenceShape, head: int) -> Hashable:  # noqa: ARG002
        """All heads are alike."""
        return None

    def rows_seeing(self, shape: SequenceShape, head: int, key: int) -> Positions:  # noqa: ARG002
        """Rows on the key's residue whose window holds its place."""
        import numpy as np

        rows = np.arange(key % self.dilation, shape.length, self.dilation)
        starts, stops = self._windows(shape, rows)
        place = key // self.dilation
        found: Positions = rows[(starts <= place) & (place < stops)]
        return found

    def covered(self, shape: SequenceShape, head: int) -> NDArray[np.bool_]:  # noqa: ARG002
        """Every row sees at least itself."""
        import numpy as np

        return np.ones(shape.length, dtype=bool)

    def pairs(self, shape: SequenceShape) -> Pairs:
        """The keys of every window, as far as causal mask and window of the workload let see them."""
        import numpy as np

        rows = np.arange(shape.length)
        residues = rows % self.dilation
        first, stop = shape.bounds(rows)
        # Places of a residue below a position.
        visible = [-(-np.maximum(edge - residues, 0) // self.dilation) for edge in (first, stop)]
        starts, stops = self._windows(shape, rows)
        seen = np.minimum(stops, visible[1]) - np.maximum(starts, visible[0])
        pairs = shape.num_heads * int(np.maximum(seen, 0).sum())
        return Pairs(pairs, pairs)

    def reached_rows(self, shape: SequenceShape) -> tuple[int, int]:
        """All of them."""
        return shape.length * shape.num_heads, shape.length * shape.num_kv_heads

    def keys_per_row(self, length: int) -> int:
        """The window."""
        return min(length, self.kernel_size)

    def near_misses(self) -> Mapping[str, Pattern]:
        """Windows that hold one key more or less, and neighbours without gaps."""
        changed: dict[str, dict[str, int]] = {"kernel_size + 1": {"kernel_size": self.kernel_size + 1}}
        if self.kernel_size > 1:
            changed["kernel_size - 1"] = {"kernel_size": self.kernel_size - 1}
        if self.dilation > 1:
            changed["dilation=1"] = {"dilation": 1}
        return {name: self.model_copy(update=fields) for name, fields in changed.items()}

    def edges(self, shape: SequenceShape) -> Positions:
        """Where windows leave the first keys, and where they reach the last ones."""
        import numpy as np

        half, whole = self.kernel_size // 2 * self.dilation, self.kernel_size * self.dilation
        found = np.array([self.dilation, half, whole, shape.length - half, shape.length - whole])
        return np.unique(found[(found > 0) & (found < shape.length)])

    def _windows(self, shape: SequenceShape, rows: Positions) -> tuple[Positions, Positions]:
        """First place on its residue, and one past the last, that each row sees."""
        import numpy as np

        places, size = rows // self.dilation, self.kernel_size
        if shape.causal:
            return np.maximum(places - size + 1, 0), places + 1
        held = -(-(shape.length - rows % self.dilation) // self.dilation)
        starts = np.clip(places - size // 2, 0, np.maximum(held - size, 0))
        return starts, np.minimum(starts + size, held)
