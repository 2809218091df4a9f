"""`zigzag-allgather`: all keys that a rank sees come in one exchange; then each chunk of its queries is one call.

The context parallelism of Llama 3 (arXiv 2407.21783, section 3.3.2) on zigzag shards. Each query is read once, so
that nothing is merged: a ring reads q and writes out and dq once per hop. Its price is that most of the exchange is
waited for, and memory for the keys of all ranks, which stay for the backward pass. So it is for few K/V heads.

A backend that aligns ends takes a chunk of queries and all keys before them in one call; over others it is two calls.
Packed sequences are one launch where the backend has a kernel for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.distributed.row_deal import RowDeal, united
from dilabench.distributed.sharding import Shards, Span, shards_of, zigzag
from dilabench.distributed.transport.strided_copy import copy_strided_
from dilabench.distributed.world import World
from dilabench.impls.ring.schedule.calls import Calls
from dilabench.impls.ring.schedule.function import ShardedAttention
from dilabench.impls.ring.schedule.one_launch import in_one_launch
from dilabench.impls.ring.schedule.pieces import Piece
from dilabench.impls.ring.schedule.placed import PlacedSoftmax, PlacedSum
from dilabench.impls.ring.schedule.plan import pieces_between
from dilabench.impls.ring.schedule.sums import Softmax, Sum
from dilabench.impls.union.branches import branches_of
from dilabench.workload.spec import Workload


class Stretch(NamedTuple):
    """Successive rows of a rank's shard, from `local` on, and their place among the rows that a reader gathers."""

    local: int
    gathered: int
    rows: int


Stretches = Mapping[int, Sequence[Stretch]]


@dataclass(frozen=True, slots=True)
class Gathered(Calls):
    """`function.Algorithm` with one exchange per pass.

    early: the calls on this rank's own keys alone, made while messages travel. late: those on the `rows` gathered keys.
    own, needs: what of these is this rank's and what comes from each holder. gives: what each reader gathers of it.
    apart: no two calls have queries in common.
    """

    world: World
    early: tuple[Piece, ...]
    late: tuple[Piece, ...]
    rows: int
    own: tuple[Stretch, ...]
    needs: Stretches
    gives: Stretches
    apart: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """out, lse, and the gathered K and V."""
        results = PlacedSoftmax(q) if self.apart else Softmax(q)
        keys, values = _room(k, self.rows), _room(v, self.rows)
        pending = self.world.swap(
            {
                reader: [_rows(x, s.local, s.rows) for s in given for x in (k, v)]
                for reader, given in self.gives.items()
            },
            self._gathered(keys, values),
            "keys",
        )
        for stretch in self.own:
            for whole, shard in ((keys, k), (values, v)):
                copy_strided_(_rows(whole, stretch.gathered, stretch.rows), _rows(shard, stretch.local, stretch.rows))
        self.attend(self.early, results, q, k, v)
        pending.wait()
        self.attend(self.late, results, q, keys, values)
        return *results.finish(), (keys, values)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of this rank's shards; those of gathered keys first, so that they travel meanwhile."""
        keys, values = kept
        dq = PlacedSum(q) if self.apart else Sum.like(q)
        dkeys, dvalues = Sum.like(keys), Sum.like(values)
        self.attend_backward(self.late, (dq, dkeys, dvalues), dout, q, keys, values, out, lse)
        gradients = dkeys.finish(), dvalues.finish()
        returned = {
            reader: [(s.local, (_room(k, s.rows), _room(v, s.rows))) for s in given]
            for reader, given in self.gives.items()
        }
        receives = {
            reader: [_rows(x, 0, x.shape[1]) for _, parts in several for x in parts]
            for reader, several in returned.items()
        }
        pending = self.world.swap(self._gathered(*gradients), receives, "gradients")
        dk, dv = Sum.like(k), Sum.like(v)
        for stretch in self.own:
            for total, gathered in zip((dk, dv), (dkeys, dvalues), strict=True):
                total.add_rows(gathered, stretch.gathered, stretch.rows, stretch.local)
        self.attend_backward(self.early, (dq, dk, dv), dout, q, k, v, out, lse)
        # Put together while the last gradients travel.
        whole_dq = dq.finish()
        pending.wait()
        for first, parts in (one for several in returned.values() for one in several):
            for total, part in zip((dk, dv), parts, strict=True):
                total.put(part, first)
        return whole_dq, dk.finish(), dv.finish()

    def _gathered(self, *tensors: Tensor) -> dict[int, list[Tensor]]:
        """The rows of each holder in gathered tensors, in the order in which they travel."""
        return {
            holder: [_rows(x, s.gathered, s.rows) for s in theirs for x in tensors]
            for holder, theirs in self.needs.items()
        }


