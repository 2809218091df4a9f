"""`ulysses`: ranks exchange their part of the sequence for their part of the heads, attend, and exchange back.

One all-to-all before and one after; in between every rank sees whole sequences. Query heads are assigned in order,
numbers differing by at most one. A key/value head goes to every rank that holds one of its query heads; the rank that
holds the tokens sums its gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.distributed.sharding import Shards, contiguous
from dilabench.distributed.transport.strided_copy import copy_strided_
from dilabench.distributed.world import Work, World
from dilabench.impls.call import Computation
from dilabench.impls.packed import InTiles, in_one_launch, in_tiles
from dilabench.impls.ring.schedule.calls import Calls
from dilabench.impls.ring.schedule.function import Local, ShardedAttention
from dilabench.impls.ring.schedule.pieces import Piece, disjoint
from dilabench.impls.ring.schedule.plan import pieces_between
from dilabench.impls.ring.schedule.sums import PlacedSoftmax, PlacedSum, Softmax, Sum, wide
from dilabench.impls.union.branches import branches_of
from dilabench.kernels.lse import add_null_mass_
from dilabench.workload.spec import Workload

# By rank the heads that it attends with.
Heads = Sequence[range]


def assign_heads(num_heads: int, num_kv_heads: int, size: int) -> tuple[Heads, Heads]:
    """H query heads over P ranks, in order, and the key/value heads that they read."""
    group = num_heads // num_kv_heads
    queries = [range(num_heads * rank // size, num_heads * (rank + 1) // size) for rank in range(size)]
    return queries, [range(heads.start // group, -(-heads.stop // group)) if heads else range(0) for heads in queries]


@dataclass(frozen=True, slots=True)
class Ulysses:
    """`function.Algorithm` by two all-to-alls per pass; between them `attention` has all rows of some heads.

    Kept for the backward pass: this rank's heads of q, k, v, out and lse over the whole sequence.
    Messages are rows first, [N, B, ·, D], so that each arrives in place. order: by position its row if ranks follow
    each other, and the inverse; None if these are the same. any_strides: `attention` takes such tensors without copies.
    """

    world: World
    shards: Shards
    queries: Heads
    keys: Heads
    attention: Local
    order: tuple[Tensor, Tensor] | None
    any_strides: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """out, lse, and what is kept."""
        return self.forward_with_sink(q, k, v, None)

    def forward_with_sink(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """The same with a sink [H]; this rank adds the sinks of its heads."""
        whole_q, whole_k, whole_v = self._to_heads((q, k, v), (self.queries, self.keys, self.keys))
        whole_out, whole_lse, *_ = self.attention.forward(whole_q, whole_k, whole_v)
        if sink is not None:
            own = sink[_slice(self.queries[self.world.rank])]
            add_null_mass_(whole_out, whole_lse, own[:, None].to(whole_lse.dtype))
        lse_by_row = whole_lse.transpose(1, 2).unsqueeze(-1)
        out, lse = self._to_tokens((whole_out, lse_by_row), (self.queries, self.queries))
        return out, lse.squeeze(-1).transpose(1, 2).contiguous(), (whole_q, whole_k, whole_v, whole_out, whole_lse)

    def backward(
        self, dout: Tensor, _q: Tensor, _k: Tensor, _v: Tensor, _out: Tensor, _lse: Tensor, kept: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of this rank's shards."""
        whole_q, whole_k, whole_v, whole_out, whole_lse = kept
        (whole_dout,) = self._to_heads((dout,), (self.queries,))
        parts = self.attention.backward(whole_dout, whole_q, whole_k, whole_v, whole_out, whole_lse)
        dq, dk, dv = self._to_tokens(parts, (self.queries, self.keys, self.keys))
        return dq, dk, dv

    def _to_heads(self, tensors: Sequence[Tensor], of_each: Sequence[Heads]) -> list[Tensor]:
        """Local tokens of all heads [B, N_local, ·, D] -> all tokens of this rank's heads [B, N, ·, D]."""
        rank = self.world.rank
        wholes = [
            x.new_empty(sum(self.shards.rows), x.shape[0], len(heads[rank]), x.shape[3])
            for x, heads in zip(tensors, of_each, strict=True)
        ]
        by_rank = [whole.split(self.shards.rows) for whole in wholes]
        give = [
            [x[:, :, _slice(heads[peer])].transpose(0, 1) for x, heads in zip(tensors, of_each, strict=True)]
            for peer in range(self.world.size)
        ]
        pending = self._exchange(give, [[parts[peer] for parts in by_rank] for peer in range(self.world.size)])
        for parts, own in zip(by_rank, give[rank], strict=True):
            copy_strided_(parts[rank], own)
        pending.wait()
        if self.order is not None:
            wholes = [whole.index_select(0, self.order[0]) for whole in wholes]
        turned = [whole.transpose(0, 1) for whole in wholes]
        return turned if self.any_strides else [_contiguous(x) for x in turned]

    def _to_tokens(self, tensors: Sequence[Tensor], of_each: Sequence[Heads]) -> list[Tensor]:
        """The way back: all tokens of this rank's heads -> local tokens of all heads, copies of a head summed."""
        rank, rows = self.world.rank, self.shards.rows
        wholes = [x.transpose(0, 1) for x in tensors]
        if self.order is not None:
            wholes = [whole.index_select(0, self.order[1]) for whole in wholes]
        by_rank = [whole.split(rows) for whole in wholes]
        arrived = [
            [
                parts[rank] if peer == rank else x.new_empty(rows[rank], x.shape[0], len(heads[peer]), x.shape[3])
                for x, parts, heads in zip(tensors, by_rank, of_each, strict=True)
            ]
            for peer in range(self.world.size)
        ]
        self._exchange([[parts[peer] for parts in by_rank] for peer in range(self.world.size)], arrived).wait()
        return [
            _gathered_heads([parts[index].transpose(0, 1) for parts in arrived], heads)
            for index, heads in enumerate(of_each)
        ]

    def _exchange(self, give: Sequence[Sequence[Tensor]], take: Sequence[Sequence[Tensor]]) -> Work:
        """Send every other rank its tensors, and receive tensors from each; a tensor without elements is not sent."""
        sends, receives = (
            {peer: several for peer in self.world.peers if (several := [x for x in tensors[peer] if x.numel()])}
            for tensors in (give, take)
        )
        return self.world.send_recv(sends, receives, "heads")


