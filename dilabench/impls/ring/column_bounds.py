"""`column-bounds-ring`: keys that some local query sees travel, each once, while the own part is computed.

The exchange of `block-sparse-ring`, by the key instead of by the block: windows send what reaches over a rank's edge,
documents what they are cut into.
"""

from __future__ import annotations

import numpy as np
import torch

from dilabench.contracts import BuildContext
from dilabench.distributed.column_deal import ColumnDeal
from dilabench.distributed.sharding import shards_of
from dilabench.distributed.world import World
from dilabench.impls.block_sparse.block_sparse import kernels_for
from dilabench.impls.block_sparse.union import COLUMN_BLOCK
from dilabench.impls.ring.block_sparse import BlockExchange, NoRows, travelling
from dilabench.impls.ring.schedule.function import ShardedAttention
from dilabench.impls.ring.schedule.row_exchange import RowExchange
from dilabench.kernels.block_sparse.plan import BlockPlan
from dilabench.patterns.pattern import Positions
from dilabench.workload.spec import Workload


def build(workload: Workload, context: BuildContext) -> ShardedAttention:
    """Ranks hold chunks of positions dealt by the keys that they see.

    Raises ConfigError for a file of bounds that does not fit, ValueError for a pattern without bounds of columns.
    """
    world = context.world or World.alone(context.device)
    deal = ColumnDeal.of(workload, world.size)
    shards = shards_of(deal.held)
    algorithm = _exchange(workload, context.device, world, deal) if shards.rows[world.rank] else NoRows()
    return ShardedAttention(workload, shards, world, algorithm)


def _exchange(workload: Workload, device: torch.device, world: World, deal: ColumnDeal) -> BlockExchange:
    rank, own = world.rank, deal.own(world.rank)
    needed, given = travelling(deal, world)
    coming = np.concatenate([*needed.values(), own[:0]])
    _, attend, attend_backward = kernels_for(device)
    exchange = RowExchange(
        world,
        needs={holder: len(keys) for holder, keys in needed.items() if len(keys)},
        gives={
            reader: None if len(keys) == len(own) else torch.from_numpy(own.searchsorted(keys)).to(device)
            for reader, keys in given.items()
            if len(keys)
        },
    )
    return BlockExchange(
        exchange,
        attend,
        attend_backward,
        workload.softmax_scale,
        own=_plan(deal, rank, own),
        gathered=_plan(deal, rank, coming) if len(coming) else None,
    )


def _plan(deal: ColumnDeal, rank: int, keys: Positions) -> BlockPlan:
    """Of a rank's queries on some keys, in the order in which they lie."""
    rows = len(deal.own(rank))
    everything = np.broadcast_to(np.True_, (1, -(-rows // COLUMN_BLOCK), -(-len(keys) // COLUMN_BLOCK)))
    return BlockPlan(everything, COLUMN_BLOCK, rows, False, key_rows=len(keys), hidden=deal.local(rank, keys))
