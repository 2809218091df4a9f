"""Which query sees which key in a workload: its pattern over its sequences, in positions along the N axis (packed: T).

Queries count as keys do: with M queries over N keys, query i is at position N - M + i.

No torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dilabench.workload.spec import UNBOUNDED, Workload

if TYPE_CHECKING:
    from dilabench.patterns.pattern import KeyGroup, Positions


def key_groups(workload: Workload, head: int, positions: Positions) -> Iterator[tuple[int, KeyGroup]]:
    """The groups that cover the rows at `positions` ([R] int64, ascending) of head `head`, before mask and window.

    Each with the position at which its sequence begins: rows and keys of the group count from there.
    """
    for (start, end), shape in zip(workload.sequences, workload.shapes, strict=True):
        first, stop = positions.searchsorted([start, end]).tolist()
        if first < stop:
            for group in workload.pattern.counts(shape, head, positions[first:stop] - start):
                yield start, group


def alike_heads(workload: Workload) -> list[list[int]]:
    """The heads in groups for which C is the same."""
    groups: dict[Hashable, list[int]] = {}
    for head in range(workload.num_heads):
        key = tuple(workload.pattern.head_key(shape, head) for shape in dict.fromkeys(workload.shapes))
        groups.setdefault(key, []).append(head)
    return list(groups.values())


def seen_by(workload: Workload, head: int, key: int) -> Positions:
    """The positions i with a query and C[head, i, key] > 0 under causal mask and window, ascending."""
    at = next(index for index, (_, end) in enumerate(workload.sequences) if key < end)
    (start, _), shape = workload.sequences[at], workload.shapes[at]
    rows = workload.pattern.rows_seeing(shape, head, key - start)
    first, stop = shape.bounds(rows)
    seen: Positions = start + rows[(first <= key - start) & (key - start < stop)]
    return seen[seen.searchsorted(workload.first_row) :]


def covered(workload: Workload, head: int) -> NDArray[np.bool_]:
    """[M]: the rows that see a key, of all positions with a query."""
    seen = np.concatenate([workload.pattern.covered(shape, head) for shape in workload.shapes])
    return seen[workload.first_row :]


def edges(workload: Workload) -> Positions:
    """The starts of sequences and of structures inside them: positions, ascending, without 0."""
    starts = np.array([start for start, _ in workload.sequences])
    inside = [
        start + workload.pattern.edges(shape)
        for (start, _), shape in zip(workload.sequences, workload.shapes, strict=True)
    ]
    positions: Positions = np.unique(np.concatenate([starts, *inside]))
    return positions[1:]


def hides_nothing(workload: Workload) -> bool:
    """Return True if every query sees all keys of its sequence that a causal mask does not hide."""
    return workload.is_dense and workload.window == UNBOUNDED
