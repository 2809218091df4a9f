"""`ring-overlap`: the ring with the next hop under way while this one is computed.

Two buffers of K and V, and what the last hop brought is kept for the backward pass. On CUDA the hops run on a stream of
their own, which waits only for what was queued before them.
"""

from __future__ import annotations

from dilabench.contracts import BuildContext
from dilabench.distributed.sharding import contiguous
from dilabench.impls.ring.schedule.function import ShardedAttention
from dilabench.impls.ring.schedule.hops import Ring
from dilabench.impls.ring.schedule.share import share_of
from dilabench.workload.spec import Workload


def build(workload: Workload, context: BuildContext) -> ShardedAttention:
    """Rank r holds the r-th part of the sequence."""
    share = share_of(workload, context, contiguous)
    return ShardedAttention(workload, share.shards, share.world, Ring(share, overlap=True))
