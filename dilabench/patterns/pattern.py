"""A pattern: which query sees which key, in one frozen model. No torch; numpy is imported on use,
because `--help` imports this file.

`counts` is the only definition. All other methods follow from it, and their defaults here derive it from `counts`; a
pattern may override them with faster forms, which tests check against `counts`.

Positions count from 0 in one sequence. C[h, i, j] is how often the query at i sees the key at j. The causal mask and
the window are applied outside of the pattern (semantics.md §1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from pydantic import BaseModel, ValidationError

from dilabench.errors import ConfigError
from dilabench.patterns.answers import Compression as Compression
from dilabench.patterns.answers import HiddenRows as HiddenRows
from dilabench.patterns.answers import KeyGroup as KeyGroup
from dilabench.patterns.answers import LastRows as LastRows
from dilabench.patterns.answers import Pairs as Pairs
from dilabench.patterns.answers import Picture as Picture
from dilabench.patterns.answers import Positions as Positions
from dilabench.patterns.answers import SelectedKeys as SelectedKeys
from dilabench.patterns.answers import SequenceShape as SequenceShape
from dilabench.patterns.answers import StridedSegments as StridedSegments
from dilabench.patterns.answers import WholeBlocks as WholeBlocks
from dilabench.patterns.answers import ZeroKeys as ZeroKeys
from dilabench.patterns.answers import counted_last_rows, counted_once, counted_pairs, holds, keys_between
from dilabench.units import format_count
from dilabench.validation import Model, describe, validated

if TYPE_CHECKING:
    import numpy as np
    from hypothesis.strategies import SearchStrategy
    from numpy.typing import NDArray

# Beyond this size a picture drawn from `counts` would take too long.
MAX_PICTURED_LENGTH = 2**17
ROWS_PER_LINE = 16


class PatternError(ConfigError, ValueError):
    """A pattern was constructed from values that it does not take."""


class Pattern(Model, ABC):
    """Base of all patterns. A subclass names its `kind`, has its own fields, and defines `counts`.

    Register it with `dilabench_register_patterns` (docs/how-to/add-pattern.md).
    """

    kind: str
    # True if reports draw a picture per shape, because the label does not describe the pattern fully.
    drawn_in_reports: ClassVar[bool] = True
    # Former names of request fields: today's name, and a function that converts the value.
    former_fields: ClassVar[Mapping[str, tuple[str, Callable[[Any], Any]]]] = {}
    # Fields of requests that determine the density: files of masks, indices or bounds.
    given_whole_by: ClassVar[frozenset[str]] = frozenset()
    # Names of the fields in their order, as compilers read them: no version of torch traces all that pydantic offers.
    field_names: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls.field_names = tuple(cls.model_fields)

    def __init__(self, **fields: Any) -> None:
        """Raises PatternError, a ValueError, for fields that the pattern does not take."""
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise PatternError(describe(error, type(self))) from None
        except ConfigError as error:
            raise PatternError(str(error)) from None

    # As on pydantic's own: `model_validate` sets the fields without a call of `__init__`.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    # The definition.

    @abstractmethod
    def counts(self, shape: SequenceShape, head: int, rows: Positions) -> Iterator[KeyGroup]:
        """The keys of some rows ([R] int64, ascending) of a query head, in groups of rows that have the same ones.

        Before causal mask and window. Rows without keys are in no group, or in one whose parts are empty.
        """

    # Requests.

    @classmethod
    def request_model(cls) -> type[BaseModel]:
        """The fields that TOML and `--set` may give, all with defaults: by default the pattern's own."""
        return cls

    @classmethod
    def from_request(cls, fields: Mapping[str, Any]) -> Self:
        """The pattern of a request's fields. Raises ConfigError when they do not go together."""
        return validated(cls, dict(fields))

    @classmethod
    def of_request(cls, fields: Mapping[str, Any]) -> Self:
        """The pattern of a flat request, from the fields that belong to this kind, in alphabetical order."""
        known = cls.request_model().model_fields
        return cls.from_request({name: fields[name] for name in sorted(fields) if name in known})

    @classmethod
    def kind_of(cls, value: Mapping[str, Any]) -> str:  # noqa: ARG003
        """The kind of a pattern that was written under this kind's name: another one if the name has changed hands."""
        kind: str = cls.model_fields["kind"].default
        return kind

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Small instances with odd sizes that test implementations, for sequences of up to a few hundred."""
        return (cls.from_request({}),)

    @classmethod
    def trials(cls) -> Mapping[str, Mapping[str, Any]]:
        """Named requests that `verify --all` runs, as fields of the pattern and of the shape.

        Without a given pattern, `verify NAME` takes the first one of a pattern that NAME computes.
        """
        kind = cls.model_fields["kind"].default
        return {kind: {}, f"{kind}-full": {"causal": False}}

    @classmethod
    def densities(cls, length: int) -> tuple[Mapping[str, Any], ...]:  # noqa: ARG003
        """Requests over a sequence of this length from the densest to the sparsest, for time against density."""
        return ()

    @classmethod
    def strategy(cls, max_seq_len: int) -> SearchStrategy[Self]:  # noqa: ARG003
        """A Hypothesis strategy of patterns for sequences up to a length; by default it draws the examples."""
        from hypothesis import strategies as st

        return st.sampled_from(cls.examples())

    @classmethod
    def of(cls, workload: Any) -> Self:
        """The pattern of a workload, for code that computes only this kind. Raises ValueError for another one."""
        if not isinstance(workload.pattern, cls):
            raise ValueError(f"a {workload.pattern.kind} pattern where only {cls.__name__} can be computed")
        return workload.pattern

    @classmethod
    def match(cls, pattern: Pattern) -> Self | None:
        """Return the pattern if it is of this kind, else None."""
        return pattern if isinstance(pattern, cls) else None

    @property
    def under(self) -> Pattern:
        """The pattern without its mask of blocks; by default the pattern itself."""
        return self

    # Names.

    def label(self) -> str:
        """A few words for tables; defaults are omitted."""
        unusual = self.model_dump(exclude_defaults=True, exclude={"kind"})
        return " ".join([self.kind.replace("_", "-"), *(f"{name}={value}" for name, value in unusual.items())])

    def setting(self) -> str:
        """The label without the kind, for tables of one kind at several densities."""
        return self.label().removeprefix(self.kind.replace("_", "-")).strip() or "default"

    def details(self, shapes: Sequence[SequenceShape]) -> str:  # noqa: ARG002
        """Text for `--dry-run` over these sequences: the label, and properties that depend on the shape."""
        return self.label()

    def row_labels(self, shapes: Sequence[SequenceShape]) -> dict[str, str]:  # noqa: ARG002
        """Labels of its rows in a record, such as the result of a random choice."""
        return {}

    # Properties that follow from `counts`.

    def head_key(self, shape: SequenceShape, head: int) -> Hashable:  # noqa: ARG002
        """A key that is equal for query heads with the same counts; by default all heads differ."""
        return head

    def rows_seeing(self, shape: SequenceShape, head: int, key: int) -> Positions:
        """The rows with C[head, row, key] > 0 before causal mask and window, ascending."""
        import numpy as np

        groups = self.counts(shape, head, np.arange(shape.length))
        rows = [group.rows for group in groups if any(holds(part, key) for part in group.parts)]
        return np.sort(np.concatenate(rows)) if rows else np.zeros(0, dtype=np.int64)

    def covered(self, shape: SequenceShape, head: int) -> NDArray[np.bool_]:
        """[length]: the rows that see a key, under causal mask and window."""
        import numpy as np

        seen = np.zeros(shape.length, dtype=bool)
        for group in self.counts(shape, head, np.arange(shape.length)):
            first, stop = shape.bounds(group.rows)
            seen[group.rows] = sum(keys_between(part, first, stop) for part in group.parts) > 0
        return seen

    def pairs(self, shape: SequenceShape) -> Pairs:
        """The number of attended pairs, under causal mask and window."""
        pairs: Pairs = counted_once(counted_pairs, self, shape)
        return pairs

    def last_rows(self, shape: SequenceShape, rows: int) -> LastRows:
        """The pairs of the last `rows` rows alone, under causal mask and window, and what they reach."""
        found: LastRows = counted_once(counted_last_rows, self, shape, rows)
        return found

    def density_of(self, shapes: Sequence[SequenceShape]) -> float:
        """Computed pairs / pairs of full attention under the same mask and window.

        Pairs count as often as they are attended, so overlapping parts may exceed 1.
        """
        return sum(self.pairs(shape).attended for shape in shapes) / sum(shape.visible_pairs for shape in shapes)

    def reached_rows(self, shape: SequenceShape) -> tuple[int, int]:  # noqa: ARG002
        """A lower bound of the rows of q, over query heads, and of k, over key/value heads, that belong to any pair.

        By default (0, 0), which is always a lower bound.
        """
        return 0, 0

    def keys_per_row(self, length: int) -> int:
        """An upper bound of the keys of one part that a row sees at this length; it bounds the rounding error."""
        return length

    def edges(self, shape: SequenceShape) -> Positions:  # noqa: ARG002
        """Positions where structures begin; verification always samples them and the rows before. Empty by default."""
        import numpy as np

        return np.zeros(0, dtype=np.int64)

    def strided_segments(self, shape: SequenceShape, head: int) -> tuple[StridedSegments, ...] | None:  # noqa: ARG002
        """The pattern of a head as a union of strided segments; None for other patterns.

        Implementations of such unions over a dense backend can then compute the pattern.
        """
        return None

    def hidden_rows(self, shape: SequenceShape) -> HiddenRows | None:  # noqa: ARG002
        """The rows from which each key is hidden, in a few ranges; None if heads differ or there are too many ranges.

        Implementations of bounds of columns can then compute the pattern, in O(N) memory.
        """
        return None

    def whole_blocks(self, shape: SequenceShape) -> WholeBlocks | None:  # noqa: ARG002
        """The pattern as a union of whole blocks of queries and keys; None for other patterns.

        Implementations of lists of blocks can then compute the pattern.
        """
        return None

    def is_dense(self, shape: SequenceShape) -> bool:
        """Return True if every query sees every key once."""
        whole = (StridedSegments(shape.length, 1, 0),)
        return all(self.strided_segments(shape, head) == whole for head in range(shape.num_heads))

    def summands(self, shape: SequenceShape) -> tuple[Summand, ...]:  # noqa: ARG002
        """The attentions, each with its own softmax, that are summed under gates; empty for a single softmax."""
        return ()

    @property
    def block_length(self) -> int | None:
        """Rows of a block if whole blocks see each other, else None."""
        return None

    @property
    def selects(self) -> SelectedKeys | None:
        """The unit of a selection of key blocks, which a call may replace by its `indices`; None if it has none."""
        return None

    @property
    def reads_queries(self) -> bool:
        """Return True if key blocks are selected by queries and keys, so that a call can select them."""
        return False

    @property
    def cut_length(self) -> int | None:
        """Multiples of this length cut a sequence so that no query sees a key on the other side; None: no cut."""
        return None

    @property
    def parts(self) -> int:
        """The largest number of parts in which the keys of a row are given."""
        return 1

    @property
    def differs_by_token(self) -> bool:
        """Return True if each token may have its own keys, so that hardly two blocks of pairs are alike."""
        return False

    @property
    def is_detached(self) -> bool:
        """Return True if gradients treat the weights of parts as constants (semantics.md §2)."""
        return False

    @property
    def merged_exactly(self) -> Self:
        """The same with weights of parts that are no constants; its outputs are the same."""
        return self

    @property
    def segment_sizes(self) -> tuple[int, ...]:
        """Lengths of the segments into which it cuts a sequence; empty if it cuts none."""
        return ()

    @property
    def compresses(self) -> Compression | None:
        """How keys stand for blocks of tokens; None if keys are tokens."""
        return None

    @property
    def has_grouped_heads(self) -> bool:
        """Return True if heads take part in different branches."""
        return False

    @property
    def has_fixed_length(self) -> bool:
        """Return True if it fits sequences of one length only, like a mask from a file."""
        return False

    def files(self) -> tuple[tuple[Path, str], ...]:
        """Files from which it is read, each with the digest of its content; records keep copies of them."""
        return ()

    def zero_keys(self, shape: SequenceShape, head: int) -> Iterable[ZeroKeys]:  # noqa: ARG002
        """Keys of score 0 and value 0 that rows attend in addition to those counted; empty by default.

        They only add to the denominator (semantics.md §2): exp(lse) grows by their number. No part adds to a row twice.
        """
        return ()

    @property
    def has_zero_keys(self) -> bool:
        """Return True if rows may attend zero keys, which an implementation must support."""
        return False

    def why_not_over(self, shape: SequenceShape) -> str | None:  # noqa: ARG002
        """Return why it is undefined over a sequence, with a remedy; None if it is defined."""
        return None

    def near_misses(self) -> Mapping[str, Pattern]:
        """Patterns that may be computed by mistake, by a name of the difference: 'offset=blocked'.

        A result that fails verification is compared with each, so that the message can name the mistake.
        """
        return {}

    def near_misses_unmasked(self) -> Mapping[str, Pattern]:
        """Further ones that replace the causal mask too: they are computed without it. For causal workloads only."""
        return {}

    # Pictures.

    def shares(self, shape: SequenceShape, lines: int, columns: int) -> NDArray[np.float64] | None:
        """[lines, columns] of a picture of head 0: the share of (query, key) pairs in each cell that is computed.

        If a line holds many rows, some are sampled. None if there is nothing to draw or too much to count.
        """
        return _counted_shares(self, shape, lines, columns) if shape.length <= MAX_PICTURED_LENGTH else None

    def keys_in_columns(self, shape: SequenceShape, rows: Positions, edges: Positions) -> NDArray[np.int64]:
        """[R, columns]: how many keys in each edges[i] <= key < edges[i + 1] a row of head 0 attends to.

        `rows` [R] and `edges` [columns + 1], from 0 to the length, are ascending.
        """
        import numpy as np

        seen = np.zeros((len(rows), len(edges) - 1), np.int64)
        for group in self.counts(shape, 0, rows):
            keys = group.keys()
            for row, first, stop in zip(rows.searchsorted(group.rows), *shape.bounds(group.rows), strict=True):
                inside = keys[keys.searchsorted(first) : keys.searchsorted(stop)]
                seen[row] += np.diff(inside.searchsorted(edges))
        return seen

    def pictures(self, shape: SequenceShape, cells: int) -> Iterator[Picture]:
        """Pictures for a report, of at most `cells` a side. Raises ConfigError when a file does not fit any more."""
        shares = self.shares(shape, cells, cells) if self.drawn_in_reports else None
        if shares is not None:
            causal = ", causal" if shape.causal else ""
            title = f"{self.label()}, {format_count(shape.length)} tokens{causal}"
            yield Picture(f"{self.kind}_{shape.length}", title, shape.length, 1, hide_future(shares, shape.causal))


class Summand(NamedTuple):
    """One attention of a sum, with its pattern. `gates` [N, H]: factors of its output.

    `pool` above 1: keys and values are the means of whole blocks of `pool` positions, one every `stride`, and each mean
    is at the last position of its block. `pool` is a multiple of `stride`.
    """

    pattern: Pattern
    pool: int
    gates: NDArray[np.float64]
    stride: int = 1


def group_rows(labels: NDArray[np.int64], rows: Positions) -> Iterator[tuple[tuple[int, ...], Positions]]:
    """Rows with the same column of `labels` ([parts, R]) together: that column, and the rows."""
    import numpy as np

    order = np.lexsort(labels[::-1])
    ordered = labels[:, order]
    starts = np.flatnonzero(np.any(ordered[:, 1:] != ordered[:, :-1], axis=0)) + 1
    for members in np.split(order, starts):
        yield tuple(labels[:, members[0]].tolist()), rows[members]


def hide_future(shares: NDArray[np.float64], causal: bool) -> tuple[tuple[float | None, ...], ...]:
    """Cells of a picture: None right of the diagonal if it is causal."""
    cells = map(tuple, shares.tolist())
    if not causal:
        return tuple(cells)
    return tuple(row[: line + 1] + (None,) * (len(row) - line - 1) for line, row in enumerate(cells))


def _counted_shares(pattern: Pattern, shape: SequenceShape, lines: int, columns: int) -> NDArray[np.float64]:
    """[lines, columns] of a picture of head 0: the share of pairs in each cell that is computed, of a few rows each."""
    import numpy as np

    line_edges, key_edges = (
        np.arange(min(shape.length, size) + 1) * shape.length // min(shape.length, size) for size in (lines, columns)
    )
    lengths = np.minimum(np.diff(line_edges), ROWS_PER_LINE)
    sampled = [
        np.linspace(start, end - 1, length).astype(np.int64)
        for (start, end), length in zip(pairwise(line_edges.tolist()), lengths.tolist(), strict=True)
    ]
    seen = pattern.keys_in_columns(shape, np.concatenate(sampled), key_edges)
    seen = np.add.reduceat(seen, lengths.cumsum() - lengths, axis=0)
    return np.asarray(seen / (lengths[:, None] * np.diff(key_edges)))
