"""`zigzag-ring`: causal work balanced over the ranks; the overlapping ring on zigzag shards.

Rank r holds chunks r and 2P-1-r of 2P. A hop from an earlier rank needs all queries and the first half of its keys, one
from a later rank the second half of the queries and all its keys: half a block either way, and only that is computed.
"""

from __future__ import annotations

from dilabench.contracts import BuildContext
from dilabench.distributed.sharding import zigzag
from dilabench.impls.ring.schedule.function import ShardedAttention
from dilabench.impls.ring.schedule.hops import Ring
from dilabench.impls.ring.schedule.share import share_of
from dilabench.workload.spec import Workload


def build(workload: Workload, context: BuildContext) -> ShardedAttention:
    """Dense and dilated patterns; for dilated ones it pays only where branches of low rate span ranks."""
    share = share_of(workload, context, zigzag)
    return ShardedAttention(workload, share.shards, share.world, Ring(share, overlap=True))
