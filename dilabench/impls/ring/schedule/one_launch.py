"""A rank's whole computation of packed sequences as one launch.

A piece of a document is a separate sequence, whose last row is at the position of its last key: the kernel for packed
sequences must take fewer queries than keys. A document that a rank holds in several pieces has its keys there several
times. Keys are selected, and their gradients summed, by index tensors that are made once for a packing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dilabench.contracts import BuildContext, PackedKernel
from dilabench.distributed.row_assignment import Intervals, RowAssignment, lengths, overlaps
from dilabench.distributed.world import World
from dilabench.impls.ring.schedule.function import Algorithm
from dilabench.impls.ring.schedule.row_exchange import RowGather, RowSelection, places_in_order
from dilabench.impls.ring.schedule.sums import Sum, wide
from dilabench.workload.spec import Workload


@dataclass(frozen=True, slots=True)
class Occurrences:
    """The places of rows in a launch that has some of them several times.

    index: [T_k] the row at each place of the launch. layers: (rows, places) of the first occurrences of all rows, in
    ascending order, of the second ones of those that have one, and so on.
    """

    index: Tensor
    layers: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def of(cls, first: Intervals, rows: int, device: torch.device) -> Occurrences:
        """The places of rows in successive intervals, which together have each of `rows` rows at least once."""
        index = expanded(first, device)
        edges, coverage = _coverage(first)
        # The numbers of rows that occur more than 0, 1, ... times: known here, without waiting for the device.
        sizes = [int(np.diff(edges)[coverage > times].sum()) for times in range(int(coverage.max()))]
        counts = torch.zeros(rows, dtype=torch.int64, device=device).scatter_add_(0, index, torch.ones_like(index))
        places = torch.argsort(index, stable=True)
        starts, most_first = counts.cumsum(0) - counts, torch.argsort(counts, descending=True, stable=True)
        layers = []
        for times, size in enumerate(sizes):
            several = torch.arange(rows, device=device) if times == 0 else most_first[:size]
            layers.append((several, places[starts[several] + times]))
        return cls(index, tuple(layers))

    def summed(self, gradient: Tensor) -> Tensor:
        """[rows, K, D] sums of a gradient [T_k, K, D] over each row's occurrences, in a wider dtype if there are some.

        They are added in the order of occurrences, so that the same gradients give the same bits.
        """
        (_, places), *others = self.layers
        total = gradient.index_select(0, places)
        if others:
            total = total.to(wide(gradient.dtype))
        for rows, again in others:
            total.index_add_(0, rows, gradient.index_select(0, again).to(total.dtype))
        return total


@dataclass(frozen=True, slots=True)
class InOneLaunch:
    """`function.Algorithm` of a rank, its pieces as packed sequences. keys: of the launch, among own rows and those
    that came after them.
    """

    exchange: RowGather
    kernel: PackedKernel
    keys: Occurrences
    options: dict[str, Any]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """out, lse, and the K and V that came."""
        *gathered, pending = self.exchange.gather(k, v)
        pending.wait()
        keys, values = map(self._keys, (k, v), gathered)
        out, lse = self.kernel.attend(q[0], keys, values, **self.options)
        return out[None], lse[None], tuple(gathered)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of this rank's shards."""
        keys, values = map(self._keys, (k, v), kept)
        dq, *gradients = self.kernel.attend_backward(dout[0], q[0], keys, values, out[0], lse[0], **self.options)
        totals = [self.keys.summed(gradient)[None] for gradient in gradients]
        rows = k.shape[1]
        dkeys, dvalues = (total[:, rows:].to(k.dtype) for total in totals)
        returned = self.exchange.give_back(dkeys, dvalues, k)
        dk, dv = Sum.like(k), Sum.like(v)
        for own, total in zip((dk, dv), totals, strict=True):
            own.put(total[:, :rows])
        returned.add(dk, dv)
        return dq[None], dk.finish(), dv.finish()

    def _keys(self, local: Tensor, gathered: Tensor) -> Tensor:
        """Keys or values [T_k, K, D] of the launch."""
        return torch.cat([local[0], gathered[0]]).index_select(0, self.keys.index)


