"""LongNet's dilated attention: branches of strided segments, merged as one softmax (semantics.md §2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import lcm
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import model_validator

from dilabench.patterns.answers import (
    KeyGroup,
    Pairs,
    SequenceShape,
    StridedSegments,
    ZeroKeys,
    windowed_pairs,
)
from dilabench.patterns.pattern import Pattern, group_rows
from dilabench.units import format_count
from dilabench.validation import Model, Sizes, SizesOrAuto, validated

if TYPE_CHECKING:
    import numpy as np
    from hypothesis.strategies import SearchStrategy
    from numpy.typing import NDArray

    from dilabench.patterns.answers import Positions

Heads = Literal["all", "grouped"]
Offset = Literal["modulo", "blocked"]
OffsetBy = Literal["head", "kv_head"]
MergeGrad = Literal["exact", "detached"]
Padding = Literal["masked", "zero_key"]

# The branches `auto` (catalog.md §3) are constant along a range, so that only the length changes.
AUTO_SEGMENTS = (2048, 4096, 8192, 16384, 32768)
AUTO_RATES = (1, 2, 4, 8, 16)
MAX_COUNTED_POSITIONS = 2**22


class DilatedRequest(Model):
    """Request fields of a dilated pattern; `auto` segments and rates come from the catalogue."""

    segment_lengths: SizesOrAuto = "auto"
    dilation_rates: SizesOrAuto = "auto"
    heads: Heads = "all"
    offset: Offset = "modulo"
    offset_by: OffsetBy = "head"
    merge_grad: MergeGrad = "exact"
    padding: Padding = "masked"


class DilatedPattern(Pattern):
    """Branches (segment length w, dilation rate r).

    In a branch i sees j if both are in the same segment of w positions and both are on the head's residue
    `offset(h, r)` inside it. Keys that several branches share are counted several times.
    """

    kind: Literal["dilated"] = "dilated"
    segment_lengths: Sizes
    dilation_rates: Sizes
    heads: Heads = "all"
    offset: Offset = "modulo"
    offset_by: OffsetBy = "head"
    merge_grad: MergeGrad = "exact"
    padding: Padding = "masked"
    drawn_in_reports: ClassVar[bool] = False

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        segments, rates = self.segment_lengths, self.dilation_rates
        if len(segments) != len(rates):
            raise ValueError(
                f"{len(segments)} segment lengths {list(segments)} but {len(rates)} dilation rates {list(rates)}; "
                "they pair up, so give the same number of each"
            )
        if not segments:
            raise ValueError("a dilated pattern needs at least one branch; give for example segment_lengths=2K,4K")
        return self

    @classmethod
    def request_model(cls) -> type[Model]:
        """Includes `auto` segments and rates."""
        return DilatedRequest

    @classmethod
    def from_request(cls, fields: Mapping[str, Any]) -> Self:
        """Fill in `auto`: given segments get rates 1, 2, 4, …; given rates get the catalogue's first segments."""
        request = validated(DilatedRequest, dict(fields))
        segments, rates = request.segment_lengths, request.dilation_rates
        if segments == "auto":
            segments = AUTO_SEGMENTS if rates == "auto" else AUTO_SEGMENTS[: len(rates)]
        if rates == "auto":
            rates = AUTO_RATES if len(segments) == len(AUTO_RATES) else tuple(2**k for k in range(len(segments)))
        return validated(cls, {**request.model_dump(), "segment_lengths": segments, "dilation_rates": rates})

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Rates that do not divide their segments, segments beyond the sequence, uncovered rows, every option."""
        covering: dict[str, Any] = {"segment_lengths": (16, 48, 256), "dilation_rates": (1, 3, 6)}
        sparse: dict[str, Any] = {"segment_lengths": (7, 30), "dilation_rates": (2, 4)}
        fields: tuple[dict[str, Any], ...] = (
            covering,
            sparse,
            {**sparse, "offset": "blocked"},
            {**covering, "heads": "grouped"},
            {**covering, "offset_by": "kv_head"},
            {**covering, "merge_grad": "detached"},
            {**covering, "segment_lengths": (16, 48, 252), "padding": "zero_key"},
        )
        return tuple(cls.model_validate(variant) for variant in fields)

    @classmethod
    def trials(cls) -> Mapping[str, Mapping[str, Any]]:
        """Segments that divide nothing or are longer than the sequence, rates that do not divide them, every option."""
        branches = {"segment_lengths": (48, 125, 1024), "dilation_rates": (1, 3, 4)}
        return {
            "causal": branches,
            "full": {**branches, "causal": False},
            "window": {**branches, "window": (40, 0)},
            "blocked": {**branches, "offset": "blocked", "offset_by": "kv_head"},
            "grouped": {**branches, "heads": "grouped"},
            "detached": {**branches, "merge_grad": "detached"},
            "zero_key": {
                "segment_lengths": (48, 126, 1024),
                "dilation_rates": (1, 3, 4),
                "causal": False,
                "padding": "zero_key",
            },
            "scale": {**branches, "scale": 0.25, "num_kv_heads": 4},
        }

    @classmethod
    def strategy(cls, max_seq_len: int) -> SearchStrategy[Self]:
        """Any segments and rates, up to four branches, every option but a detached merge and zero keys."""
        from hypothesis import strategies as st

        def sizes(count: int, largest: int) -> SearchStrategy[list[int]]:
            return st.lists(st.integers(1, largest), min_size=count, max_size=count)

        return st.integers(1, 4).flatmap(
            lambda count: st.builds(
                cls,
                segment_lengths=sizes(count, max_seq_len + 8).map(tuple),
                dilation_rates=sizes(count, 12).map(tuple),
                heads=st.sampled_from(["all", "grouped"]),
                offset=st.sampled_from(["modulo", "blocked"]),
                offset_by=st.sampled_from(["head", "kv_head"]),
            )
        )

    @property
    def branches(self) -> tuple[tuple[int, int], ...]:
        """The requested (segment length, dilation rate) pairs."""
        return tuple(zip(self.segment_lengths, self.dilation_rates, strict=True))

    def details(self, shapes: Sequence[SequenceShape]) -> str:  # noqa: ARG002
        """The kind only: branches would fill the line."""
        return self.kind

    def label(self) -> str:
        """'dilated w 2K,4K r 1,2', and options that differ from the default."""
        segments = ",".join(map(format_count, self.segment_lengths))
        named = {"kind", "segment_lengths", "dilation_rates"}
        unusual = self.model_dump(exclude_defaults=True, exclude=named)
        words = [f"dilated w {segments} r {','.join(map(str, self.dilation_rates))}"]
        return " ".join([*words, *(f"{name}={value}" for name, value in unusual.items())])

    def head_offset(self, head: int, rate: int, num_heads: int, num_kv_heads: int) -> int:
        """offset(h, r): the residue that query head `head` keeps in a branch of dilation `rate`."""
        index, count = head, num_heads
        if self.offset_by == "kv_head":
            index, count = head // (num_heads // num_kv_heads), num_kv_heads
        return index % rate if self.offset == "modulo" else index // -(-count // rate)

    def head_branches(self, head: int, num_heads: int) -> tuple[tuple[int, int], ...]:
        """The (w, r) that head `head` takes part in: all of them, or the one of its group.

        Grouped: heads are split over the branches in order, sizes differing by at most one, larger groups first.
        """
        branch_of_head = self.branch_of_head(num_heads)
        if branch_of_head is None:
            return self.branches
        if head >= num_heads:
            raise ValueError(f"head {head} is not below num_heads {num_heads}")
        return (self.branches[branch_of_head[head]],)

    def branch_of_head(self, num_heads: int) -> tuple[int, ...] | None:
        """The index of each head's only branch; None if each takes part in all."""
        if self.heads == "all":
            return None
        size, larger = divmod(num_heads, len(self.branches))
        return tuple(index for index in range(len(self.branches)) for _ in range(size + (index < larger)))

    def residues(self, num_heads: int, num_kv_heads: int) -> tuple[tuple[int, ...], ...]:
        """The residue that each head keeps, for each branch; -1 for heads that have no part in it."""
        of_heads = self.branch_of_head(num_heads) or (None,) * num_heads
        return tuple(
            tuple(
                self.head_offset(head, r, num_heads, num_kv_heads) if of_head in (None, branch) else -1
                for head, of_head in enumerate(of_heads)
            )
            for branch, (_, r) in enumerate(self.branches)
        )

    def strided_segments(self, shape: SequenceShape, head: int) -> tuple[StridedSegments, ...]:
        """The branches of a head, with segments clamped to the sequence."""
        return tuple(
            StridedSegments(min(w, shape.length), r, self.head_offset(head, r, shape.num_heads, shape.num_kv_heads))
            for w, r in self.head_branches(head, shape.num_heads)
        )

    def counts(self, shape: SequenceShape, head: int, rows: Positions) -> Iterator[KeyGroup]:
        """A branch gives row i the keys of segment i // w on the head's residue, if i is on it."""
        import numpy as np

        if not len(rows):
            return
        branches = self.strided_segments(shape, head)
        labels = np.stack([np.where(rows % w % r == offset, rows // w, -1) for w, r, offset in branches])
        for segments, members in group_rows(labels, rows):
            yield KeyGroup(
                members, tuple(_keys(branch, at, shape.length) for branch, at in zip(branches, segments, strict=True))
            )

    def head_key(self, shape: SequenceShape, head: int) -> Hashable:
        """Heads with the same branches have equal keys."""
        return self.strided_segments(shape, head)

    def rows_seeing(self, shape: SequenceShape, head: int, key: int) -> Positions:
        """The relation is symmetric: these are the keys of the row `key`."""
        import numpy as np

        return next(self.counts(shape, head, np.array([key]))).keys()

    def covered(self, shape: SequenceShape, head: int) -> NDArray[np.bool_]:
        """A row on a residue sees itself, under any causal mask and window."""
        import numpy as np

        rows = np.arange(shape.length)
        on = [rows % w % r == offset for w, r, offset in self.strided_segments(shape, head)]
        seen: NDArray[np.bool_] = np.any(on, axis=0)
        return seen

    def pairs(self, shape: SequenceShape) -> Pairs:
        """Computed in closed form; the pairs of the largest branch are distinct."""
        of_branch: Counter[int] = Counter()
        for head in range(shape.num_heads):
            for index, branch in enumerate(self.strided_segments(shape, head)):
                of_branch[index] += branch_pairs(branch, shape)
        return Pairs(of_branch.total(), max(of_branch.values()))

    def reached_rows(self, shape: SequenceShape) -> tuple[int, int]:
        """Rows on any residue of a head, or of the heads that share keys."""
        group = shape.num_heads // shape.num_kv_heads
        of_head = [frozenset(self.strided_segments(shape, head)) for head in range(shape.num_heads)]
        shared = [
            frozenset[StridedSegments]().union(*of_head[at : at + group]) for at in range(0, shape.num_heads, group)
        ]
        return tuple(sum(rows_on(segments, shape.length) for segments in groups) for groups in (of_head, shared))  # type: ignore[return-value]

    def keys_per_row(self, length: int) -> int:
        """The rows that the fullest segment keeps."""
        return max(-(-min(w, length) // r) for w, r in self.branches)

    def edges(self, shape: SequenceShape) -> Positions:
        """The starts of the segments."""
        import numpy as np

        return np.unique(np.concatenate([np.arange(0, shape.length, w) for w in self.segment_lengths]))

    @property
    def cut_length(self) -> int | None:
        """The least common multiple of all segment lengths. None with zero keys: a separate last part has others."""
        return None if self.has_zero_keys else lcm(*self.segment_lengths)

    @property
    def parts(self) -> int:
        """One per branch that a head takes part in."""
        return 1 if self.heads == "grouped" else len(self.segment_lengths)

    def near_misses(self) -> Mapping[str, Pattern]:
        """The other value of every option, and the variants that public projects compute (semantics.md §3)."""
        options: dict[str, tuple[str, ...]] = {
            "offset": ("modulo", "blocked"),
            "offset_by": ("head", "kv_head"),
            "heads": ("all", "grouped"),
            "merge_grad": ("exact", "detached"),
            "padding": ("masked", "zero_key"),
        }
        variants: dict[str, Pattern] = {
            f"{name}={value}": self.model_copy(update={name: value})
            for name, values in options.items()
            for value in values
            if value != getattr(self, name)
        }
        return {**variants, "offset=0 in every head": _WithoutOffset.model_validate(self.model_dump())}

    def zero_keys(self, shape: SequenceShape, head: int) -> Iterator[ZeroKeys]:
        """Padding past the end of a row's segment, up to a multiple of the rate, on the head's residue.

        torchscale pads like this (semantics.md §2); a causal mask hides all of it.
        """
        if not self.has_zero_keys or shape.causal:
            return
        for part, (w, r, offset) in enumerate(self.strided_segments(shape, head)):
            # If the rate divides the segment length, only the last segment can be short.
            for start in range(0 if w % r else (shape.length - 1) // w * w, shape.length, w):
                stop = min(start + w, shape.length)
                rows = range(start + offset, stop, r)
                if rows and (count := rows_kept(-(-w // r) * r, r, offset) - len(rows)):
                    yield ZeroKeys(part, rows, count)

    @property
    def has_zero_keys(self) -> bool:
        """Return True for padding=zero_key."""
        return self.padding == "zero_key"

    def why_not_over(self, shape: SequenceShape) -> str | None:
        """Refuse zero keys inside a sequence, for which torchscale misplaces rows of its result."""
        for w, r in self.branches if self.has_zero_keys else ():
            if w < shape.length and w % r:
                return (
                    f"padding=zero_key over {shape.length} positions in segments of {w} at rate {r}: {r} does not "
                    f"divide {w}, so that torchscale shifts its output from one segment to the next, which is not "
                    f"attention; use padding=masked, segments of a multiple of {r}, or at most {w} positions"
                )
        return None

    @property
    def is_detached(self) -> bool:
        """Return True for merge_grad=detached."""
        return self.merge_grad == "detached"

    @property
    def merged_exactly(self) -> Self:
        """The same with merge_grad=exact."""
        return self.model_copy(update={"merge_grad": "exact"})

    @property
    def segment_sizes(self) -> tuple[int, ...]:
        """The segment lengths of the branches."""
        return self.segment_lengths

    @property
    def has_grouped_heads(self) -> bool:
        """Return True for heads=grouped."""
        return self.heads == "grouped"


class _WithoutOffset(DilatedPattern):
    """Every head on the first position of each step."""

    def head_offset(self, head: int, rate: int, num_heads: int, num_kv_heads: int) -> int:  # noqa: ARG002
        """None."""
        return 0


def rows_kept(length: int, rate: int, offset: int) -> int:
    """Number of rows of a segment of `length` positions on the residue: ceil((length - offset) / rate), at least 0."""
    return max(0, -(-(length - offset) // rate))


def branch_pairs(branch: StridedSegments, shape: SequenceShape) -> int:
    """Visible pairs of one head in a branch (semantics.md §2)."""
    w, r, offset = branch
    # Window distances count positions; neighbouring rows of a branch are `rate` positions apart.
    left, right = (side if side < 0 else side // r for side in shape.window)
    full, tail = divmod(shape.length, w)
    whole = windowed_pairs(rows_kept(w, r, offset), shape.causal, left, right)
    return full * whole + windowed_pairs(rows_kept(tail, r, offset), shape.causal, left, right)


def _keys(branch: StridedSegments, segment: int, length: int) -> range:
    """Keys of a branch in a segment; empty for segment -1."""
    w, r, offset = branch
    return range(segment * w + offset, min((segment + 1) * w, length), r) if segment >= 0 else range(0)


@lru_cache(maxsize=4096)
def rows_on(branches: frozenset[StridedSegments], length: int) -> int:
    """Number of positions of a sequence that are on any of the residues.

    If their period is too long to count, the number of the residue that keeps most, a lower bound.
    """
    most = max(length // w * rows_kept(w, r, offset) + rows_kept(length % w, r, offset) for w, r, offset in branches)
    # Segments matter only if their length is no multiple of the rate, or the sequence has a single one.
    period = lcm(*(r if w % r == 0 or w == length else w for w, r, _ in branches))
    counted = min(period, length)
    if len(branches) == 1 or most == length or counted > MAX_COUNTED_POSITIONS:
        return most
    import numpy as np

    position = np.arange(counted)
    on = np.any([position % w % r == offset for w, r, offset in branches], axis=0)
    full, tail = divmod(length, period)
    return full * int(on.sum()) + int(on[:tail].sum())
