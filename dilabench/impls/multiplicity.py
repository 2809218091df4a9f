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

from dilabench.patterns.block_masks import block_mask
from dilabench.workload.spec import BlockSparsePattern, DilatedPattern, Workload
from dilabench.workload.work import head_branches, head_offset, rows_kept


@dataclass(frozen=True, slots=True)
class KeyGroup:
    """Rows of one head that have the same keys, causal mask and window aside.

    rows: [R] positions, ascending, on the CPU. keys: [M] positions, ascending. counts: [branches, M], how often each
    branch gives each key; their sum over the branches is C[h, row, key] for every row of the group.
    """

    rows: Tensor
    keys: Tensor
    counts: Tensor


def key_groups(
    workload: Workload, head: int, positions: Tensor, device: torch.device | str = "cpu"
) -> Iterator[KeyGroup]:
    """The groups that cover the rows at `positions` ([R] int64, ascending, on the CPU) of head `head`.

    Rows that no branch covers are in no group or in one without keys. Positions count along the N axis (packed: T).
    `device`: where keys and counts are made, for making long ones on the CPU and moving them takes longer than using
    them on a GPU.
    """
    groups = _GROUPS[workload.pattern.kind]
    for start, end in workload.sequences:
        first, last = torch.searchsorted(positions, torch.tensor([start, end])).tolist()
        if first == last:
            continue
        for group in groups(workload, head, end - start, positions[first:last] - start, torch.device(device)):
            yield replace(group, rows=group.rows + start, keys=group.keys + start)


def visible(workload: Workload, rows: Tensor, keys: Tensor) -> Tensor:
    """[R, M] bool: what the causal mask and the window let the rows see of the keys, both positions of one sequence."""
    left, right = reach(workload)
    seen = torch.ones(len(rows), len(keys), dtype=torch.bool, device=keys.device)
    # Bounds are moved by rows, not pairs: a matrix of distances would be as large as the scores.
    if left is not None:
        seen &= keys[None, :] >= (rows - left)[:, None]
    if right is not None:
        seen &= keys[None, :] <= (rows + right)[:, None]
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


def alike_heads(workload: Workload) -> list[list[int]]:
    """The heads in groups for which C is the same."""
    masks = isinstance(workload.pattern, BlockSparsePattern) and workload.pattern.per_head_masks
    groups: dict[tuple[object, ...], list[int]] = {}
    for head in range(workload.num_heads):
        own = head if masks else None
        groups.setdefault((own, *_branches(workload, head, workload.seq_len)), []).append(head)
    return list(groups.values())


def seen_by(workload: Workload, head: int, key: int) -> Tensor:
    """The positions i with C[head, i, key] > 0, ascending.

    Dense and dilated patterns are symmetric in i and j before the causal mask and the window; a block mask is not.
    """
    if isinstance(workload.pattern, BlockSparsePattern):
        candidates = _rows_of_key_blocks(workload, head, key)
        return candidates[visible(workload, candidates, torch.tensor([key]))[:, 0]]
    groups = list(key_groups(workload, head, torch.tensor([key])))
    if not groups:
        return torch.zeros(0, dtype=torch.int64)
    candidates = groups[0].keys
    return candidates[visible(workload, candidates, groups[0].rows)[:, 0]]


def covered(workload: Workload, head: int) -> Tensor:
    """[N] bool: the positions that see a key.

    Who is covered by a dense or dilated pattern sees itself, under any causal mask and window.
    """
    if isinstance(workload.pattern, BlockSparsePattern):
        parts = [_rows_with_keys(workload, head, end - start) for start, end in workload.sequences]
        return torch.cat(parts)
    if not isinstance(workload.pattern, DilatedPattern):
        return torch.ones(workload.seq_len, dtype=torch.bool)
    parts = []
    for start, end in workload.sequences:
        labels = _labels(_branches(workload, head, end - start), torch.arange(end - start))
        parts.append((labels >= 0).any(0))
    return torch.cat(parts)


