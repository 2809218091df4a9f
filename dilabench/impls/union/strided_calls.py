"""Cutting branches into the fewest kernel calls whose rows lie at constant strides (kernels.md, design A).

A branch whose rate divides H needs at most min(r, H/r) calls, and one call where there is a single segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from dilabench.impls.union.branches import ORIGIN, Branch, Place, Segments, branches_of, places_by_rows, segments_of
from dilabench.impls.union.head_runs import Progression, fewest_runs
from dilabench.workload.spec import Workload

# So many (head, row) pairs are a few megabytes at most, and calls of fewer take longer to begin than to compute.
FEW_ROWS = 1 << 13
# Rows of a tensor that a GPU copies in less time (8 microseconds of an H200) than its host launches a call.
COPIED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class StridedCall:
    """The rows of one kernel call: batches x stack x rows x heads, each axis with a constant stride.

    `stack`: segments, or residues where there is one segment. `heads`, `keys`: query heads and key/value heads; the
    query heads share the key/value heads in equal, successive groups.
    """

    first_batch: int
    batches: int
    start: Place
    stack: Progression
    rows: int
    rate: int
    part: int
    heads: Progression
    keys: Progression
    first: bool

    @property
    def query_rows(self) -> int:
        """(head, row) pairs of the call."""
        return self.batches * self.stack.count * self.rows * self.heads.count


def copied_rows(workload: Workload, device: torch.device) -> int:
    """(head, row) pairs of a call up to which rows are copied rather than given to several calls: none on a CPU, whose
    calls begin at once.
    """
    itemsize = getattr(torch, workload.dtype).itemsize
    return COPIED_BYTES // (workload.head_dim * itemsize) if device.type == "cuda" else 0


def strided_calls(workload: Workload, copied: int = 0) -> tuple[StridedCall, ...]:
    """The kernel calls of a workload, in the order in which their results are merged.

    Up to so many (head, row) pairs, batch items that do not follow each other as segments do are in one call: their
    rows are then copied.
    A call gives at most half of the output, or `FEW_ROWS`, so that its result stays small beside it; only a call that
    gives the whole output, and so becomes it, is larger.
    """
    whole = workload.tokens * workload.num_heads
    calls: list[StridedCall] = []
    for branch in branches_of(workload):
        for segments in segments_of(branch, workload.seq_len):
            for call in _segment_calls(workload, branch, segments, copied):
                becomes_output = call.first and call.query_rows == whole
                calls += [call] if becomes_output else at_most(call, max(FEW_ROWS, whole // 2))
    return tuple(calls)


def _segment_calls(workload: Workload, branch: Branch, segments: Segments, copied: int) -> Iterator[StridedCall]:
    """Calls of the segments of one length; batch items and segments share the batch axis where strides allow."""
    one_segment = segments.count * workload.batch_size == 1
    for rows, places in places_by_rows(branch, segments).items():
        for run, residues in fewest_runs(places, workload.group_size, stackable=one_segment):
            whole = StridedCall(
                first_batch=0,
                batches=workload.batch_size,
                start=run.start.after(Place(segments.start, 0, 0)),
                stack=residues if one_segment else Progression(segments.count, Place(segments.length, 0, 0)),
                rows=rows,
                rate=branch.rate,
                part=branch.part,
                heads=run.heads,
                keys=run.keys,
                first=branch.first,
            )
            yield from [whole] if whole.query_rows <= copied else regular_batches(whole, workload.seq_len)


def regular_batches(call: StridedCall, seq_len: int) -> list[StridedCall]:
    """The call itself where batch items follow each other as segments do, otherwise one per batch item or segment."""
    step = call.stack.step
    if 1 in (call.batches, call.stack.count) or call.stack.count * step.position == seq_len:
        return [call]
    if call.batches < call.stack.count:
        return [replace(call, first_batch=batch, batches=1) for batch in range(call.batches)]
    single = Progression(1, ORIGIN)
    return [replace(call, start=call.start.after(step, index), stack=single) for index in range(call.stack.count)]


def at_most(call: StridedCall, query_rows: int) -> list[StridedCall]:
    """The call in parts of at most so many rows, cut in halves along the segments, else the batch, else the heads."""
    if call.query_rows <= query_rows:
        return [call]
    if call.stack.count > 1:
        front, back = _cut(call.stack)
        parts = [
            replace(call, stack=front),
            replace(call, stack=back, start=call.start.after(call.stack.step, front.count)),
        ]
    elif call.batches > 1:
        half = call.batches // 2
        parts = [
            replace(call, batches=half),
            replace(call, first_batch=call.first_batch + half, batches=call.batches - half),
        ]
    elif call.heads.count > 1:
        parts = _cut_heads(call)
    else:
        return [call]
    return [small for part in parts for small in at_most(part, query_rows)]


def _cut_heads(call: StridedCall) -> list[StridedCall]:
    """Two calls over half of the key/value heads each, or of the query heads where one key/value head serves all."""
    if call.keys.count > 1:
        keys, more_keys = _cut(call.keys)
        kept = keys.count * (call.heads.count // call.keys.count)
        kv_head = call.start.kv_head + keys.count * call.keys.step.kv_head
    else:
        keys, more_keys = call.keys, call.keys
        kept, kv_head = call.heads.count // 2, call.start.kv_head
    heads, step = call.heads, call.heads.step
    back = call.start.after(step, kept)._replace(kv_head=kv_head)
    return [
        replace(call, heads=Progression(kept, step), keys=keys),
        replace(call, start=back, heads=Progression(heads.count - kept, step), keys=more_keys),
    ]


def _cut(line: Progression) -> tuple[Progression, Progression]:
    half = line.count // 2
    return Progression(half, line.step), Progression(line.count - half, line.step)
