"""The matrix C[h, i, j] of a workload (semantics.md §1) as tensors, by groups of rows that share their keys.

C is never built whole: a row costs only its visible keys, so one row of a million-token workload is cheap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dilabench.workload import visibility
from dilabench.workload.spec import Workload

if TYPE_CHECKING:
    from dilabench.patterns.pattern import KeyGroup as PatternGroup
    from dilabench.patterns.pattern import Positions


# Smaller groups are combined, this many rows at a time, if a key counts at most once.
FEW_ROWS = 8
GROUPS_TOGETHER = 64
# Keys of longer groups are made on the device that uses them, not on the CPU.
MANY_KEYS = 2**16


@dataclass(frozen=True, slots=True)
class KeyGroup:
    """Rows of one head that have the same keys, apart from causal mask and window.

    rows: [R] positions, ascending, on the CPU. keys: [M] positions, ascending. counts: [parts, M], whether each part of
    the pattern gives each key; their sum over the parts is C[h, row, key] for every row of the group. own: [R, M],
    which keys each row really has, where rows with different keys were put together; None if each row has all of them.
    """

    rows: Tensor
    keys: Tensor
    counts: Tensor
    own: Tensor | None = None


def key_groups(
    workload: Workload, head: int, positions: Tensor, device: torch.device | str = "cpu"
) -> Iterator[KeyGroup]:
    """The groups that cover the rows at `positions` ([R] int64, ascending, on the CPU) of head `head`.

    Rows that see no key are in no group or in one without keys. Positions count along the N axis (packed: T). `device`:
    of keys and counts; making long ones on the CPU and copying them takes longer than using them on a GPU.
    """
    few: list[tuple[int, PatternGroup]] = []
    for start, group in visibility.key_groups(workload, head, positions.numpy()):
        if len(group.parts) == 1 and len(group.rows) < FEW_ROWS and len(group.parts[0]) < MANY_KEYS:
            few.append((start, group))
            continue
        keys, counts = _keys_of(group.parts, torch.device(device))
        yield KeyGroup(torch.from_numpy(group.rows) + start, keys + start, counts)
    for at in range(0, len(few), GROUPS_TOGETHER):
        yield _together(few[at : at + GROUPS_TOGETHER], torch.device(device))


def _together(groups: Sequence[tuple[int, PatternGroup]], device: torch.device) -> KeyGroup:
    """Groups of few rows each as one, since each would cost a round of small operations: their keys' union."""
    parts = [np.asarray(group.parts[0], dtype=np.int64) + start for start, group in groups]
    keys, place = np.unique(np.concatenate(parts), return_inverse=True)
    rows = np.concatenate([group.rows + start for start, group in groups])
    has_key = np.zeros((len(parts), len(keys)), dtype=bool)
    has_key[np.repeat(np.arange(len(parts)), [len(part) for part in parts]), place] = True
    own = has_key.repeat([len(group.rows) for _, group in groups], axis=0)
    order = np.argsort(rows)
    counts = torch.ones(1, len(keys), dtype=torch.int64, device=device)
    has = torch.from_numpy(own[order]).to(device)
    return KeyGroup(torch.from_numpy(rows[order]), torch.from_numpy(keys).to(device), counts, has)


def _keys_of(parts: tuple[range | Positions, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The union of the parts' keys, and which part has which."""
    filled = [part for part in parts if len(part)]
    low = min((int(part[0]) for part in filled), default=0)
    high = max((int(part[-1]) + 1 for part in filled), default=0)
    counts = torch.zeros(len(parts), high - low, dtype=torch.int64, device=device)
    for row, part in zip(counts, parts, strict=True):
        if isinstance(part, range):
            row[part.start - low : part.stop - low : part.step] = 1 if len(part) else 0
        else:
            row[torch.from_numpy(part - low).to(device)] = 1
    keys = counts.sum(0).nonzero()[:, 0]
    return keys + low, counts[:, keys]


def visible(workload: Workload, rows: Tensor, keys: Tensor) -> Tensor:
    """[R, M] bool: what the causal mask and the window let the rows see of the keys, both positions of one sequence."""
    left, right = workload.shapes[0].reach
    seen = torch.ones(len(rows), len(keys), dtype=torch.bool, device=keys.device)
    # Bounds are moved by rows, not pairs: a matrix of distances would be as large as the scores.
    if left is not None:
        seen &= keys[None, :] >= (rows - left)[:, None]
    if right is not None:
        seen &= keys[None, :] <= (rows + right)[:, None]
    return seen


def multiplicity(workload: Workload, head: int, positions: Tensor) -> Tensor:
    """C[head, positions, :] as [R, N] int64. For tests and small N: memory is R·N."""
    counts = torch.zeros(len(positions), workload.seq_len, dtype=torch.int64, device="cpu")
    for group in key_groups(workload, head, positions):
        index = torch.searchsorted(positions, group.rows)
        seen = visible(workload, group.rows, group.keys)
        block = group.counts.sum(0) * (seen if group.own is None else seen & group.own)
        counts[index[:, None], group.keys[None, :]] = block
    return counts