def _dense_groups(
    _workload: Workload, _head: int, length: int, rows: Tensor, device: torch.device
) -> Iterator[KeyGroup]:
    """Every row sees every key once."""
    yield KeyGroup(rows, torch.arange(length, device=device), torch.ones(1, length, dtype=torch.int64, device=device))


def _dilated_groups(
    workload: Workload, head: int, length: int, rows: Tensor, device: torch.device
) -> Iterator[KeyGroup]:
    """A branch (w, r) gives row i the keys of segment i//w on the head's residue, if i is on it (semantics.md §2)."""
    branches = _branches(workload, head, length)
    labels = _labels(branches, rows)
    kinds, kind_of_row = torch.unique(labels, dim=1, return_inverse=True)
    order = torch.argsort(kind_of_row, stable=True)
    sizes = torch.bincount(kind_of_row, minlength=kinds.shape[1]).tolist()
    for segments, members in zip(kinds.T.tolist(), order.split(sizes), strict=True):
        keys, counts = _dilated_keys(branches, segments, length, device)
        yield KeyGroup(rows[members], keys, counts)


def _branches(workload: Workload, head: int, length: int) -> list[tuple[int, int, int]]:
    """(w, r, offset) of the branches that the head takes part in, in a sequence of `length`.

    A pattern without branches is one that holds everything.
    """
    pattern = workload.dilated
    if pattern is None:
        return [(length, 1, 0)]
    return [
        (min(segment, length), rate, head_offset(pattern, head, rate, workload.num_heads, workload.num_kv_heads))
        for segment, rate in head_branches(pattern, head, workload.num_heads)
    ]


