"""`balanced-allgather`: chunks of rows dealt so that ranks do the same work; keys go to the ranks that see them, once.

For packed documents, whose work is their areas under the mask: cut in order, half of two ranks would wait. Each rank
has as many tokens, and asks for what its rows see and no more. One launch where the backend has a kernel for that; over
others each piece of a document is one or two calls, as in `zigzag-allgather`.
"""

from __future__ import annotations

from dilabench.contracts import BuildContext
from dilabench.distributed.row_deal import RowDeal
from dilabench.distributed.sharding import shards_of
from dilabench.distributed.world import World
from dilabench.impls.ring import gathered
from dilabench.impls.ring.schedule.function import ShardedAttention
from dilabench.impls.ring.schedule.one_launch import in_one_launch
from dilabench.workload.spec import Workload


def build(workload: Workload, context: BuildContext) -> ShardedAttention:
    """Dense patterns with causal masks and windows, padded or packed."""
    world = context.world or World.alone(context.device)
    deal = RowDeal.of(workload, world.size)
    shards = shards_of(deal.held)
    algorithm = in_one_launch(workload, context, deal) or gathered.by_pieces(workload, context, shards)
    return ShardedAttention(workload, shards, world, algorithm)
