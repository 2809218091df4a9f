"""One rank's share of packed sequences with one launch for its own keys and one for those of each other rank.

Without a window the rows that a rank holds of a sequence see another rank's rows of it as a rectangle: either all or
its second half sees either all or the first half. Nothing in it is masked, so the rectangles of all sequences are
packed sequences whose keys have bounds of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilabench.contracts import BuildContext, PackedKernel
from dilabench.distributed.sharding import Cut, Shards, Span
from dilabench.distributed.world import World
from dilabench.impls.ring.schedule.parcels import Parcel, parcel_of
from dilabench.impls.ring.schedule.plan import within
from dilabench.impls.ring.schedule.sums import Softmax, Sum
from dilabench.workload.spec import UNBOUNDED, Workload


class Rectangle(NamedTuple):
    """Local rows of the reader, and of the holder, of one sequence: each of these sees each of those."""

    queries: range
    keys: range


@dataclass(frozen=True, slots=True)
class PackedCall:
    """rows: the local rows [T] that are its queries, None for all. options: what the kernel is told."""

    rows: Tensor | None
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class PackedShare:
    """As `Share`: what rank `world.rank` computes. `own` is None for a rank without a row."""

    workload: Workload
    kernel: PackedKernel
    shards: Shards
    world: World
    own: PackedCall | None
    reads: dict[int, PackedCall]
    needs: dict[int, Parcel]
    gives: dict[int, Parcel]

    @property
    def gradient_dtype(self) -> torch.dtype:
        """What dK and dV travel in: the kernel's own results."""
        dtype: torch.dtype = getattr(torch, self.workload.dtype)
        return dtype

    def attend_own(self, results: Softmax, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Add the results on this rank's own keys, which need no message."""
        if self.own is not None:
            results.put(*self._attend(self.own, q, k[0], v[0]))

    def attend_remote(self, holder: int, results: Softmax, q: Tensor, arrived: Sequence[Tensor]) -> None:
        """Add the results on a holder's keys; K and V as they came."""
        results.put(*self._attend(self.reads[holder], q, *self._tokens(arrived)))

    def attend_own_backward(
        self, sums: tuple[Sum, Sum, Sum], dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        """The gradients of `attend_own`."""
        if self.own is not None:
            for total, part in zip(sums, self._backward(self.own, dout, q, k[0], v[0], out, lse), strict=True):
                total.put(part[None])

    def remote_backward(
        self, holder: int, dq: Sum, dout: Tensor, q: Tensor, arrived: Sequence[Tensor], out: Tensor, lse: Tensor
    ) -> list[Tensor]:
        """dK and dV of what came of a holder, packed as it came; dq is added to."""
        part, *gradients = self._backward(self.reads[holder], dout, q, *self._tokens(arrived), out, lse)
        dq.put(part[None])
        return [gradient.reshape(x.shape) for gradient, x in zip(gradients, arrived, strict=True)]

    def _attend(self, call: PackedCall, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """out [1, N, H, D] and lse [1, H, N] of all local rows; those that see nothing have 0 and -inf."""
        out, lse = self.kernel.attend(_taken(q[0], call.rows), keys, values, **call.options)
        if call.rows is not None:
            out = torch.zeros_like(q[0]).index_copy_(0, call.rows, out)
            lse = lse.new_full(out.shape[1::-1], float("-inf")).index_copy_(1, call.rows, lse)
        return out[None], lse[None]

    def _backward(
        self, call: PackedCall, dout: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq [N, H, D] of all local rows, dk and dv of the keys of the call."""
        douts, queries, outs = (_taken(x[0], call.rows) for x in (dout, q, out))
        row_lse = lse[0] if call.rows is None else lse[0].index_select(1, call.rows)
        dq, dk, dv = self.kernel.attend_backward(douts, queries, keys, values, outs, row_lse, **call.options)
        if call.rows is not None:
            dq = torch.zeros_like(q[0]).index_copy_(0, call.rows, dq)
        return dq, dk, dv

    def _tokens(self, arrived: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """K and V [T_k, K, D] of a call: rows travel in the order of sequences, each with all its heads."""
        keys, values = (x.reshape(-1, self.workload.num_kv_heads, x.shape[-1]) for x in arrived)
        return keys, values


def in_packed_calls(workload: Workload, context: BuildContext, cut: Cut) -> PackedShare | None:
    """For packed sequences without a window, cut in order or zigzag, where the backend has a kernel for them."""
    kernel, world = context.require_backend().packed, context.world or World.alone(context.device)
    if kernel is None or context.device.type not in kernel.devices or workload.layout != "packed":
        return None
    if not workload.is_dense or workload.window != UNBOUNDED:
        return None
    shards, rank = cut(workload.sequences, world.size), world.rank
    others = [other for other in range(world.size) if other != rank]
    reads = {other: _rectangles(workload, shards, rank, other) for other in others}
    gives = {other: _rectangles(workload, shards, other, rank) for other in others}
    own, rows = _rectangles(workload, shards, rank, rank), shards.rows
    return PackedShare(
        workload,
        kernel,
        shards,
        world,
        _call(workload, own, rows[rank], context.device, causal=workload.causal) if own else None,
        {one: _call(workload, found, rows[rank], context.device) for one, found in reads.items() if found},
        {one: _parcel(workload, found, rows[one], context.device) for one, found in reads.items() if found},
        {one: _parcel(workload, found, rows[rank], context.device) for one, found in gives.items() if found},
    )


def _rectangles(workload: Workload, shards: Shards, reader: int, holder: int) -> list[Rectangle]:
    """Of every sequence of which some row is seen, in order. With itself a rank's rows are under the mask."""
    found = []
    for start, stop in workload.sequences:
        queries, keys = (within(shards.parts[rank], start, stop) for rank in (reader, holder))
        if workload.causal and reader != holder:
            queries, keys = (
                [one for one in queries if keys and keys[0].start < one.start],
                [one for one in keys if queries and one.start < queries[-1].start],
            )
            assert not queries or keys[-1].start < queries[0].start
        if queries and keys:
            found.append(Rectangle(*(_rows(spans, start, stop) for spans in (queries, keys))))
    return found


def _rows(spans: Sequence[Span], start: int, stop: int) -> range:
    """The local rows of a rank's successive spans, as far as they lie in [start, stop)."""
    first, last = spans[0], spans[-1]
    return range(first.row + max(0, start - first.start), last.row + min(stop, last.stop) - last.start)


def _call(
    workload: Workload, found: Sequence[Rectangle], rows: int, device: torch.device, causal: bool = False
) -> PackedCall:
    queries, keys = zip(*found, strict=True)
    options: dict[str, Any] = {"causal": causal, "scale": workload.softmax_scale}
    # Keys with bounds of their own under a mask are not for every kernel.
    for suffix, several in (("", queries), *([("_k", keys)] if keys != queries else [])):
        bounds = [0, *accumulate(map(len, several))]
        options[f"cu_seqlens{suffix}"] = torch.tensor(bounds, dtype=torch.int32).to(device)
        options[f"longest{suffix}"] = max(map(len, several))
    index = torch.cat([torch.arange(one.start, one.stop) for one in queries])
    return PackedCall(None if len(index) == rows else index.to(device), options)


def _parcel(workload: Workload, found: Sequence[Rectangle], rows: int, device: torch.device) -> Parcel:
    needed = torch.zeros(rows, workload.num_kv_heads, dtype=torch.bool)
    for rectangle in found:
        needed[rectangle.keys.start : rectangle.keys.stop] = True
    return parcel_of(needed, device)


def _taken(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)