def _labels(branches: list[tuple[int, int, int]], rows: Tensor) -> Tensor:
    """[branches, R]: the segment of each row in each branch, -1 where it is not on the residue.

    Rows with the same labels see the same keys.
    """
    return torch.stack([torch.where(rows % w % r == offset, rows // w, -1) for w, r, offset in branches])


def _dilated_keys(
    branches: list[tuple[int, int, int]], segments: list[int], length: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The union of the branches' keys, given the segment of each branch (-1: none), with the count per branch."""
    starts = [segment * w for segment, (w, _, _) in zip(segments, branches, strict=True)]
    used = [(start, min(start + w, length)) for start, (w, _, _) in zip(starts, branches, strict=True) if start >= 0]
    low = min((start for start, _ in used), default=0)
    high = max((end for _, end in used), default=0)
    counts = torch.zeros(len(branches), high - low, dtype=torch.int64, device=device)
    for row, start, (w, r, offset) in zip(counts, starts, branches, strict=True):
        if start >= 0:
            row[start + offset - low : min(start + w, length) - low : r] = 1
    keys = counts.sum(0).nonzero()[:, 0]
    return keys + low, counts[:, keys]


def _block_sparse_groups(
    workload: Workload, head: int, length: int, rows: Tensor, device: torch.device
) -> Iterator[KeyGroup]:
    """A block mask lies over the rows that each branch keeps in a segment (no branches: over all rows)."""
    branches = _branches(workload, head, length)
    labels = torch.stack([_block_labels(workload, branch, rows) for branch in branches])
    kinds, kind_of_row = torch.unique(labels, dim=1, return_inverse=True)
    order = torch.argsort(kind_of_row, stable=True)
    sizes = torch.bincount(kind_of_row, minlength=kinds.shape[1]).tolist()
    for blocks, members in zip(kinds.T.tolist(), order.split(sizes), strict=True):
        pairs = zip(branches, blocks, strict=True)
        per_branch = [_keys_of_block(workload, head, branch, block, length).to(device) for branch, block in pairs]
        keys = torch.cat(per_branch).unique()
        yield KeyGroup(rows[members], keys, torch.stack([torch.isin(keys, own).long() for own in per_branch]))


def _block_labels(workload: Workload, branch: tuple[int, int, int], rows: Tensor) -> Tensor:
    """[R]: the segment and the block of rows in it that each position lies in, -1 where it is not on the residue."""
    w, r, offset = branch
    block = torch.div(rows % w - offset, r, rounding_mode="floor") // _block_size(workload)
    return torch.where(rows % w % r == offset, rows // w * (w + 1) + block, -1)


def _keys_of_block(workload: Workload, head: int, branch: tuple[int, int, int], label: int, length: int) -> Tensor:
    """Positions that the rows of one block (by its label) see in a branch, ascending, causal mask and window aside."""
    if label < 0:
        return torch.zeros(0, dtype=torch.int64)
    w, r, offset = branch
    segment, block = divmod(label, w + 1)
    mask, count = _mask_of_segment(workload, head, branch, segment, length)
    return segment * w + offset + r * _rows_of_blocks(mask[block], _block_size(workload), count)


def _rows_of_key_blocks(workload: Workload, head: int, key: int) -> Tensor:
    """The positions whose blocks see the block of position `key`, ascending, causal mask and window aside."""
    start, end = next((start, end) for start, end in workload.sequences if start <= key < end)
    found = [torch.zeros(0, dtype=torch.int64)]
    for branch in _branches(workload, head, end - start):
        w, r, offset = branch
        label = int(_block_labels(workload, branch, torch.tensor([key - start])))
        if label >= 0:
            segment, block = divmod(label, w + 1)
            mask, count = _mask_of_segment(workload, head, branch, segment, end - start)
            rows = _rows_of_blocks(mask[:, block], _block_size(workload), count)
            found.append(start + segment * w + offset + r * rows)
    return torch.cat(found).unique()


def _rows_with_keys(workload: Workload, head: int, length: int) -> Tensor:
    """[length] bool: which positions of a sequence see a key."""
    left, right = reach(workload)
    seen = torch.zeros(length, dtype=torch.bool)
    for branch in _branches(workload, head, length):
        w, r, offset = branch
        for segment in range(-(-length // w)):
            if not rows_kept(min(w, length - segment * w), r, offset):
                continue
            mask, count = _mask_of_segment(workload, head, branch, segment, length)
            rows = torch.arange(count)
            first = rows.new_zeros(count) if left is None else (rows - left // r).clamp_min(0)
            last = rows.new_full((count,), count - 1) if right is None else (rows + right // r).clamp_max(count - 1)
            size = _block_size(workload)
            # Blocks set before each block: a row sees a key when one is set between the blocks of its first and last.
            before = torch.nn.functional.pad(mask.long().cumsum(1), (1, 0))[rows // size]
            set_between = before.gather(1, (last // size + 1)[:, None]) - before.gather(1, (first // size)[:, None])
            seen[segment * w + offset + r * rows] |= set_between[:, 0] > 0
    return seen


def _mask_of_segment(
    workload: Workload, head: int, branch: tuple[int, int, int], segment: int, length: int
) -> tuple[Tensor, int]:
    """The head's block mask [n, n] over the rows that a branch keeps in a segment, and how many rows they are."""
    w, r, offset = branch
    assert isinstance(workload.pattern, BlockSparsePattern)
    count = rows_kept(min(w, length - segment * w), r, offset)
    mask = block_mask(workload.pattern, count, workload.causal, workload.num_heads)
    return torch.from_numpy(mask[head % mask.shape[0]].copy()), count


def _rows_of_blocks(chosen: Tensor, size: int, count: int) -> Tensor:
    """The rows below `count` of the chosen ([n] bool) blocks of `size` rows, ascending."""
    rows = (chosen.nonzero() * size + torch.arange(size)).flatten()
    return rows[rows < count]


def _block_size(workload: Workload) -> int:
    assert isinstance(workload.pattern, BlockSparsePattern)
    return workload.pattern.block_size


_GROUPS = {"dense": _dense_groups, "dilated": _dilated_groups, "block_sparse": _block_sparse_groups}
