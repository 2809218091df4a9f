"""`block-sparse-ring`: key blocks that some local query sees travel, each once, while the own part is computed.

Two kernel calls per pass: own queries on own keys, and on all gathered blocks. The second is a rectangle without causal
edge, for ranks hold whole blocks; it costs one merge by lse, and only what the first call does not hide of the exchange
is waited for. Gathered blocks are kept for the backward pass, which makes their dK and dV first and gives them back,
once, while the own gradients are computed; their owner sums in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.distributed.block_deal import BlockDeal
from dilabench.distributed.sharding import shards_of
from dilabench.distributed.world import World
from dilabench.impls.block_sparse.block_sparse import kernels_for
from dilabench.impls.block_sparse.union import BlockBackward, BlockForward
from dilabench.impls.ring.schedule.function import ShardedAttention
from dilabench.impls.ring.schedule.row_exchange import RowExchange, apart, together
from dilabench.impls.ring.schedule.sums import Sum
from dilabench.impls.union.merging import merge_rows_
from dilabench.kernels.block_sparse.plan import BlockPlan
from dilabench.patterns.block_sparse import BlockSparsePattern
from dilabench.workload.spec import UNBOUNDED, Workload


@dataclass(frozen=True, slots=True)
class BlockExchange:
    """`function.Algorithm` of one rank, which holds some rows.

    own: its queries on its own keys. gathered: the same queries on the blocks of others, holder by holder (None: it
    needs none).
    """

    exchange: RowExchange
    attend: BlockForward
    attend_backward: BlockBackward
    scale: float
    own: BlockPlan
    gathered: BlockPlan | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """out, lse, and the gathered K and V."""
        arriving, pending = self.exchange.gather(k, v)
        out, lse = self.attend(q, k, v, self.own, scale=self.scale)
        pending.wait()
        if self.gathered is not None:
            far_out, far_lse = self.attend(q, *apart(arriving), self.gathered, scale=self.scale)
            merge_rows_(out, lse, far_out, far_lse)
        return out, lse, (arriving,)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of this rank's shards."""
        sums = Sum.like(q), Sum.like(k), Sum.like(v)
        gradients = kept[0]
        if self.gathered is not None:
            keys, values = apart(kept[0])
            far = self.attend_backward(dout, q, keys, values, out, lse, self.gathered, scale=self.scale)
            sums[0].put(far[0])
            gradients = together(*far[1:])
        returning, pending = self.exchange.give_back(gradients, k)
        own = self.attend_backward(dout, q, k, v, out, lse, self.own, scale=self.scale)
        for total, part in zip(sums, own, strict=True):
            total.put(part)
        pending.wait()
        self.exchange.add_returned(*sums[1:], returning)
        dq, dk, dv = (total.finish() for total in sums)
        return dq, dk, dv


@dataclass(frozen=True, slots=True)
class NoRows:
    """`function.Algorithm` of a rank that holds no block: it neither sends nor receives."""

    def forward(self, q: Tensor, _k: Tensor, _v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Empty results."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        return torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], 0), dtype=dtype), ()

    def backward(
        self, _dout: Tensor, q: Tensor, k: Tensor, v: Tensor, _out: Tensor, _lse: Tensor, _kept: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Empty gradients."""
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def build(workload: Workload, context: BuildContext) -> ShardedAttention:
    """Rank r holds the r-th part of the blocks, or, behind a causal mask, chunks r and 2P-1-r of 2P.

    Raises ConfigError when a mask file does not fit, ValueError for windows and for masks over dilated branches.
    """
    _refuse(workload)
    world = context.world or World.alone(context.device)
    deal = BlockDeal.of(workload, world.size)
    shards = shards_of(deal.positions)
    algorithm = _exchange(workload, world, deal) if shards.rows[world.rank] else NoRows()
    return ShardedAttention(workload, shards, world, algorithm)


def _refuse(workload: Workload) -> None:
    if workload.window != UNBOUNDED:
        raise ValueError(
            f"window {workload.window} on a block mask over ranks: gathered blocks have no distance in rows; use a "
            "local_window mask, or block-sparse on one device"
        )
    if BlockSparsePattern.of(workload).branches is not None:
        raise ValueError(
            "a block mask over dilated branches has blocks whose rows lie apart, on no rank as a whole; use "
            "block-sparse on one device, or ring-allgather without the mask"
        )


class Deal(Protocol):
    """Who holds which blocks or keys, and what of them goes from rank to rank."""

    def sent(self, holder: int, reader: int) -> npt.NDArray[np.int64]: ...


Parcels = dict[int, npt.NDArray[np.int64]]


def travelling(deal: Deal, world: World) -> tuple[Parcels, Parcels]:
    """What this rank needs of each holder, and gives each reader."""
    others = [other for other in range(world.size) if other != world.rank]
    needed = {holder: deal.sent(holder, world.rank) for holder in others}
    return needed, {reader: deal.sent(world.rank, reader) for reader in others}


def _exchange(workload: Workload, world: World, deal: BlockDeal) -> BlockExchange:
    """What this rank computes, sends and receives.

    The last block may be short, and comes last among gathered ones: behind a causal mask only its holder sees it,
    otherwise the last rank holds it.
    """
    own = deal.own(world.rank)
    needed, given = travelling(deal, world)
    coming = np.concatenate([*needed.values(), own[:0]])
    queries = deal.mask[:, own]
    rows = deal.rows_of(own)
    _, attend, attend_backward = kernels_for(world.device)
    exchange = RowExchange(
        world,
        needs={holder: deal.rows_of(blocks) for holder, blocks in needed.items() if len(blocks)},
        gives={
            reader: None if len(blocks) == len(own) else _local_rows(deal, own, blocks).to(world.device)
            for reader, blocks in given.items()
            if len(blocks)
        },
    )
    return BlockExchange(
        exchange,
        attend,
        attend_backward,
        workload.softmax_scale,
        own=BlockPlan(queries[:, :, own], deal.block_size, rows, workload.causal),
        gathered=BlockPlan(queries[:, :, coming], deal.block_size, rows, causal=False, key_rows=deal.rows_of(coming))
        if len(coming)
        else None,
    )


def _local_rows(deal: BlockDeal, own: npt.NDArray[np.int64], blocks: npt.NDArray[np.int64]) -> Tensor:
    """Local rows of some own blocks."""
    places = np.searchsorted(own, blocks)
    rows = (places[:, None] * deal.block_size + np.arange(deal.block_size)).ravel()
    return torch.from_numpy(rows[rows < deal.rows_of(own)])