def build(workload: Workload, context: BuildContext) -> ShardedAttention:
    """Dense patterns, padded or packed; each sequence on zigzag shards."""
    world = context.world or World.alone(context.device)
    shards = zigzag(workload.sequences, world.size)
    algorithm = in_one_launch(workload, context, RowDeal.zigzag(workload, world.size))
    return ShardedAttention(workload, shards, world, algorithm or by_pieces(workload, context, shards))


def by_pieces(workload: Workload, context: BuildContext, shards: Shards) -> Gathered:
    """On any shards of spans without gaps."""
    world, backend = context.world or World.alone(context.device), context.require_backend()
    plans = [_plan(workload, shards, rank, backend.aligns_ends) for rank in range(world.size)]
    early, late, spans = plans[world.rank]
    others = [rank for rank in range(world.size) if rank != world.rank]
    needs = {holder: _stretches(shards.parts[holder], spans) for holder in others}
    gives = {reader: _stretches(shards.parts[world.rank], plans[reader][2]) for reader in others}
    return Gathered(
        workload,
        backend,
        world,
        early,
        late,
        sum(span.length for span in spans),
        _stretches(shards.parts[world.rank], spans),
        {holder: theirs for holder, theirs in needs.items() if theirs},
        {reader: given for reader, given in gives.items() if given},
        _apart((*early, *late)),
    )


def _plan(
    workload: Workload, shards: Shards, rank: int, aligned: bool
) -> tuple[tuple[Piece, ...], tuple[Piece, ...], tuple[Span, ...]]:
    """A rank's early pieces, in its own rows, its late ones, in gathered rows, and the positions that are gathered."""
    everything = Shards((*shards.parts, (Span(0, workload.seq_len),)))
    pieces = pieces_between(workload, everything, rank, shards.size, branches_of(workload), aligned=aligned)
    early: list[Piece] = []
    late: list[Piece] = []
    for piece in pieces:
        row = _row_of(piece, shards.parts[rank])
        (late if row is None else early).append(piece if row is None else replace(piece, key=row))
    spans = _united(late)
    placed = [replace(piece, key=row) for piece in late if (row := _row_of(piece, spans)) is not None]
    return tuple(early), tuple(placed), spans


def _apart(pieces: Sequence[Piece]) -> bool:
    ranges = sorted((piece.query, piece.query + piece.queries) for piece in pieces)
    return all(one[1] <= following[0] for one, following in pairwise(ranges))


def _row_of(piece: Piece, spans: Sequence[Span]) -> int | None:
    """The row of a piece's first key, a position so far, in the span that holds all its keys; None when none does.

    Stacked pieces are as far from each other in keys as in queries, so they all lie where the first does.
    """
    for span in spans:
        if span.start <= piece.key and piece.key + piece.keys <= span.stop:
            return span.row + piece.key - span.start
    return None


def _united(pieces: Sequence[Piece]) -> tuple[Span, ...]:
    """The positions of all keys, in successive rows."""
    return shards_of([united([range(piece.key, piece.key + piece.keys) for piece in pieces])]).parts[0]


def _stretches(shard: Sequence[Span], gathered: Sequence[Span]) -> tuple[Stretch, ...]:
    """What of a rank's shard is among gathered rows."""
    found = []
    for own in shard:
        for span in gathered:
            start, stop = max(own.start, span.start), min(own.stop, span.stop)
            if start < stop:
                found.append(Stretch(own.row + start - own.start, span.row + start - span.start, stop - start))
    return tuple(found)


def _room(x: Tensor, rows: int) -> Tensor:
    """For so many rows [B, rows, K, D] of x, in memory rows first: any number of them is one message, and in place."""
    B, _, K, D = x.shape
    return x.new_empty(rows, B, K, D).transpose(0, 1)


def _rows(x: Tensor, first: int, rows: int) -> Tensor:
    """Rows of x [B, N, K, D] as they travel: [rows, B, K, D]."""
    return x.narrow(1, first, rows).transpose(0, 1)
