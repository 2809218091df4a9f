"""Rows of a kernel call as views of the tensors, without copies; results are merged in place.

Branches are cut into the fewest kernel calls whose rows have constant strides (kernels.md, design A). A branch whose
rate divides H needs at most min(r, H/r) calls, and one call for a single segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from dilabench.contracts import PatternCache
from dilabench.impls.union.branches import (
    ORIGIN,
    Branch,
    Place,
    Progression,
    Segments,
    branches_of,
    fewest_runs,
    places_by_rows,
    segments_of,
)
from dilabench.impls.union.union import Rows, Strides, View
from dilabench.kernels.lse import merge_rows_
from dilabench.patterns.dilated import rows_kept
from dilabench.workload.spec import Workload

# This many (head, row) pairs are a few megabytes at most, and smaller calls take longer to launch than to compute.
FEW_ROWS = 1 << 13
# Rows of a tensor that a GPU copies in less time (8 microseconds of an H200) than its host launches a call.
COPIED_BYTES = 16 << 20
# Fields of a `Place`.
QUERY_HEADS, KEY_HEADS = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StridedRows(Rows):
    """`union.Rows` by `as_strided`: batches x stack x rows x heads, each axis with a constant stride.

    `stack`: segments, or residues if there is one segment. `heads`, `key_heads`: query heads and key/value heads; the
    query heads share the key/value heads in equal, successive groups.

    Views are [S, G, L, A, D]: batch items, stack, rows, heads. The kernel gets S and G as one axis, which is a view if
    the tensor's batch items follow each other as its tokens do; otherwise torch copies the rows.
    """

    first_batch: int
    batches: int
    start: Place
    stack: Progression
    length: int
    heads: Progression
    key_heads: Progression

    @property
    def query_rows(self) -> int:
        """(head, row) pairs of the call."""
        return self.batches * self.stack.count * self.length * self.heads.count

    def queries(self, x: Tensor) -> Tensor:
        """Rows [S·G, L, A, D] of x [B, N, H, D]."""
        return self._query_axes(x).flatten(0, 1)

    def keys(self, x: Tensor) -> Tensor:
        """Rows [S·G, L, A', D] of x [B, N, K, D]."""
        return self._key_axes(x).flatten(0, 1)

    def lse(self, lse: Tensor) -> Tensor:
        """Rows [S·G, A, L] of lse [B, H, N]."""
        return self._lse_axes(lse).flatten(0, 1)

    def write(self, out: Tensor, lse: Tensor, branch_out: Tensor, branch_lse: Tensor) -> None:
        """Write results into empty rows."""
        self._query_axes(out).copy_(self._split(branch_out))
        self._lse_axes(lse).copy_(self._split(branch_lse))

    def merge(self, out: Tensor, lse: Tensor, branch_out: Tensor, branch_lse: Tensor) -> None:
        """Merge results into rows with results of other branches."""
        merge_rows_(self._query_axes(out), self._lse_axes(lse), self._split(branch_out), self._split(branch_lse))

    def add_queries(self, total: Tensor, part: Tensor) -> None:
        """Add rows to total [B, N, H, D]."""
        self._query_axes(total).add_(self._split(part))

    def add_keys(self, total: Tensor, part: Tensor) -> None:
        """Add rows to total [B, N, K, D]."""
        self._key_axes(total).add_(self._split(part))

    def query_view(self, strides: Strides, dim: int) -> View | None:
        """Rows [S·G, L, A, D]; None if S and G are no one axis of such a tensor."""
        return _joined(self._view(strides, dim, QUERY_HEADS, self.start, self.length, self.rate, self.heads))

    def key_view(self, strides: Strides, dim: int) -> View | None:
        """Rows [S·G, L', A', D]; None as for `query_view`."""
        return _joined(self._view(strides, dim, KEY_HEADS, *self._of_keys, self.key_heads))

    def lse_view(self, strides: Strides) -> View:
        """Rows [S, G, A, L]."""
        batch, head, token = strides
        of_tokens = self._view((batch, token, head, 0), 1, QUERY_HEADS, self.start, self.length, self.rate, self.heads)
        (S, G, L, A, _), (s, g, row, a, _), first = of_tokens
        return (S, G, A, L), (s, g, a, row), first

    @property
    def _of_keys(self) -> tuple[Place, int, int]:
        """The first row of keys, their number and their rate."""
        return self.start, self.length, self.rate

    def _split(self, rows: Tensor) -> Tensor:
        return rows.unflatten(0, (self.batches, self.stack.count))

    def _query_axes(self, x: Tensor) -> Tensor:
        of_rows = QUERY_HEADS, self.start, self.length, self.rate, self.heads
        return _viewed(x, self._view(x.stride(), x.shape[-1], *of_rows))

    def _key_axes(self, x: Tensor) -> Tensor:
        return _viewed(x, self._view(x.stride(), x.shape[-1], KEY_HEADS, *self._of_keys, self.key_heads))

    def _lse_axes(self, lse: Tensor) -> Tensor:
        """Rows [S, G, A, L]."""
        return _viewed(lse, self.lse_view(lse.stride()))

    def _view(
        self, strides: Strides, dim: int, which: int, start: Place, length: int, rate: int, heads: Progression
    ) -> View:
        """The view [S, G, length, heads, D] of a tensor that has query heads or key/value heads."""
        batch, token, head, channel = strides
        from_segment, from_head = self.stack.step, heads.step
        steps = (
            batch,
            from_segment.position * token + from_segment[which] * head,
            rate * token,
            from_head.position * token + from_head[which] * head,
            channel,
        )
        size = self.batches, self.stack.count, length, heads.count, dim
        return size, steps, self.first_batch * batch + start.position * token + start[which] * head


@dataclass(frozen=True, slots=True, kw_only=True)
class OblongRows(StridedRows):
    """Strided rows of queries whose keys are other rows: `key_length` of them, `key_rate` positions from one to the
    next, the first `ahead` positions ahead of the first query.
    """

    ahead: int
    key_length: int
    key_rate: int

    @property
    def _of_keys(self) -> tuple[Place, int, int]:
        return self.start.after(Place(self.ahead, 0, 0)), self.key_length, self.key_rate


def _viewed(x: Tensor, view: View) -> Tensor:
    size, stride, first = view
    return x.as_strided(size, stride, x.storage_offset() + first)


def _joined(view: View) -> View | None:
    """The view with its first two axes as one; None if their strides are no multiples of each other."""
    (S, G, *sizes), (s, g, *steps), first = view
    if S > 1 and G > 1 and s != G * g:
        return None
    return (S * G, *sizes), (g if G > 1 else s, *steps), first


StridedRowsT = TypeVar("StridedRowsT", bound=StridedRows)


def kept_rows(workload: Workload, patterns: PatternCache) -> Callable[[torch.device], tuple[StridedRows, ...]]:
    """The rows of a workload's calls on a device, where small copies may replace some calls; cached with patterns."""

    def rows(device: torch.device) -> tuple[StridedRows, ...]:
        key = "strided rows", workload, device.type
        return patterns.get(key, lambda: strided_rows(workload, copied_rows(workload, device)))

    return rows


def copied_rows(workload: Workload, device: torch.device) -> int:
    """The most (head, row) pairs of a call for which a GPU copies rows instead of launching several calls. A CPU has no
    launch cost, and copies none.
    """
    if device.type != "cuda":
        return 0
    return COPIED_BYTES // (workload.head_dim * getattr(torch, workload.dtype).itemsize)


def strided_rows(workload: Workload, copied: int = 0) -> tuple[StridedRows, ...]:
    """The rows of every kernel call of a workload, in the order in which results are merged.

    Up to `copied` (head, row) pairs, batch items that do not follow each other as segments do are in one call: their
    rows are then copied.
    A call gives at most half of the output, or `FEW_ROWS`, so that its result stays small beside it; only a call that
    gives the whole output, and so becomes it, is larger.
    """
    whole = workload.tokens * workload.num_heads
    found: list[StridedRows] = []
    for branch in branches_of(workload):
        for segments in _segments_with_queries(branch, workload):
            for rows in _rows_of_segments(workload, branch, segments, copied):
                becomes_output = rows.first and rows.query_rows == whole and not workload.first_row
                found += [replace(rows, whole=True)] if becomes_output else at_most(rows, max(FEW_ROWS, whole // 2))
    return tuple(found)


def _segments_with_queries(branch: Branch, workload: Workload) -> Iterator[Segments]:
    """The segments that hold queries; the one in which the first query is not the first row comes alone."""
    first = workload.first_row
    for segments in segments_of(branch, workload.seq_len):
        before = max(0, first - segments.start) // segments.length
        start, count = segments.start + before * segments.length, segments.count - before
        if count > 0 and start < first:
            yield Segments(start, 1, segments.length)
            start, count = start + segments.length, count - 1
        if count > 0:
            yield Segments(start, count, segments.length)


def _rows_of_segments(workload: Workload, branch: Branch, segments: Segments, copied: int) -> Iterator[StridedRows]:
    """Calls of the segments of one length; batch items and segments share the batch axis where strides allow."""
    one_segment, first = segments.count * workload.batch_size == 1, workload.first_row
    for (length, before), places in _places_by_queries(branch, segments, first).items():
        for run, residues in fewest_runs(tuple(places), workload.group_size, stackable=one_segment):
            shared: dict[str, Any] = {
                "rate": branch.rate,
                "part": branch.part,
                "first": branch.first,
                "first_batch": 0,
                "batches": workload.batch_size,
                "start": run.start.after(Place(segments.start + before * branch.rate - first, 0, 0)),
                "stack": residues if one_segment else Progression(segments.count, Place(segments.length, 0, 0)),
                "length": length - before,
                "heads": run.heads,
                "key_heads": run.keys,
            }
            if not first:
                rows = StridedRows(**shared)
            else:
                ahead = first - before * branch.rate
                rows = OblongRows(**shared, ahead=ahead, key_length=length, key_rate=branch.rate)
            # Batch items of keys do not follow each other as batch items of fewer queries do.
            apart = 0 if first else workload.seq_len
            yield from [rows] if rows.query_rows <= copied else regular_batches(rows, apart)


def _places_by_queries(branch: Branch, segments: Segments, first: int) -> dict[tuple[int, int], list[Place]]:
    """Heads by the rows that they keep in a segment, and by how many of these lie before the first query."""
    by_queries: dict[tuple[int, int], list[Place]] = {}
    for length, places in places_by_rows(branch, segments).items():
        for place in places:
            before = rows_kept(max(0, first - segments.start), branch.rate, place.position)
            if before < length:
                by_queries.setdefault((length, before), []).append(place)
    return by_queries


def regular_batches(rows: StridedRowsT, seq_len: int) -> list[StridedRowsT]:
    """The rows themselves if batch items follow each other as segments do, otherwise one call per batch item or
    segment.
    """
    step = rows.stack.step
    if 1 in (rows.batches, rows.stack.count) or rows.stack.count * step.position == seq_len:
        return [rows]
    if rows.batches < rows.stack.count:
        return [replace(rows, first_batch=batch, batches=1) for batch in range(rows.batches)]
    single = Progression(1, ORIGIN)
    return [replace(rows, start=rows.start.after(step, index), stack=single) for index in range(rows.stack.count)]


def at_most(rows: StridedRowsT, query_rows: int) -> list[StridedRowsT]:
    """The rows in calls of at most `query_rows`, cut in halves along the segments, else the batch, else the heads."""
    if rows.query_rows <= query_rows:
        return [rows]
    if rows.stack.count > 1:
        front, back = _halves(rows.stack)
        parts = [
            replace(rows, stack=front),
            replace(rows, stack=back, start=rows.start.after(rows.stack.step, front.count)),
        ]
    elif rows.batches > 1:
        half = rows.batches // 2
        parts = [
            replace(rows, batches=half),
            replace(rows, first_batch=rows.first_batch + half, batches=rows.batches - half),
        ]
    elif rows.heads.count > 1:
        parts = _half_of_the_heads_each(rows)
    else:
        return [rows]
    return [small for part in parts for small in at_most(part, query_rows)]


def _half_of_the_heads_each(rows: StridedRowsT) -> list[StridedRowsT]:
    """Two calls over half of the key/value heads each, or of the query heads where one key/value head serves all."""
    heads, key_heads, kv_head = rows.heads, rows.key_heads, rows.start.kv_head
    if key_heads.count > 1:
        keys, more_keys = _halves(key_heads)
        kept = keys.count * (heads.count // key_heads.count)
        kv_head += keys.count * key_heads.step.kv_head
    else:
        keys, more_keys, kept = key_heads, key_heads, heads.count // 2
    back = rows.start.after(heads.step, kept)._replace(kv_head=kv_head)
    return [
        replace(rows, heads=Progression(kept, heads.step), key_heads=keys),
        replace(rows, start=back, heads=Progression(heads.count - kept, heads.step), key_heads=more_keys),
    ]


def _halves(line: Progression) -> tuple[Progression, Progression]:
    half = line.count // 2
    return Progression(half, line.step), Progression(line.count - half, line.step)