def in_one_launch(workload: Workload, context: BuildContext, assignment: RowAssignment) -> Algorithm | None:
    """For packed sequences, if the backend's kernel supports the pieces under the mask; else None."""
    kernel, world = context.require_backend().packed, context.world or World.single(context.device)
    left, right = assignment.reach
    masked = (left, right) != (None, None)
    if kernel is None or context.device.type not in kernel.devices or workload.layout != "packed":
        return None
    # The last row of a piece is at the position of its last key unless rows see later keys.
    if (masked and not (kernel.aligns_ends and right == 0)) or not assignment.held[world.rank]:
        return None
    rows, keys = map(lengths, assignment.pieces[world.rank])
    own = int(rows.sum())
    return InOneLaunch(
        _exchange(assignment, world),
        kernel,
        Occurrences.of(_key_rows(assignment, world.rank), own + _came(assignment, world.rank), context.device),
        {
            "cu_seqlens": _bounds(rows, context.device),
            "longest": int(rows.max()),
            "cu_seqlens_k": _bounds(keys, context.device),
            "longest_k": int(keys.max()),
            "causal": workload.causal,
            "window": workload.window,
            "scale": workload.softmax_scale,
        },
    )


def expanded(intervals: Intervals, device: torch.device) -> Tensor:
    """The numbers in intervals, one after the other: int64 on a device, which makes them without being waited for."""
    counts = lengths(intervals)
    shifts = intervals[:, 0] - (np.cumsum(counts) - counts)
    total = int(counts.sum())
    small = torch.from_numpy(np.stack([shifts, counts])).to(device)
    return torch.repeat_interleave(small[0], small[1], output_size=total) + torch.arange(total, device=device)


def _coverage(intervals: Intervals) -> tuple[Intervals, Intervals]:
    """The edges of intervals in ascending order, and in how many intervals the positions between two of them are."""
    edges, at = np.unique(intervals, return_inverse=True)
    changes = np.bincount(at.reshape(-1, 2)[:, 0], minlength=len(edges)) - np.bincount(
        at.reshape(-1, 2)[:, 1], minlength=len(edges)
    )
    return edges, np.cumsum(changes)[:-1]


def _bounds(counts: Intervals, device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)).to(device)


def _came(assignment: RowAssignment, rank: int) -> int:
    """The number of rows that come from other ranks."""
    return sum(assignment.moved(owner, rank) for owner in range(len(assignment.held)) if owner != rank)


def _exchange(assignment: RowAssignment, world: World) -> RowGather:
    rank = world.rank
    own, gives = assignment.own[rank], {}
    first_row = np.cumsum(lengths(own)) - lengths(own)
    held = int(lengths(own).sum())
    for reader in world.peers:
        at, sent = overlaps(own, assignment.seen[reader])
        rows = sent + (first_row - own[:, 0])[at, None]
        count = int(lengths(rows).sum())
        if count:
            gives[reader] = [RowSelection(0, held, None if count == held else expanded(rows, world.device))]
    needs = {owner: assignment.moved(owner, rank) for owner in world.peers}
    return RowGather(world, sum(needs.values()), places_in_order(needs), gives)


def _key_rows(assignment: RowAssignment, rank: int) -> Intervals:
    """The keys of each piece, in order, as rows: own ones first, then those that came, owner by owner."""
    owners = (other for other in range(len(assignment.held)) if other != rank)
    places = np.concatenate([assignment.own[rank], *(assignment.sent(owner, rank) for owner in owners)])
    first_row = np.cumsum(lengths(places)) - lengths(places)
    order = np.argsort(places[:, 0])
    places, first_row = places[order], first_row[order]
    _, keys = overlaps(assignment.pieces[rank][1], places)
    place = np.searchsorted(places[:, 0], keys[:, 0], side="right") - 1
    rows: Intervals = keys + (first_row - places[:, 0])[place, None]
    return rows
