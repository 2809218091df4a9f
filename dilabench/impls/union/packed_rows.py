"""Branches of packed sequences: the segments of all sequences in one call, as packed sequences of their own.

Query heads that read the same keys go together, so that each of these groups adds its segments to the call, with one
key/value head and no key copied twice. A branch whose rows are all tokens of all heads is read in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilabench.contracts import BufferPool
from dilabench.impls.union.branches import Branch, Place, branches_of
from dilabench.impls.union.gathered_rows import GatheredRows, Indices
from dilabench.impls.union.union import Rows, Union
from dilabench.kernels.lse import merge_rows_
from dilabench.workload.spec import Workload

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackedRows(GatheredRows):
    """Copies of rows [1, T', A, D] of sequences with these bounds; `options`: what the call is told besides."""

    bounds: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AllTokens:
    """`union.Rows` of every token and head, read in place."""

    part: int
    first: bool
    bounds: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    rate: int = 1
    whole: bool = True
    count: int = 1

    def queries(self, x: Tensor) -> Tensor:
        """x [1, T, H, D] itself."""
        return x

    def keys(self, x: Tensor) -> Tensor:
        """x [1, T, K, D] itself."""
        return x

    def lse(self, lse: Tensor) -> Tensor:
        """lse [1, H, T] itself."""
        return lse

    def write(self, out: Tensor, lse: Tensor, branch_out: Tensor, branch_lse: Tensor) -> None:
        """Put results into an output that holds nothing yet."""
        out.copy_(branch_out)
        lse.copy_(branch_lse)

    def merge(self, out: Tensor, lse: Tensor, branch_out: Tensor, branch_lse: Tensor) -> None:
        """Merge results into those of other branches."""
        merge_rows_(out, lse, branch_out, branch_lse)

    def add_queries(self, total: Tensor, part: Tensor) -> None:
        """Add a part to total [1, T, H, D]."""
        total.add_(part)

    def add_keys(self, total: Tensor, part: Tensor) -> None:
        """Add a part to total [1, T, K, D]."""
        total.add_(part)

    def places(self, _x: Tensor, _lse: Tensor) -> None:
        """None: kernels that merge in place know no packed sequences."""

    def key_place(self, _x: Tensor) -> None:
        """None, as for `places`."""

    def release(self, *rows: Tensor) -> None:
        """Nothing was taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedUnion(Union):
    """A union whose kernel is told the sequences of each call, with the mask."""

    def _mask(self, rows: Rows) -> dict[str, Any]:
        assert isinstance(rows, PackedRows | AllTokens)
        return dict(rows.options)


def packed_rows(workload: Workload, device: torch.device, buffers: BufferPool) -> Iterator[PackedRows | AllTokens]:
    """The rows of every call of a packed workload, without options, in the order in which results are merged."""
    for branch in branches_of(workload):
        starts, lengths = _segments(workload, branch.segment_length)
        if branch.rate == 1 and len(branch.places) == workload.num_heads:
            yield AllTokens(branch.part, branch.first, (*starts.tolist(), workload.seq_len))
            continue
        groups: dict[tuple[int, int], list[Place]] = {}
        for place in branch.places:
            groups.setdefault(place.key, []).append(place)
        for readers in sorted({len(group) for group in groups.values()}):
            chosen = [group for group in groups.values() if len(group) == readers]
            index, bounds = _indices(workload, branch, chosen, starts, lengths, device)
            if len(bounds) > 1:
                yield PackedRows(index, buffers, bounds)


def _segments(workload: Workload, length: int) -> tuple[Positions, Positions]:
    """Starts and lengths of the segments, which begin anew in every sequence."""
    starts = np.concatenate([np.arange(start, stop, length) for start, stop in workload.sequences])
    return starts, np.diff(np.append(starts, workload.seq_len))


def _indices(
    workload: Workload,
    branch: Branch,
    groups: list[list[Place]],
    starts: Positions,
    lengths: Positions,
    device: torch.device,
) -> tuple[Indices, tuple[int, ...]]:
    """Where the rows of groups of equally many heads lie, one group behind the other, and their segments' bounds."""
    T, H, K = workload.seq_len, workload.num_heads, workload.num_kv_heads
    positions, heads, kv_heads, counts = [], [], [], []
    for group in groups:
        offset, key_head = group[0].key
        kept = np.maximum(0, -(-(lengths - offset) // branch.rate))
        segment = np.arange(len(kept)).repeat(kept)
        place = np.arange(len(segment)) - (kept.cumsum() - kept)[segment]
        positions.append(starts[segment] + offset + branch.rate * place)
        heads.append(np.tile([place.head for place in group], (len(segment), 1)))
        kv_heads.append(np.full(len(segment), key_head))
        counts.append(kept[kept > 0])
    position, head = torch.from_numpy(np.concatenate(positions)), torch.from_numpy(np.concatenate(heads))
    kv_head = torch.from_numpy(np.concatenate(kv_heads))
    index = Indices(
        rate=branch.rate,
        part=branch.part,
        first=branch.first,
        whole=False,
        segments=1,
        rows=len(position),
        heads=head.shape[1],
        key_heads=1,
        queries=(position[:, None] * H + head).flatten().to(device),
        keys=(position * K + kv_head).to(device),
        lse=(position[:, None] + T * head).T.flatten().to(device),
    )
    return index, (0, *np.concatenate(counts).cumsum().tolist())
