"""All that a rank computes of packed sequences as one launch.

A piece of a document is a sequence of its own, whose last row stands at its last key: the kernel for packed sequences
must take fewer queries than keys. A document that a rank holds in several pieces has its keys there several times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dilabench.contracts import BuildContext, PackedKernel
from dilabench.distributed.row_assignment import RowAssignment, overlap, overlapping
from dilabench.distributed.sharding import shards_of
from dilabench.distributed.world import World
from dilabench.impls.ring.schedule.function import Algorithm
from dilabench.impls.ring.schedule.row_exchange import RowGather, RowSelection, places_in_order
from dilabench.impls.ring.schedule.sums import Sum
from dilabench.workload.spec import Workload


@dataclass(frozen=True, slots=True)
class Run:
    """Successive keys of the one launch: where they lie, among own rows or among those that came."""

    own: bool
    first: int
    rows: int


@dataclass(frozen=True, slots=True)
class InOneLaunch:
    """`function.Algorithm` of a rank, its pieces as packed sequences. runs: the keys of each piece, in order."""

    exchange: RowGather
    kernel: PackedKernel
    runs: tuple[Run, ...]
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
        """dq, dk, dv of this rank's shards; those of keys that came first, so that they travel meanwhile."""
        keys, values = map(self._keys, (k, v), kept)
        dq, *gradients = self.kernel.attend_backward(dout[0], q[0], keys, values, out[0], lse[0], **self.options)
        far = (self._summed(part, gathered, own=False) for part, gathered in zip(gradients, kept, strict=True))
        dkeys, dvalues = (total.finish() for total in far)
        returned = self.exchange.give_back(dkeys, dvalues, k)
        dk, dv = (self._summed(part, local, own=True) for part, local in zip(gradients, (k, v), strict=True))
        returned.add(dk, dv)
        return dq[None], dk.finish(), dv.finish()

    def _keys(self, local: Tensor, gathered: Tensor) -> Tensor:
        """Keys or values [T_k, K, D] of the launch."""
        rows = [(local if run.own else gathered)[0].narrow(0, run.first, run.rows) for run in self.runs]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _summed(self, gradient: Tensor, like: Tensor, own: bool) -> Sum:
        """dK or dV of own keys, or of those that came: a key is in as many runs as pieces see it."""
        total, start = Sum.like(like), 0
        for run in self.runs:
            if run.own == own:
                total.put(gradient[None, start : start + run.rows], run.first)
            start += run.rows
        return total


def in_one_launch(workload: Workload, context: BuildContext, assignment: RowAssignment) -> Algorithm | None:
    """For packed sequences, where the backend's kernel takes what the mask makes of a piece; None elsewhere."""
    kernel, world = context.require_backend().packed, context.world or World.single(context.device)
    left, right = assignment.reach
    masked = (left, right) != (None, None)
    if kernel is None or context.device.type not in kernel.devices or workload.layout != "packed":
        return None
    # The last row of a piece stands at its last key unless rows see keys behind them.
    if (masked and not (kernel.aligns_ends and right == 0)) or not assignment.held[world.rank]:
        return None
    pieces = assignment.pieces(world.rank)
    bounds = [0, *accumulate(len(piece.rows) for piece in pieces)]
    key_bounds = [0, *accumulate(len(piece.keys) for piece in pieces)]
    return InOneLaunch(
        _exchange(assignment, world),
        kernel,
        _runs(assignment, world.rank),
        {
            "cu_seqlens": _on_device(bounds, context.device),
            "longest": max(len(piece.rows) for piece in pieces),
            "cu_seqlens_k": _on_device(key_bounds, context.device),
            "longest_k": max(len(piece.keys) for piece in pieces),
            "causal": workload.causal,
            "window": workload.window,
            "scale": workload.softmax_scale,
        },
    )


def _on_device(bounds: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(bounds, dtype=torch.int32).to(device)


def _exchange(assignment: RowAssignment, world: World) -> RowGather:
    rank = world.rank
    spans = shards_of(assignment.held).parts[rank]
    held = sum(map(len, assignment.held[rank]))
    gives = {}
    for reader in world.peers:
        sent = assignment.sent(rank, reader)
        rows = [
            torch.arange(len(shared)) + span.row + shared.start - span.start
            for span in spans
            for shared in overlapping(sent, range(span.start, span.stop))
        ]
        if rows:
            index = torch.cat(rows)
            gives[reader] = [RowSelection(0, held, None if len(index) == held else index.to(world.device))]
    needs = {owner: assignment.moved(owner, rank) for owner in world.peers}
    return RowGather(world, sum(needs.values()), places_in_order(needs), gives)


def _runs(assignment: RowAssignment, rank: int) -> tuple[Run, ...]:
    """The keys of each piece, in order, from where they are; runs that follow each other there are one."""
    places = _places(assignment, rank)
    positions = tuple(sorted(places, key=lambda held: held.start))
    runs: list[Run] = []
    for piece in assignment.pieces(rank):
        for held in overlapping(positions, piece.keys):
            shared, place = overlap(held, piece.keys), places[held]
            run = Run(place.own, place.first + shared.start - held.start, len(shared))
            before = runs[-1] if runs else None
            if before and (before.own, before.first + before.rows) == (run.own, run.first):
                runs[-1] = Run(run.own, before.first, before.rows + run.rows)
            else:
                runs.append(run)
    return tuple(runs)


def _places(assignment: RowAssignment, rank: int) -> dict[range, Run]:
    """Where the keys of a call are, by positions: own ones, and those that come, owner by owner."""
    spans = shards_of(assignment.held).parts[rank]
    places = {range(span.start, span.stop): Run(True, span.row, span.length) for span in spans}
    came = 0
    for owner in (other for other in range(len(assignment.held)) if other != rank):
        for shared in assignment.sent(owner, rank):
            places[shared] = Run(False, came, len(shared))
            came += len(shared)
    return places
