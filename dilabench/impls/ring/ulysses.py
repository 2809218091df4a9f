"""`ulysses`: ranks exchange their part of the sequence for their part of the heads, attend, and exchange back.

One all-to-all before and one after; in between every rank sees whole sequences. Query heads are assigned in order,
numbers differing by at most one. A key/value head goes to every rank that holds one of its query heads; the rank that
holds the tokens sums its gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.distributed.sharding import Shards, contiguous
from dilabench.distributed.world import World
from dilabench.impls.one_operator import Computation
from dilabench.impls.packed import in_one_launch
from dilabench.impls.ring.schedule.calls import Calls
from dilabench.impls.ring.schedule.function import Local, ShardedAttention
from dilabench.impls.ring.schedule.pieces import Piece
from dilabench.impls.ring.schedule.plan import pieces_between
from dilabench.impls.ring.schedule.sums import Softmax, Sum, wide
from dilabench.impls.union.branches import branches_of
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
    """

    world: World
    shards: Shards
    queries: Heads
    keys: Heads
    attention: Local

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """out, lse, and what is kept."""
        whole_q, whole_k, whole_v = self._to_heads((q, k, v), (self.queries, self.keys, self.keys))
        whole_out, whole_lse, *_ = self.attention.forward(whole_q, whole_k, whole_v)
        (out,) = self._to_tokens((whole_out,), (self.queries,), q.shape[0])
        (lse,) = self._to_tokens((whole_lse.transpose(1, 2).unsqueeze(-1),), (self.queries,), q.shape[0])
        lse_by_head = lse.squeeze(-1).transpose(1, 2).contiguous()
        return out, lse_by_head, (whole_q, whole_k, whole_v, whole_out, whole_lse)

    def backward(
        self, dout: Tensor, q: Tensor, _k: Tensor, _v: Tensor, _out: Tensor, _lse: Tensor, kept: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of this rank's shards."""
        whole_q, whole_k, whole_v, whole_out, whole_lse = kept
        (whole_dout,) = self._to_heads((dout,), (self.queries,))
        parts = self.attention.backward(whole_dout, whole_q, whole_k, whole_v, whole_out, whole_lse)
        dq, dk, dv = self._to_tokens(parts, (self.queries, self.keys, self.keys), q.shape[0])
        return dq, dk, dv

    def _to_heads(self, tensors: Sequence[Tensor], of_each: Sequence[Heads]) -> list[Tensor]:
        """Local tokens of all heads [B, N_local, ·, D] -> all tokens of this rank's heads [B, N, ·, D]."""
        B, _, _, D = tensors[0].shape
        rows, rank = self.shards.rows, self.world.rank
        give = [
            [x[:, :, _slice(heads[peer])] for x, heads in zip(tensors, of_each, strict=True)]
            for peer in range(self.world.size)
        ]
        shapes = [[(B, rows[peer], len(heads[rank]), D) for heads in of_each] for peer in range(self.world.size)]
        arrived = self._exchange(give, shapes)
        return [
            self.shards.join([arrived[peer][index] for peer in range(self.world.size)]) for index in range(len(tensors))
        ]

    def _to_tokens(self, tensors: Sequence[Tensor], of_each: Sequence[Heads], B: int) -> list[Tensor]:
        """The way back: all tokens of this rank's heads -> local tokens of all heads, copies of a head summed."""
        D = tensors[0].shape[-1]
        own_rows = self.shards.rows[self.world.rank]
        give = [[self.shards.take(x, peer) for x in tensors] for peer in range(self.world.size)]
        shapes = [[(B, own_rows, len(heads[peer]), D) for heads in of_each] for peer in range(self.world.size)]
        arrived = self._exchange(give, shapes)
        return [_gathered_heads([parts[index] for parts in arrived], heads) for index, heads in enumerate(of_each)]

    def _exchange(
        self, give: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
    ) -> list[list[Tensor]]:
        """Send each peer its tensors and receive tensors of the given shapes, in one collective."""
        flat = torch.cat([x.flatten() for tensors in give for x in tensors])
        sizes = [[torch.Size(shape).numel() for shape in several] for several in shapes]
        received, pending = self.world.all_to_all(
            flat, [sum(x.numel() for x in tensors) for tensors in give], [sum(several) for several in sizes], "heads"
        )
        pending.wait()
        parts = iter(received.split([size for several in sizes for size in several]))
        return [[next(parts).view(shape) for shape in several] for several in shapes]


def build(workload: Workload, context: BuildContext) -> ShardedAttention:
    """Rank r holds the r-th part of every sequence. Dense and dilated patterns, padded and packed."""
    world = context.world or World.single(context.device)
    shards = contiguous(workload.sequences, world.size)
    queries, keys = assign_heads(workload.num_heads, workload.num_kv_heads, world.size)
    heads, kv_heads = queries[world.rank], keys[world.rank]
    attention = _in_one_launch(workload, context, heads, kv_heads)
    if attention is None:
        attention = _ByPieces(Calls(workload, context.require_backend()), _pieces(workload, heads, kv_heads))
    return ShardedAttention(workload, shards, world, Ulysses(world, shards, queries, keys, attention))


def _in_one_launch(workload: Workload, context: BuildContext, heads: range, kv_heads: range) -> Computation | None:
    """Packed sequences with only these heads, if one launch supports them and each K/V head has the same number of
    them.
    """
    if workload.layout != "packed" or not heads or len(heads) % len(kv_heads):
        return None
    group = len(heads) // len(kv_heads)
    if any(kv_heads.start + at // group != head // workload.group_size for at, head in enumerate(heads)):
        return None
    return in_one_launch(workload.replace(num_heads=len(heads), num_kv_heads=len(kv_heads)), context)


@dataclass(frozen=True, slots=True)
class _ByPieces:
    """Attention of whole sequences [B, N, ·, D] by one call for each piece."""

    calls: Calls
    pieces: tuple[Piece, ...]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out and lse."""
        results = Softmax(q)
        self.calls.attend(self.pieces, results, q, k, v)
        return results.finish()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv from the results of `forward`."""
        dq, dk, dv = Sum.like(q), Sum.like(k), Sum.like(v)
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


def _slice(heads: range) -> slice:
    return slice(heads.start, heads.stop)


def _gathered_heads(parts: Sequence[Tensor], heads_of: Heads) -> Tensor:
    """[B, n, ·, D] of each rank's heads -> [B, n, H, D]; a head that several ranks had is summed."""
    total = max(heads.stop for heads in heads_of)
    if sum(len(heads) for heads in heads_of) == total:
        return torch.cat(list(parts), 2)
    B, rows, _, D = parts[0].shape
    result = torch.zeros(B, rows, total, D, dtype=wide(parts[0].dtype), device=parts[0].device)
    for part, heads in zip(parts, heads_of, strict=True):
        result[:, :, _slice(heads)] += part
    return result.to(parts[0].dtype)
