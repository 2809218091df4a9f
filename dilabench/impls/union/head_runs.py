"""Heads of a branch cut into runs at constant strides.

In memory the rows of head h on residue s start at s·H·D + h·D. Heads of one residue lie r heads apart; heads of
successive residues lie on a diagonal, (H + 1)·D apart. Either can be one axis of a view.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dilabench.impls.union.branches import ORIGIN, Place


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


def fewest_runs(places: Sequence[Place], group_size: int, stackable: bool) -> list[tuple[Run, Progression]]:
    """Heads cut into as few runs as there can be, each with the stack that it repeats in.

    Only where asked are equal runs put on top of each other; a run alone is a stack of one.
    """
    best: list[tuple[Run, Progression]] = []
    for apart in (1, group_size):
        for order in _orders(places, apart):
            runs = list(_runs(order))
            stacks = list(_stacks(runs)) if stackable else [(run, Progression(1, ORIGIN)) for run in runs]
            if not best or len(stacks) < len(best):
                best = stacks
    return best


def _orders(places: Sequence[Place], apart: int) -> tuple[list[Place], list[Place]]:
    """Heads of one residue together, and residues in turn (the diagonal).

    Each for every `apart`-th head by itself: with `apart` the group size, heads of the same place in their groups.
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
    """From the first place to the second; none where it leads backwards, for no view has a negative stride."""
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
