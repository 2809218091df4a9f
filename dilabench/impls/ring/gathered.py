"""`zigzag-allgather`, `balanced-allgather`: all keys that a rank sees come in one exchange, each once.

The context parallelism of Llama 3 (arXiv 2407.21783, section 3.3.2) on zigzag shards. A rank's own rows among
themselves are one call, made while messages are under way; then each chunk of queries is a call on all gathered keys
before it. Over any number of ranks there are three calls at most, and one merge; a ring has a call, an exchange and a
part of out and dq for each rank. The price is that the exchange is waited for beyond the first call, and memory for the
keys of all ranks, which stay for the backward pass. So it is for few K/V heads, and for short calls.

Under a window a chunk of queries is a call on all its keys, own ones among them, without merges: two calls over a
backend that does not align ends. Packed sequences are one launch if the backend has a kernel for that; otherwise, on
GPUs, a rank's rows of each document among themselves are one launch of dilabench's tiles, and only rows that see other
chunks are further calls.

`balanced-allgather` is for packed documents, whose work is their areas under the mask: cut in order, half of two ranks
would wait. Chunks of rows are assigned so that each rank has as many tokens and the same work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.distributed.row_assignment import RowAssignment, united
from dilabench.distributed.sharding import Shards, Span, shards_of
from dilabench.distributed.transport.strided_copy import copy_strided_
from dilabench.distributed.world import World
from dilabench.impls.packed import InTiles, in_tiles
from dilabench.impls.ring.schedule.calls import Calls
from dilabench.impls.ring.schedule.function import ShardedAttention
from dilabench.impls.ring.schedule.one_launch import in_one_launch
from dilabench.impls.ring.schedule.pieces import Piece, disjoint
from dilabench.impls.ring.schedule.plan import pieces_between, within
from dilabench.impls.ring.schedule.row_exchange import RowGather, RowSelection
from dilabench.impls.ring.schedule.sums import PlacedSoftmax, PlacedSum, Softmax, SoftmaxOnto, Sum, SumOnto
from dilabench.impls.union.branches import Branch, branches_of
from dilabench.metadata import OWN_TILES, Note
from dilabench.workload.spec import UNBOUNDED, Workload

# Rows of a rank's shard, and the same rows among those that are gathered.
Shared = tuple[RowSelection, RowSelection]


@dataclass(frozen=True, slots=True)
class Gathered(Calls):
    """`function.Algorithm` with one exchange per pass.

    early: the calls on this rank's own keys alone, made while messages are sent. late: those on gathered keys.
    own: which of these are this rank's. disjoint: no two calls have queries in common. tiles: the calls of rows on the
    same rows, in one launch; then these are not among the early ones, and the others are disjoint.
    """

    exchange: RowGather
    early: tuple[Piece, ...]
    late: tuple[Piece, ...]
    own: tuple[Shared, ...]
    disjoint: bool
    tiles: InTiles | None = None

    @property
    def notes(self) -> tuple[Note, ...]:
        """That tiles replace the backend."""
        if self.tiles is None:
            return ()
        message = (
            f"{self.backend.name} has no kernel for packed sequences: dilabench's tiles compute a rank's rows of each "
            "document among themselves"
        )
        return (OWN_TILES.note(message, hint="choose a backend that has one"),)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """out, lse, and the gathered K and V."""
        keys, values, pending = self.exchange.gather(k, v)
        for local, gathered in self.own:
            for whole, shard in ((keys, k), (values, v)):
                copy_strided_(gathered.pack(whole), local.pack(shard))
        results: Softmax | PlacedSoftmax | SoftmaxOnto
        if self.tiles is not None:
            results = SoftmaxOnto(*self.tiles.forward(q, k, v))
        else:
            results = PlacedSoftmax(q) if self.disjoint else Softmax(q)
        self.attend(self.early, results, q, k, v)
        pending.wait()
        self.attend(self.late, results, q, keys, values)
        return *results.finish(), (keys, values)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of this rank's shards; gradients of gathered keys first, so that they are sent meanwhile."""
        keys, values = kept
        onto = SumOnto() if self.tiles is not None else None
        dq = onto or (PlacedSum(q) if self.disjoint else Sum.like(q, onto_first=True))
        dkeys, dvalues = (Sum.like(x, onto_first=not self.own) for x in (keys, values))
        self.attend_backward(self.late, (dq, dkeys, dvalues), dout, q, keys, values, out, lse)
        returned = self.exchange.give_back(dkeys.finish(), dvalues.finish(), k)
        dk, dv = (Sum.like(x, onto_first=not self.own) for x in (k, v))
        for local, gathered in self.own:
            for total, part in ((dk, dkeys), (dv, dvalues)):
                total.add_rows(part, gathered.first, gathered.stop - gathered.first, local.first)
        if self.tiles is not None and onto is not None:
            onto.total, *own_gradients = self.tiles.backward(dout, q, k, v, out, lse)
            for total, found in zip((dk, dv), own_gradients, strict=True):
                total.put(found)
        self.attend_backward(self.early, (dq, dk, dv), dout, q, k, v, out, lse)
        # Put together while the last gradients are on their way.
        whole_dq = dq.finish()
        returned.add(dk, dv)
        return whole_dq, dk.finish(), dv.finish()


