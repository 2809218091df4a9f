"""Which rows the branches of dilated attention take: heads by their rows, and segments (semantics.md §2). No tensors.

Row l of a branch of rate r on residue s of a segment that starts at p is position p + s + l·r.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dilabench.patterns.dilated import rows_kept
from dilabench.patterns.pattern import SequenceShape
from dilabench.workload.spec import Workload


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

    `part`: which of a head's parts it is (`KeyGroup.parts`). `first`: none of its (head, row) is touched by a branch
    before it, so its results may be written instead of merged.
    """

    segment_length: int
    rate: int
    part: int
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

    Any pattern that is a union of strided segments has such; dense attention is a single one, every row. Raises
    ValueError for a pattern that is no such union.
    """
    places: dict[tuple[int, int, int], list[Place]] = {}
    # As one sequence: packed ones are cut by those who call per sequence.
    shape = SequenceShape(workload.seq_len, workload.num_heads, workload.num_kv_heads, workload.causal, workload.window)
    for head in range(workload.num_heads):
        segments = workload.pattern.strided_segments(shape, head)
        if segments is None:
            raise ValueError(f"a {workload.pattern.kind} pattern is no union of strided segments")
        for index, (length, rate, offset) in enumerate(segments):
            place = Place(offset, head, head // workload.group_size)
            places.setdefault((rate, index, length), []).append(place)
    ordered = sorted(places.items(), key=lambda item: item[0][:2])
    taken: set[int] = set()
    branches = []
    for (rate, part, length), members in ordered:
        heads = {place.head for place in members}
        branches.append(Branch(length, rate, part, tuple(members), not taken & heads))
        taken |= heads
    return tuple(branches)


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
