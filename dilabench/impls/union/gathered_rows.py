"""Rows of a kernel call as copies: indexed out of the tensors, and indexed back into them. The plain method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilabench.contracts import BufferPool
from dilabench.impls.union.branches import Branch, Place, Segments, branches_of, places_by_rows, segments_of
from dilabench.impls.union.union import Rows
from dilabench.kernels.lse import merge_rows_
from dilabench.workload.spec import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredRows(Rows):
    """`union.Rows` by index; copies of rows are in buffers of the pool.

    Heads are combined if they keep the same number of rows and share keys in equal parts: `segments` of `length` rows
    of `heads` query and `key_heads` key/value heads.

    `query_index`, `key_index`, `lse_index`: flat indices into the N·H of a [B, N, H, D], the N·K of a [B, N, K, D], the
    H·N of a lse [B, H, N]. None comes twice, so adding is deterministic.
    """

    segments: int
    length: int
    heads: int
    key_heads: int
    query_index: Tensor
    key_index: Tensor
    lse_index: Tensor
    buffers: BufferPool

    def __post_init__(self) -> None:
        object.__setattr__(self, "tables", (self.query_index, self.key_index, self.lse_index))

    def queries(self, x: Tensor) -> Tensor:
        """Rows [B·n, L, A, D] of x [B, N, H, D]."""
        return self._select(x, self.query_index, (self.length, self.heads, x.shape[-1]))

    def keys(self, x: Tensor) -> Tensor:
        """Rows [B·n, L, A', D] of x [B, N, K, D]."""
        return self._select(x, self.key_index, (self.length, self.key_heads, x.shape[-1]))

    def lse(self, lse: Tensor) -> Tensor:
        """Rows [B·n, A, L] of lse [B, H, N]."""
        return self._select(lse, self.lse_index, (self.heads, self.length))

    def write(self, out: Tensor, lse: Tensor, branch_out: Tensor, branch_lse: Tensor) -> None:
        """Write results into empty rows."""
        out.flatten(1, 2).index_copy_(1, self.query_index, branch_out.reshape(len(out), -1, out.shape[-1]))
        lse.flatten(1, 2).index_copy_(1, self.lse_index, branch_lse.reshape(len(lse), -1))

    def merge(self, out: Tensor, lse: Tensor, branch_out: Tensor, branch_lse: Tensor) -> None:
        """Merge results into rows with results of other branches."""
        out_rows, lse_rows = self.queries(out), self.lse(lse)
        merge_rows_(out_rows, lse_rows, branch_out, branch_lse)
        self.write(out, lse, out_rows, lse_rows)
        self.release(out_rows, lse_rows)

    def add_queries(self, total: Tensor, part: Tensor) -> None:
        """Add rows to total [B, N, H, D]."""
        total.flatten(1, 2).index_add_(1, self.query_index, part.reshape(len(total), -1, total.shape[-1]))

    def add_keys(self, total: Tensor, part: Tensor) -> None:
        """Add rows to total [B, N, K, D]."""
        total.flatten(1, 2).index_add_(1, self.key_index, part.reshape(len(total), -1, total.shape[-1]))

    def release(self, *rows: Tensor) -> None:
        """Give the buffers of rows back to the pool."""
        for buffer in rows:
            self.buffers.give(buffer)

    def _select(self, x: Tensor, index: Tensor, shape: tuple[int, ...]) -> Tensor:
        batches = x.shape[0]
        buffer = self.buffers.take((batches * self.segments, *shape), x.dtype, x.device)
        torch.index_select(x.flatten(1, 2), 1, index, out=buffer.view(batches, len(index), *x.shape[3:]))
        return buffer


def gathered_rows(workload: Workload, device: torch.device, buffers: BufferPool) -> tuple[GatheredRows, ...]:
    """The rows of every kernel call, in the order in which results are merged, with indices on the device."""
    return tuple(
        _rows_of(workload, branch, segments, length, places, device, buffers)
        for branch in branches_of(workload)
        for segments in segments_of(branch, workload.seq_len)
        for length, same_length in places_by_rows(branch, segments).items()
        for places in _equally_shared(same_length)
    )


def _equally_shared(places: Sequence[Place]) -> Iterator[list[Place]]:
    """Heads by how many of them read the same keys, those that do next to each other."""
    readers = Counter(place.key for place in places)
    for count in sorted(set(readers.values())):
        chosen = [place for place in places if readers[place.key] == count]
        yield sorted(chosen, key=lambda place: (place.kv_head, place.position, place.head))


def _rows_of(
    workload: Workload,
    branch: Branch,
    segments: Segments,
    length: int,
    places: Sequence[Place],
    device: torch.device,
    buffers: BufferPool,
) -> GatheredRows:
    N, H, K = workload.seq_len, workload.num_heads, workload.num_kv_heads
    shared = len(places) // len({place.key for place in places})
    residue, head, kv_head = (torch.tensor(numbers, device="cpu") for numbers in zip(*places, strict=True))
    segment_start = segments.start + segments.length * torch.arange(segments.count, device="cpu")
    row_start = segment_start.unsqueeze(-1) + branch.rate * torch.arange(length, device="cpu")
    position = row_start.unsqueeze(-1) + residue
    return GatheredRows(
        rate=branch.rate,
        part=branch.part,
        first=branch.first,
        whole=branch.first and position.numel() == N * H,
        segments=segments.count,
        length=length,
        heads=len(places),
        key_heads=len(places) // shared,
        query_index=(position * H + head).flatten().to(device),
        key_index=(position * K + kv_head)[..., ::shared].flatten().to(device),
        lse_index=(position + N * head).transpose(1, 2).flatten().to(device),
        buffers=buffers,
    )