def build(workload: Workload, context: BuildContext) -> ShardedAttention:
    """Rank r holds the r-th part of every sequence. Dense and dilated patterns, padded and packed."""
    world = context.world or World.single(context.device)
    shards = contiguous(workload.sequences, world.size)
    queries, keys = assign_heads(workload.num_heads, workload.num_kv_heads, world.size)
    heads, kv_heads = queries[world.rank], keys[world.rank]
    attention, any_strides = _in_one_launch(workload, context, heads, kv_heads), True
    if attention is None:
        pieces = _pieces(workload, heads, kv_heads)
        any_strides = all(piece.whole_heads for piece in pieces) and disjoint(pieces)
        attention = _ByPieces(Calls(workload, context.require_backend()), pieces, any_strides)
    order = _order(shards, context.device)
    algorithm = Ulysses(world, shards, queries, keys, attention, order, any_strides)
    notes = attention.notes if isinstance(attention, InTiles) else ()
    return ShardedAttention(workload, shards, world, algorithm, notes)


def _in_one_launch(workload: Workload, context: BuildContext, heads: range, kv_heads: range) -> Computation | None:
    """Packed sequences with only these heads, if one launch of the backend or of dilabench's tiles supports them and
    each K/V head has the same number of them.
    """
    if workload.layout != "packed" or not heads or len(heads) % len(kv_heads):
        return None
    group = len(heads) // len(kv_heads)
    if any(kv_heads.start + at // group != head // workload.group_size for at, head in enumerate(heads)):
        return None
    own = workload.replace(num_heads=len(heads), num_kv_heads=len(kv_heads))
    return in_one_launch(own, context) or in_tiles(own, context)


@dataclass(frozen=True, slots=True)
class _ByPieces:
    """Attention of whole sequences [B, N, ·, D] by one call for each piece. disjoint: no two have a query in common."""

    calls: Calls
    pieces: tuple[Piece, ...]
    disjoint: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out and lse."""
        results = PlacedSoftmax(q) if self.disjoint else Softmax(q)
        self.calls.attend(self.pieces, results, q, k, v)
        return results.finish()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv from the results of `forward`."""
        dq, dk, dv = PlacedSum(q) if self.disjoint else Sum.like(q), Sum.like(k), Sum.like(v)
        self.calls.attend_backward(self.pieces, (dq, dk, dv), dout, q, k, v, out, lse)
        return dq.finish(), dk.finish(), dv.finish()


def _pieces(workload: Workload, heads: range, kv_heads: range) -> tuple[Piece, ...]:
    """The calls of some heads over whole sequences; they keep the residues that they have among all heads."""
    branches = []
    for branch in branches_of(workload):
        places = tuple(
            place._replace(head=place.head - heads.start, kv_head=place.kv_head - kv_heads.start)
            for place in branch.places
            if place.head in heads
        )
        if places:
            branches.append(replace(branch, places=places))
    return pieces_between(workload, contiguous(workload.sequences, 1), 0, 0, branches)


def _order(shards: Shards, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """The row of each position if the parts of ranks follow each other, and its inverse; None if both are equal."""
    spans = [span for part in shards.parts for span in part]
    if all(before.stop == after.start for before, after in pairwise(spans)):
        return None
    positions = torch.cat([torch.arange(span.start, span.stop, device="cpu") for span in spans])
    return positions.argsort().to(device), positions.to(device)


def _slice(heads: range) -> slice:
    return slice(heads.start, heads.stop)


def _contiguous(x: Tensor) -> Tensor:
    if x.is_contiguous():
        return x
    copied = x.new_empty(x.shape)
    copy_strided_(copied, x)
    return copied


def _gathered_heads(parts: Sequence[Tensor], heads_of: Heads) -> Tensor:
    """[B, n, ·, D] of each rank's heads -> [B, n, H, D]; a head that several ranks had is summed."""
    B, rows, _, D = parts[0].shape
    total, dtype = max(heads.stop for heads in heads_of), parts[0].dtype
    if sum(len(heads) for heads in heads_of) == total:
        result = parts[0].new_empty(B, rows, total, D)
        for part, heads in zip(parts, heads_of, strict=True):
            copy_strided_(result[:, :, _slice(heads)], part)
        return result
    result = torch.zeros(B, rows, total, D, dtype=wide(dtype), device=parts[0].device)
    for part, heads in zip(parts, heads_of, strict=True):
        result[:, :, _slice(heads)] += part
    return result.to(dtype)
