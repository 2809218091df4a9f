"""Branches of packed sequences: the segments of all sequences in one call, as packed sequences.

Query heads that read the same keys go together, so that each of these groups adds its segments to the call, with one
key/value head and no key copied twice. A branch whose rows are all tokens of all heads is read in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilabench.contracts import BufferPool
from dilabench.impls.union.branches import Branch, Place, branches_of
from dilabench.impls.union.gathered_rows import GatheredRows
from dilabench.impls.union.union import Rows, Union
from dilabench.kernels.lse import merge_rows_
from dilabench.kernels.streams import on_a_stream_of_its_own
from dilabench.workload.spec import Workload

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows(GatheredRows):
    """Copies of rows [1, T', A, D] of sequences. `arguments`: sequences, mask and scale, as the kernel takes them."""

    arguments: Mapping[str, Any]

    def __post_init__(self) -> None:
        GatheredRows.__post_init__(self)
        object.__setattr__(self, "tables", (*self.tables, *self.arguments.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class AllTokens(Rows):
    """`union.Rows` of every token and head, read in place. `arguments`: as for `PackedRows`."""

    arguments: Mapping[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tables", tuple(self.arguments.values()))

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
        """Write results into an empty output."""
        out.copy_(branch_out)
        lse.copy_(branch_lse)

    def merge(self, out: Tensor, lse: Tensor, branch_out: Tensor, branch_lse: Tensor) -> None:
        """Merge results with results of other branches."""
        merge_rows_(out, lse, branch_out, branch_lse)

    def add_queries(self, total: Tensor, part: Tensor) -> None:
        """Add a part to total [1, T, H, D]."""
        total.add_(part)

    def add_keys(self, total: Tensor, part: Tensor) -> None:
        """Add a part to total [1, T, K, D]."""
        total.add_(part)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedUnion(Union):
    """A union whose kernel takes the sequences of each call in addition to the mask."""

    def _mask(self, rows: Rows) -> dict[str, Any]:
        assert isinstance(rows, PackedRows | AllTokens)
        return dict(rows.arguments)


def packed_rows(workload: Workload, device: torch.device, buffers: BufferPool) -> tuple[PackedRows | AllTokens, ...]:
    """The rows of every call of a packed workload, in the order in which results are merged."""
    found: list[PackedRows | AllTokens] = []
    for branch in branches_of(workload):
        starts, lengths = _segments(workload, branch.segment_length)
        if branch.rate == 1 and len(branch.places) == workload.num_heads:
            arguments = varlen_arguments(workload, branch.rate, [*starts.tolist(), workload.seq_len], device)
            found.append(AllTokens(rate=1, part=branch.part, first=branch.first, whole=True, arguments=arguments))
            continue
        groups: dict[tuple[int, int], list[Place]] = {}
        for place in branch.places:
            groups.setdefault(place.key, []).append(place)
        for readers in sorted({len(group) for group in groups.values()}):
            chosen = [group for group in groups.values() if len(group) == readers]
            rows = _rows_of(workload, branch, chosen, starts, lengths, device, buffers)
            found += [rows] if rows.length else []
    return tuple(found)


def _segments(workload: Workload, length: int) -> tuple[Positions, Positions]:
    """Starts and lengths of the segments, which restart in every sequence."""
    starts = np.concatenate([np.arange(start, stop, length) for start, stop in workload.sequences])
    return starts, np.diff(np.append(starts, workload.seq_len))


def _rows_of(
    workload: Workload,
    branch: Branch,
    groups: list[list[Place]],
    starts: Positions,
    lengths: Positions,
    device: torch.device,
    buffers: BufferPool,
) -> PackedRows:
    """The rows of groups of equally many heads, one group behind the other."""
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
    return PackedRows(
        rate=branch.rate,
        part=branch.part,
        first=branch.first,
        segments=1,
        length=len(position),
        heads=head.shape[1],
        key_heads=1,
        query_index=(position[:, None] * H + head).flatten().to(device),
        key_index=(position * K + kv_head).to(device),
        lse_index=(position[:, None] + T * head).T.flatten().to(device),
        buffers=buffers,
        arguments=varlen_arguments(workload, branch.rate, [0, *np.concatenate(counts).cumsum().tolist()], device),
    )


def varlen_arguments(workload: Workload, rate: int, bounds: list[int], device: torch.device) -> dict[str, Any]:
    """The arguments of `contracts.AttendPacked` besides tensors, for sequences with these bounds of rows at this
    `rate`.
    """
    left, right = (side if side < 0 else side // rate for side in workload.window)
    # A copy on the current stream would wait for all that it has to do.
    with on_a_stream_of_its_own(device):
        there = torch.tensor(bounds, dtype=torch.int32, device="cpu").to(device)
    arguments = {
        "cu_seqlens": there,
        "longest": max((stop - start for start, stop in pairwise(bounds)), default=0),
        "causal": workload.causal,
        "window": (left, right),
        "scale": workload.softmax_scale,
    }
    return arguments if workload.softcap is None else {**arguments, "softcap": workload.softcap}