def build(workload: Workload, context: BuildContext) -> ShardedAttention:
    """`zigzag-allgather`: dense patterns, padded or packed; each sequence on zigzag shards."""
    world = context.world or World.single(context.device)
    return _built(workload, context, world, RowAssignment.zigzag(workload, world.size))


def build_balanced(workload: Workload, context: BuildContext) -> ShardedAttention:
    """`balanced-allgather`: dense patterns with causal masks and windows, padded or packed."""
    world = context.world or World.single(context.device)
    return _built(workload, context, world, RowAssignment.of(workload, world.size))


def _built(workload: Workload, context: BuildContext, world: World, assignment: RowAssignment) -> ShardedAttention:
    shards = shards_of(assignment.held)
    algorithm = in_one_launch(workload, context, assignment) or by_pieces(workload, context, world, shards)
    notes = algorithm.notes if isinstance(algorithm, Gathered) else ()
    return ShardedAttention(workload, shards, world, algorithm, notes)


def by_pieces(workload: Workload, context: BuildContext, world: World, shards: Shards) -> Gathered:
    """The algorithm for any shards whose spans have no gaps."""
    backend = context.require_backend()
    branches = branches_of(workload)
    planned = _own_first if workload.layout == "padded" and workload.window == UNBOUNDED else _chunk_by_chunk
    plans = [planned(workload, shards, rank, branches, backend.aligns_ends) for rank in range(world.size)]
    spans_of = [spans for _, _, spans in plans]
    early, late, spans = plans[world.rank]
    own = shards.parts[world.rank]
    places = {owner: [gathered for _, gathered in _shared(shards.parts[owner], spans)] for owner in world.peers}
    gives = {reader: [local for local, _ in _shared(own, spans_of[reader])] for reader in world.peers}
    exchange = RowGather(
        world,
        sum(span.length for span in spans),
        {owner: selections for owner, selections in places.items() if selections},
        {reader: selections for reader, selections in gives.items() if selections},
    )
    tiles, early, late = _in_tiles(workload, context, own, early, late)
    return Gathered(workload, backend, exchange, early, late, _shared(own, spans), disjoint((*early, *late)), tiles)


Plan = tuple[tuple[Piece, ...], tuple[Piece, ...], tuple[Span, ...]]
"""A rank's calls on its own keys and those on gathered keys, and the positions of the gathered rows."""


def _own_first(workload: Workload, shards: Shards, rank: int, branches: Sequence[Branch], _aligned: bool) -> Plan:
    """Own rows among themselves, and chunks of them on what others hold of the keys before: a range of rows each."""
    others = shards_of([_gaps(shards.parts[rank], workload.seq_len)]).parts[0]
    late = pieces_between(workload, Shards((*shards.parts, others)), rank, shards.size, branches)
    needed = max((piece.key + piece.keys for piece in late), default=0)
    spans = (Span(span.start, min(span.stop, span.start + needed - span.row), span.row) for span in others)
    early = pieces_between(workload, shards, rank, rank, branches)
    return early, late, tuple(span for span in spans if span.length)


