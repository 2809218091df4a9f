"""Which rows the branches of dilated attention take: heads by their rows, and segments (semantics.md §2). No tensors.

Row l of a branch of rate r on residue s of a segment that starts at p is position p + s + l·r.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dilabench.workload.spec import DilatedPattern, Workload
from dilabench.workload.work import head_branches, head_offset, rows_kept


class Place(NamedTuple):
    """Where rows start, or the step from one start to another: position, query head, key/value head."""

    position: int
    head: int
    kv_head: int

    def step_to(self, other: Place) -> Place:
        """The step that leads from here to the other place."""
        return Place(other.position - self.position, other.head - self.head, other.kv_head - self.kv_head)

    def after(self, step: Place, times: int = 1) -> Place:
        """The place `times` steps from here."""
        return Place(*(start + times * by for start, by in zip(self, step, strict=True)))

    @property
    def key(self) -> tuple[int, int]:
        """(position, key/value head): equal for query heads that read the same keys."""
        return self.position, self.kv_head


ORIGIN = Place(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Branch:
    """One branch (w, r) and the heads that take part in it.

    `first`: none of its (head, row) is touched by a branch before it, so its results may be written instead of merged.
    """

    segment_length: int
    rate: int
    places: tuple[Place, ...]
    first: bool


@dataclass(frozen=True, slots=True)
class Segments:
    """`count` segments of `length` positions, one after another from `start`."""

    start: int
    count: int
    length: int


def branches_of(workload: Workload) -> tuple[Branch, ...]:
    """The branches of a workload by rising rate, so that one that covers every row comes first.

    A dense pattern is one branch: a single segment, every row.
    """
    N = workload.seq_len
    pattern = workload.pattern
    if not isinstance(pattern, DilatedPattern):
        pattern = DilatedPattern(segment_lengths=(N,), dilation_rates=(1,))
    heads = range(workload.num_heads)
    if pattern.heads == "all":
        members = [(branch, list(heads)) for branch in sorted(pattern.branches, key=lambda branch: branch[1])]
    else:
        groups: dict[tuple[int, int], list[int]] = {}
        for head in heads:
            groups.setdefault(head_branches(pattern, head, workload.num_heads)[0], []).append(head)
        members = list(groups.items())
    return tuple(
        Branch(min(length, N), rate, _places(workload, pattern, rate, chosen), pattern.heads == "grouped" or index == 0)
        for index, ((length, rate), chosen) in enumerate(members)
    )


def covers_every_row(branches: Sequence[Branch]) -> bool:
    """Whether the first branches alone reach every (head, row): then the output needs no initial value."""
    return all(branch.rate == 1 for branch in branches if branch.first)


def segments_of(branch: Branch, seq_len: int) -> Iterator[Segments]:
    """The whole segments of a branch, then the short one at the end if there is one."""
    count, rest = divmod(seq_len, branch.segment_length)
    yield Segments(0, count, branch.segment_length)
    if rest:
        yield Segments(count * branch.segment_length, 1, rest)


def places_by_rows(branch: Branch, segments: Segments) -> dict[int, list[Place]]:
    """Heads by the number of rows that they keep in a segment; a head that keeps none is left out."""
    by_rows: dict[int, list[Place]] = {}
    for place in branch.places:
        rows = rows_kept(segments.length, branch.rate, place.position)
        if rows:
            by_rows.setdefault(rows, []).append(place)
    return by_rows


def _places(workload: Workload, pattern: DilatedPattern, rate: int, heads: Sequence[int]) -> tuple[Place, ...]:
    H, K = workload.num_heads, workload.num_kv_heads
    return tuple(Place(head_offset(pattern, head, rate, H, K), head, head // workload.group_size) for head in heads)
