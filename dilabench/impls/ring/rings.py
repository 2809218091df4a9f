"""The rings: K and V go from rank to rank. They differ in how sequences are cut and in whether hops overlap.

`ring`: communication and computation take turns. `ring-overlap`: the next hop is under way while this one is computed,
in two buffers of K and V, and what the last hop brought is kept for the backward pass; on CUDA the hops run on a stream
of their own, which waits only for what was queued before them.
`zigzag-ring`: the same with causal work balanced over the ranks. Rank r holds chunks r and 2P-1-r of 2P. A hop from an
earlier rank needs all queries and the first half of its keys, one from a later rank the second half of the queries and
all its keys: half a block either way, and only that is computed. For dilated patterns it pays only where branches of
low rate span ranks.
`ring-varlen`: packed sequences of any lengths, each cut over all ranks. A sequence shorter than the number of chunks
leaves some ranks without a row of it; nothing is padded.
"""

from __future__ import annotations

from dilabench.contracts import BuildContext
from dilabench.distributed.sharding import Cut, contiguous, zigzag
from dilabench.impls.ring.schedule.function import ShardedAttention
from dilabench.impls.ring.schedule.hops import Ring
from dilabench.impls.ring.schedule.share import share_of
from dilabench.workload.spec import Workload


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