def _gaps(spans: Sequence[Span], length: int) -> list[range]:
    """The positions that are in no span."""
    edges = [0, *(edge for span in spans for edge in (span.start, span.stop)), length]
    return [range(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]


def _chunk_by_chunk(workload: Workload, shards: Shards, rank: int, branches: Sequence[Branch], aligned: bool) -> Plan:
    """Calls of chunks of rows on all their keys; those whose keys are all in one own span need no message."""
    everything = Shards((*shards.parts, (Span(0, workload.seq_len),)))
    pieces = pieces_between(workload, everything, rank, shards.size, branches, aligned=aligned)
    held = shards.parts[rank]
    late = [piece for piece in pieces if _row_of(piece, held) is None]
    spans = _united(late)
    early = tuple(replace(piece, key=row) for piece in pieces if (row := _row_of(piece, held)) is not None)
    return early, tuple(replace(piece, key=row) for piece in late if (row := _row_of(piece, spans)) is not None), spans


def _in_tiles(
    workload: Workload, context: BuildContext, own: Sequence[Span], early: tuple[Piece, ...], late: tuple[Piece, ...]
) -> tuple[InTiles | None, tuple[Piece, ...], tuple[Piece, ...]]:
    """The calls of rows on the same rows in one launch, if tiles run here; early and late calls without these."""
    documents = [
        min(span.stop, stop) - max(span.start, start)
        for start, stop in workload.sequences
        for span in within(own, start, stop)
    ]
    others_early, others_late = (tuple(filter(None, map(_without_itself, pieces))) for pieces in (early, late))
    others = *others_early, *others_late
    # Each row sees itself, in a call that is now shorter unless the backend took it together with keys before.
    rows = sum(piece.queries * piece.stack.count for piece in (*early, *late) if _without_itself(piece) != piece)
    masked = workload.layout == "packed" and workload.causal and workload.window == UNBOUNDED
    in_ranges = all(piece.whole_heads for piece in others) and disjoint(others)
    if not (masked and in_ranges and 0 < rows == sum(documents)):
        return None, early, late
    bounds = (0, *accumulate(documents))
    tiles = in_tiles(workload.replace(cu_seqlens=bounds, seq_len=bounds[-1]), context)
    return (None, early, late) if tiles is None else (tiles, others_early, others_late)


def _without_itself(piece: Piece) -> Piece | None:
    """A call of rows on keys before them; None if its keys are the rows. A single row is the last of its keys."""
    if piece.queries == 1:
        return replace(piece, keys=piece.keys - 1) if piece.keys > 1 else None
    return None if piece.causal and (piece.query, piece.queries) == (piece.key, piece.keys) else piece


def _row_of(piece: Piece, spans: Sequence[Span]) -> int | None:
    """The row of a piece's first key, a position so far, in the span that holds all its keys; None when none does.

    Stacked pieces have the same distances in keys as in queries, so all have the first one's row.
    """
    found = within(spans, piece.key, piece.key + piece.keys)
    if not found or found[0].start > piece.key or piece.key + piece.keys > found[0].stop:
        return None
    return found[0].row + piece.key - found[0].start


def _united(pieces: Sequence[Piece]) -> tuple[Span, ...]:
    """The positions of all keys, in successive rows."""
    return shards_of([united([range(piece.key, piece.key + piece.keys) for piece in pieces])]).parts[0]


def _shared(shard: Sequence[Span], gathered: Sequence[Span]) -> tuple[Shared, ...]:
    """The part of a rank's shard among gathered rows."""
    shared: list[Shared] = []
    for own in shard:
        for span in within(gathered, own.start, own.stop):
            start, stop = max(own.start, span.start), min(own.stop, span.stop)
            local, place, length = own.row + start - own.start, span.row + start - span.start, stop - start
            shared.append((RowSelection(local, local + length), RowSelection(place, place + length)))
    return tuple(shared)
