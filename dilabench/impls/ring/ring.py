"""`ring`: K and V go from rank to rank, one hop after another; communication and computation take turns."""

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
    return ShardedAttention(workload, share.shards, share.world, Ring(share, overlap=False))
