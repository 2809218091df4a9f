"""Who sees whom: the matrix C[h, i, j] of a workload (semantics.md §1), by groups of rows that share their keys.

C is never built whole. A pattern yields, for the rows asked for, groups of rows with the same keys before the
causal mask and the window; a row costs only its visible keys, so one row of a million-token workload is cheap.
One function per pattern; `key_groups` chooses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dilabench.spec import DilatedPattern, Workload
from dilabench.work import head_branches, head_offset


@dataclass(frozen=True, slots=True)
class KeyGroup:
    """Rows of one head that have the same keys, causal mask and window aside.

    rows: [R] positions, ascending. keys: [M] positions, ascending. counts: [branches, M], how often each branch gives
    each key; their sum over the branches is C[h, row, key] for every row of the group.
    """

    rows: Tensor
    keys: Tensor
    counts: Tensor


def key_groups(workload: Workload, head: int, positions: Tensor) -> Iterator[KeyGroup]:
    """The groups that cover the rows at `positions` ([R] int64, ascending, on the CPU) of head `head`.

    Rows that no branch covers are in no group or in one without keys. Positions count along the N axis (packed: T).
    """
    groups = _dilated_groups if isinstance(workload.pattern, DilatedPattern) else _dense_groups
    for start, end in workload.sequences:
        first, last = torch.searchsorted(positions, torch.tensor([start, end])).tolist()
        if first == last:
            continue
        for group in groups(workload, head, end - start, positions[first:last] - start):
            yield replace(group, rows=group.rows + start, keys=group.keys + start)


def visible(workload: Workload, rows: Tensor, keys: Tensor) -> Tensor:
    """[R, M] bool: what the causal mask and the window let the rows see of the keys, both positions of one sequence."""
    left, right = reach(workload)
    ahead = keys[None, :] - rows[:, None]
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if left is not None:
        seen &= ahead >= -left
    if right is not None:
        seen &= ahead <= right
    return seen


def reach(workload: Workload) -> tuple[int | None, int | None]:
    """How many positions back and ahead a row sees under window and causal mask; None is unbounded."""
    left, right = (None if side < 0 else side for side in workload.window)
    return left, 0 if workload.causal else right


def multiplicity(workload: Workload, head: int, positions: Tensor) -> Tensor:
    """C[head, positions, :] as [R, N] int64. For tests and small N: memory is R·N."""
    counts = torch.zeros(len(positions), workload.seq_len, dtype=torch.int64)
    for group in key_groups(workload, head, positions):
        index = torch.searchsorted(positions, group.rows)
        block = group.counts.sum(0) * visible(workload, group.rows, group.keys)
        counts[index[:, None], group.keys[None, :]] = block
    return counts


def seen_by(workload: Workload, head: int, key: int) -> Tensor:
    """The positions i with C[head, i, key] > 0, ascending.

    Uses that every pattern here is symmetric in i and j before the causal mask and the window.
    """
    groups = list(key_groups(workload, head, torch.tensor([key])))
    if not groups:
        return torch.zeros(0, dtype=torch.int64)
    candidates = groups[0].keys
    return candidates[visible(workload, candidates, groups[0].rows)[:, 0]]


def covered(workload: Workload, head: int) -> Tensor:
    """[N] bool: the positions that see a key. Whoever is covered sees itself, under any causal mask and window."""
    if not isinstance(workload.pattern, DilatedPattern):
        return torch.ones(workload.seq_len, dtype=torch.bool)
    parts = []
    for start, end in workload.sequences:
        labels = _labels(_branches(workload, head, end - start), torch.arange(end - start))
        parts.append((labels >= 0).any(0))
    return torch.cat(parts)


def _dense_groups(_workload: Workload, _head: int, length: int, rows: Tensor) -> Iterator[KeyGroup]:
    """Every row sees every key once."""
    yield KeyGroup(rows, torch.arange(length), torch.ones(1, length, dtype=torch.int64))


def _dilated_groups(workload: Workload, head: int, length: int, rows: Tensor) -> Iterator[KeyGroup]:
    """A branch (w, r) gives row i the keys of segment i//w on the head's residue, if i is on it (semantics.md §2)."""
    branches = _branches(workload, head, length)
    labels = _labels(branches, rows)
    kinds, kind_of_row = torch.unique(labels, dim=1, return_inverse=True)
    order = torch.argsort(kind_of_row, stable=True)
    sizes = torch.bincount(kind_of_row, minlength=kinds.shape[1]).tolist()
    for segments, members in zip(kinds.T.tolist(), order.split(sizes), strict=True):
        keys, counts = _dilated_keys(branches, segments, length)
        yield KeyGroup(rows[members], keys, counts)


def _branches(workload: Workload, head: int, length: int) -> list[tuple[int, int, int]]:
    """(w, r, offset) of the branches that the head takes part in, in a sequence of `length`."""
    pattern = workload.pattern
    assert isinstance(pattern, DilatedPattern)
    return [
        (min(segment, length), rate, head_offset(pattern, head, rate, workload.num_heads, workload.num_kv_heads))
        for segment, rate in head_branches(pattern, head, workload.num_heads)
    ]


def _labels(branches: list[tuple[int, int, int]], rows: Tensor) -> Tensor:
    """[branches, R]: the segment of each row in each branch, -1 where it is not on the residue.

    Rows with the same labels see the same keys.
    """
    return torch.stack([torch.where(rows % w % r == offset, rows // w, -1) for w, r, offset in branches])


def _dilated_keys(branches: list[tuple[int, int, int]], segments: list[int], length: int) -> tuple[Tensor, Tensor]:
    """The union of the branches' keys, given the segment of each branch (-1: none), with the count per branch."""
    starts = [segment * w for segment, (w, _, _) in zip(segments, branches, strict=True)]
    used = [(start, min(start + w, length)) for start, (w, _, _) in zip(starts, branches, strict=True) if start >= 0]
    low = min((start for start, _ in used), default=0)
    high = max((end for _, end in used), default=0)
    counts = torch.zeros(len(branches), high - low, dtype=torch.int64)
    for row, start, (w, r, offset) in zip(counts, starts, branches, strict=True):
        if start >= 0:
            row[start + offset - low : min(start + w, length) - low : r] = 1
    keys = counts.sum(0).nonzero()[:, 0]
    return keys + low, counts[:, keys]
