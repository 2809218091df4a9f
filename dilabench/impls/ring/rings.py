"""The rings: at step t every rank has the K and V of the rank t before it, and gives its dK and dV straight back.

Each step is sent by the owner instead of being passed on, which moves the same bytes and skips hidden rows: whole steps
beyond a window, chunks behind a causal mask. Partial dK and dV return to their owner in the kernel's dtype and are
summed there in float32, so they are sent once, not P times.

`ring`: communication and computation alternate. `ring-overlap`: the next step is sent while this one is computed, in
two buffers of K and V; on CUDA messages run on a separate stream, which waits only for earlier work. The last step's K
and V stay until the backward pass, which begins with them, continues with the other steps and ends with the rank's own
part. Then one step less is moved, and every dK and dV is sent while something is computed. `zigzag-ring`: the same with
causal work balanced over the ranks. Rank r holds chunks r and 2P-1-r of 2P. A step from an earlier rank needs all
queries and the first half of its keys, one from a later rank the second half of the queries and all its keys: half a
block either way, and only that is computed. For dilated patterns it is faster only if branches of low rate span ranks.
`ring-varlen`: packed sequences of any lengths, each cut over all ranks. A sequence shorter than the number of chunks
leaves some ranks without a row of it, without padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.distributed.sharding import Cut, contiguous, zigzag
from dilabench.distributed.world import Work
from dilabench.impls.ring.schedule.function import ShardedAttention
from dilabench.impls.ring.schedule.row_exchange import Returned, Transfer
from dilabench.impls.ring.schedule.share import Share, share_of
from dilabench.impls.ring.schedule.sums import Softmax, Sum
from dilabench.workload.spec import Workload


@dataclass(frozen=True, slots=True)
class Ring:
    """`function.Algorithm` with point-to-point messages; distance 0 is the rank's own part, without messages.

    overlap: the next step is sent while this one is computed (two buffers), and the last step's K and V are kept for
    the backward pass; without it messages and computation alternate.
    """

    share: Share
    overlap: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """out, lse, and what is kept: K and V of the last step, as they arrived."""
        results, coming = Softmax(q), None
        for distance, following in pairwise((*range(self._size), 0)):
            arrived, coming = self._take(distance, following, coming, k, v)
            if arrived is None:
                self.share.attend_own(results, q, k, v)
            elif arrived.packed:
                self.share.attend_remote(arrived.owner, results, q, arrived.packed)
        return *results.finish(), tuple(arrived.packed) if self.overlap and arrived is not None else ()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of this rank's shards."""
        share, (dq, dk, dv) = self.share, (Sum.like(x, onto_first=True) for x in (q, k, v))
        returns: list[Returned] = []
        # The forward pass kept the rows of the next rank in the ring.
        keeps = self.overlap and self._size > 1
        coming = Transfer((share.world.rank + 1) % self._size, Work(()), list(kept)) if keeps else None
        for distance, following in pairwise((*self._backward_order, 0)):
            arrived, coming = self._take(distance, following, coming, k, v)
            if arrived is None:
                share.attend_own_backward((dq, dk, dv), dout, q, k, v, out, lse)
                continue
            gradients = []
            if arrived.packed:
                gradients = share.attend_remote_backward(arrived.owner, dq, dout, q, arrived.packed, out, lse)
            returns.append(share.exchange.give_back(distance, gradients, k, share.gradient_dtype))
            # Messages under way hold what they still send; all else is freed before the next step.
            del arrived, gradients
            if not self.overlap or len(returns) > 1:
                returns.pop(0).add(dk, dv)
        for returned in returns:
            returned.add(dk, dv)
        return dq.finish(), dk.finish(), dv.finish()

    @property
    def _size(self) -> int:
        return self.share.world.size

    @property
    def _backward_order(self) -> tuple[int, ...]:
        """Distances in the order of the backward pass, the same on all ranks, so that messages match."""
        if not self.overlap or self._size == 1:
            return tuple(range(self._size))
        return self._size - 1, *range(1, self._size - 1), 0

    def _take(
        self, distance: int, following: int, coming: Transfer | None, k: Tensor, v: Tensor
    ) -> tuple[Transfer | None, Transfer | None]:
        """Wait for the rows from a distance (None: own rows); if steps overlap, the following ones are requested."""
        exchange = self.share.exchange
        arrived = exchange.fetch(distance, k, v) if distance and coming is None else coming
        ahead = exchange.fetch(following, k, v) if self.overlap and following else None
        if arrived is not None:
            arrived.work.wait()
        return arrived, ahead


def build(workload: Workload, context: BuildContext) -> ShardedAttention:
    """`ring`: rank r holds the r-th part of the sequence."""
    return _ring(workload, context, contiguous, overlap=False)


def build_overlap(workload: Workload, context: BuildContext) -> ShardedAttention:
    """`ring-overlap`: the same parts."""
    return _ring(workload, context, contiguous, overlap=True)


def build_zigzag(workload: Workload, context: BuildContext) -> ShardedAttention:
    """`zigzag-ring`: dense and dilated patterns."""
    return _ring(workload, context, zigzag, overlap=True)


def build_varlen(workload: Workload, context: BuildContext) -> ShardedAttention:
    """`ring-varlen`: a function of local tokens [T_local, H, D], each sequence's part in the order of sequences.

    Causal sequences are cut zigzag, others in order.
    """
    return _ring(workload, context, zigzag if workload.causal else contiguous, overlap=True)


def _ring(workload: Workload, context: BuildContext, cut: Cut, overlap: bool) -> ShardedAttention:
    share = share_of(workload, context, cut)
    return ShardedAttention(workload, share.shards, share.world, Ring(share, overlap=overlap))
