"""One rank's share of the work: its own part, and what it reads from and gives to each other rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.distributed.sharding import Cut, Shards
from dilabench.distributed.world import World
from dilabench.impls import strided
from dilabench.impls.ring.schedule.calls import Calls
from dilabench.impls.ring.schedule.function import Local
from dilabench.impls.ring.schedule.pieces import Piece
from dilabench.impls.ring.schedule.plan import pieces_between
from dilabench.impls.ring.schedule.row_exchange import RowExchange, select_rows
from dilabench.impls.ring.schedule.sums import Softmax, Sum
from dilabench.impls.union.branches import Branch, branches_of
from dilabench.patterns.dilated import DilatedPattern
from dilabench.workload.spec import Workload


@dataclass(frozen=True, slots=True)
class Share(Calls):
    """The computation of rank `world.rank`.

    local: branches whose segments all lie on this rank, as one computation. own: the other calls on its own keys.
    reads: calls on the keys of each other rank, which `exchange` brings. gradient_dtype: of dK and dV that are sent.
    """

    shards: Shards
    exchange: RowExchange
    gradient_dtype: torch.dtype
    local: Local | None
    own: tuple[Piece, ...]
    reads: dict[int, tuple[Piece, ...]]

    @property
    def world(self) -> World:
        """The ranks."""
        return self.exchange.world

    def attend_own(self, results: Softmax, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Add the results on this rank's own keys, which need no message."""
        if self.local is not None:
            out, lse, *_ = self.local.forward(q, k, v)
            results.put(out, lse)
        self.attend(self.own, results, q, k, v)

    def attend_own_backward(
        self, sums: tuple[Sum, Sum, Sum], dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        """The gradients of `attend_own`."""
        if self.local is not None:
            for total, part in zip(sums, self.local.backward(dout, q, k, v, out, lse), strict=True):
                total.put(part)
        self.attend_backward(self.own, sums, dout, q, k, v, out, lse)

    def attend_remote(self, owner: int, results: Softmax, q: Tensor, packed: Sequence[Tensor]) -> None:
        """Add the results on an owner's keys; packed: its K and V."""
        selection = self.exchange.needs[owner]
        k, v = map(selection.unpack, packed)
        self.attend(self.reads[owner], results, q, k, v, selection.first)

    def attend_remote_backward(
        self, owner: int, dq: Sum, dout: Tensor, q: Tensor, packed: Sequence[Tensor], out: Tensor, lse: Tensor
    ) -> list[Tensor]:
        """Packed dK and dV of the keys that this rank reads of an owner; packed: these keys' K and V. Adds to dq."""
        selection = self.exchange.needs[owner]
        k, v = map(selection.unpack, packed)
        sums = dq, Sum.like(k), Sum.like(v)
        self.attend_backward(self.reads[owner], sums, dout, q, k, v, out, lse, selection.first)
        return [selection.pack_rows(total.finish(self.gradient_dtype)) for total in sums[1:]]


def share_of(
    workload: Workload,
    context: BuildContext,
    sharding: Cut,
    single_device: Callable[[Workload, BuildContext], Local] = strided.padded,
) -> Share:
    """This rank's share under a sharding; a context without a world is one rank that holds everything.

    single_device: builds the computation of branches whose segments all lie on this rank.
    """
    world = context.world or World.single(context.device)
    shards = sharding(workload.sequences, world.size)
    rank, backend = world.rank, context.require_backend()
    branches = branches_of(workload)
    inside = [branch for branch in branches if _lies_inside(workload, branch, shards, rank)]
    crossing = [branch for branch in branches if branch not in inside]
    reads = {other: pieces_between(workload, shards, rank, other, branches) for other in world.peers}
    needs, gives = {}, {}
    for other in world.peers:
        needed = select_rows(reads[other], shards.rows[other], workload.num_kv_heads, context.device)
        if needed:
            needs[other] = needed
        given = pieces_between(workload, shards, other, rank, branches)
        given_rows = select_rows(given, shards.rows[rank], workload.num_kv_heads, context.device)
        if given_rows:
            gives[other] = given_rows
    own = pieces_between(workload, shards, rank, rank, crossing)
    return Share(
        workload,
        backend,
        shards,
        RowExchange(world, needs, gives),
        _gradient_dtype(workload),
        single_device(_local(workload, inside, shards.rows[rank]), context) if inside else None,
        tuple(sorted(own, key=lambda piece: piece.step)),
        reads,
    )


def _gradient_dtype(workload: Workload) -> torch.dtype:
    """A kernel's own result is sent as it is, a sum over branches in float32."""
    dtype: torch.dtype = getattr(torch, workload.dtype)
    return dtype if workload.is_dense or dtype == torch.float64 else torch.float32


def _lies_inside(workload: Workload, branch: Branch, shards: Shards, rank: int) -> bool:
    """Return True if every segment of a dilated branch that touches this rank is wholly on it, and segments start at
    the rank's first row.
    """
    spans = shards.parts[rank]
    if workload.is_dense or workload.pattern.has_grouped_heads or workload.layout == "packed":
        return False
    if len(spans) != 1:
        return False
    start, stop = spans[0].start, spans[0].stop
    return start % branch.segment_length == 0 and (stop % branch.segment_length == 0 or stop == workload.seq_len)


def _local(workload: Workload, inside: Sequence[Branch], rows: int) -> Workload:
    """The workload of branches in a rank's rows."""
    pattern = DilatedPattern.of(workload).model_copy(
        update={
            "segment_lengths": tuple(branch.segment_length for branch in inside),
            "dilation_rates": tuple(branch.rate for branch in inside),
            # A part of the sequence has other zero keys: they are added once everything is merged.
            "padding": "masked",
        }
    )
    return workload.model_copy(update={"seq_len": rows, "pattern": pattern})
