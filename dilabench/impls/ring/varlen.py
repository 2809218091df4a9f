"""`ring-varlen`: packed sequences of any lengths, each cut over all ranks, on the overlapping ring.

Causal sequences are cut zigzag, others in order. A sequence shorter than the number of chunks leaves some ranks without
a row of it; nothing is padded.
"""

from __future__ import annotations

from dilabench.contracts import BuildContext
from dilabench.distributed.sharding import contiguous, zigzag
from dilabench.impls.ring.schedule.function import ShardedAttention
from dilabench.impls.ring.schedule.hops import Ring
from dilabench.impls.ring.schedule.share import share_of
from dilabench.workload.spec import Workload


def build(workload: Workload, context: BuildContext) -> ShardedAttention:
    """A function of local tokens [T_local, H, D]: each sequence's part, in the order of sequences."""
    share = share_of(workload, context, zigzag if workload.causal else contiguous)
    return ShardedAttention(workload, share.shards, share.world, Ring(share, overlap=True))
