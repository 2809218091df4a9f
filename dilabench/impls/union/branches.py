"""The rows of the branches of dilated attention: heads by their rows, and segments (semantics.md §2). No tensors.

Row l of a branch of rate r on residue s of a segment that starts at p is position p + s + l·r. In memory the rows of
head h on residue s start at s·H·D + h·D. Heads of one residue have a distance of r heads; heads of successive residues
are on a diagonal, at a distance of (H + 1)·D. Either can be one axis of a view: heads are cut into runs at constant
strides.

A branch nests in one of a lower rate if its rows are among the other's, and its segments are unions of the other's: its
pairs in one of those segments are pairs of the other, too. The branches of a head form chains of such branches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from dilabench.patterns.dilated import rows_kept
from dilabench.patterns.pattern import SequenceShape
from dilabench.workload.spec import Workload


class Place(NamedTuple):
    """The start of rows, or the step from one start to another: position, query head, key/value head."""

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
    """The branches of a workload by ascending rate, so that one that covers every row comes first.

    Any pattern that is a union of strided segments has them; dense attention is a single one, every row. Raises
    ValueError for a pattern that is no such union.
    """
    places: dict[tuple[int, int, int], list[Place]] = {}
    # As one sequence: callers split packed ones.
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
    """Heads by the number of rows that they keep in a segment, without heads that keep none."""
    by_rows: dict[int, list[Place]] = {}
    for place in branch.places:
        rows = rows_kept(segments.length, branch.rate, place.position)
        if rows:
            by_rows.setdefault(rows, []).append(place)
    return by_rows


@dataclass(frozen=True, slots=True)
class Progression:
    """`count` places, each a `step` after the one before."""

    count: int
    step: Place


@dataclass(frozen=True, slots=True)
class Run:
    """Query heads from `start` at constant strides; they share the key/value heads in equal, successive groups."""

    start: Place
    heads: Progression
    keys: Progression


@lru_cache(maxsize=256)
def fewest_runs(places: tuple[Place, ...], group_size: int, stackable: bool) -> tuple[tuple[Run, Progression], ...]:
    """Heads cut into as few runs as there can be, each with the stack that it repeats in.

    Equal runs are put on top of each other only if `stackable`; a run alone is a stack of one. Cached, because each
    rank plans for all ranks, and each step of training has another packing of the same heads.
    """
    best: tuple[tuple[Run, Progression], ...] = ()
    for apart in (1, group_size):
        for order in _orders(places, apart):
            runs = list(_runs(order))
            stacks = tuple(_stacks(runs)) if stackable else tuple((run, Progression(1, ORIGIN)) for run in runs)
            if not best or len(stacks) < len(best):
                best = stacks
    return best


def _orders(places: Sequence[Place], apart: int) -> tuple[list[Place], list[Place]]:
    """Heads of one residue together, and successive residues (the diagonal).

    Separately for every `apart`-th head: with `apart` the group size, heads of the same place in their groups.
    """
    earlier: Counter[tuple[int, int]] = Counter()
    turns = {}
    for place in places:
        kind = place.head % apart, place.position
        turns[place] = earlier[kind]
        earlier[kind] += 1
    return (
        sorted(places, key=lambda place: (place.head % apart, place.position, place.head)),
        sorted(places, key=lambda place: (place.head % apart, turns[place], place.position)),
    )


def _runs(places: Sequence[Place]) -> Iterator[Run]:
    """The heads in their order, cut into the longest runs."""
    while places:
        run = _longest_run(places)
        yield run
        places = places[run.heads.count :]


def _longest_run(places: Sequence[Place]) -> Run:
    """The longest beginning of the list that has constant strides, for queries and for the keys they share."""
    step = _step(places)
    count = _steady(places, step)
    shared = 1
    while shared < count and places[shared].key == places[0].key:
        shared += 1
    leaders = places[:count:shared]
    key_step = _step(leaders)
    keys = 1
    while keys < count // shared and _same_keys(places[keys * shared : (keys + 1) * shared], leaders, key_step, keys):
        keys += 1
    return Run(places[0], Progression(keys * shared, step), Progression(keys, key_step))


def _same_keys(group: Sequence[Place], leaders: Sequence[Place], step: Place, index: int) -> bool:
    expected = leaders[0].after(step, index).key
    return all(place.key == expected for place in group)


def _step(places: Sequence[Place]) -> Place:
    """The stride from the first place to the second; None if it is negative, which no view can have."""
    step = places[0].step_to(places[1]) if len(places) > 1 else ORIGIN
    return step if min(step) >= 0 else ORIGIN


def _steady(places: Sequence[Place], step: Place) -> int:
    """How many places at the start of the list follow each other by the step, for queries."""
    count = 1
    while count < len(places) and places[count][:2] == places[0].after(step, count)[:2]:
        count += 1
    return count


def _stacks(runs: Sequence[Run]) -> Iterator[tuple[Run, Progression]]:
    """Equal runs at constant strides, put on top of each other; no key/value row may come twice."""
    while runs:
        first = runs[0]
        step = _step([run.start for run in runs])
        count = 1
        keys = _keys_of(first)
        while count < len(runs):
            run = runs[count]
            follows = run.start == first.start.after(step, count)
            if not follows or (run.heads, run.keys) != (first.heads, first.keys) or keys & _keys_of(run):
                break
            keys |= _keys_of(run)
            count += 1
        yield first, Progression(count, step)
        runs = runs[count:]


def _keys_of(run: Run) -> set[tuple[int, int]]:
    return {run.start.after(run.keys.step, index).key for index in range(run.keys.count)}


# On a CPU, smaller calls cost more than pairs that are computed twice.
LEAST_ROWS = 256


@dataclass(frozen=True, slots=True)
class Link:
    """One branch of a chain: segment length and rate, the first row of a segment, and the head that it is of."""

    branch: int
    length: int
    rate: int
    place: Place

    def holds(self, other: Link, seq_len: int) -> bool:
        """Return True if the other branch of the same head nests in this one, without some of its rows."""
        sparser = other.rate > self.rate and other.rate % self.rate == 0
        same_rows = (other.place.position - self.place.position) % self.rate == 0
        unions = other.length >= seq_len or other.length % self.length == 0
        return sparser and same_rows and unions and other.length >= self.length


Chain = tuple[Link, ...]


def chains(branches: Sequence[Branch], seq_len: int, least_rows: int = LEAST_ROWS) -> list[Chain]:
    """The branches of every head, by ascending rate, cut into chains in which each nests in the one before.

    A chain ends where fewer than `least_rows` rows of a branch would lie in one of its shortest segments.
    """
    links: dict[int, list[Link]] = {}
    for index, branch in enumerate(branches):
        for place in branch.places:
            links.setdefault(place.head, []).append(Link(index, branch.segment_length, branch.rate, place))
    found: list[Chain] = []
    for _, of_head in sorted(links.items()):
        chain: Chain = ()
        for link in of_head:
            if chain and not _goes_on(chain, link, seq_len, least_rows):
                found.append(chain)
                chain = ()
            chain = (*chain, link)
        found.append(chain)
    return found


def _goes_on(chain: Chain, link: Link, seq_len: int, least_rows: int) -> bool:
    shortest = chain[0].length
    worth_it = shortest == link.length or shortest >= least_rows * link.rate
    # Its rows must begin alike in each of the shorter segments.
    regular = all(shorter.length >= seq_len or shorter.length % link.rate == 0 for shorter in chain)
    return worth_it and regular and chain[-1].holds(link, seq_len)
