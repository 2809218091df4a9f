"""`block-sparse-ring`: key blocks that some local query sees are sent once each, while the own part is computed.

For masks and selections: a block that only some key/value heads have selected is sent with only those heads. Received
rows are then stored head by head: a gathered row of one head has another position than the next head's. The kernel need
not know, because no pair of these blocks is hidden by its position.

Two kernel calls per pass: own queries on own keys, and on all gathered blocks. The second is a rectangle without causal
edge, because ranks hold whole blocks. It costs one merge by lse, and a wait for the part of the exchange that the first
call does not hide. Gathered blocks are kept for the backward pass, which makes their dK and dV first and gives them
back, once, while the own gradients are computed; their owner sums in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.distributed.block_assignment import BlockAssignment
from dilabench.distributed.sharding import shards_of
from dilabench.distributed.world import World
from dilabench.impls.block_sparse.planned import BlockBackward, BlockForward, kernels_for
from dilabench.impls.ring.schedule.function import ShardedAttention
from dilabench.impls.ring.schedule.row_exchange import RowGather, RowSelection, places_in_order
from dilabench.impls.ring.schedule.sums import Sum
from dilabench.kernels.block_sparse.lists import BoolArray
from dilabench.kernels.block_sparse.plan import BlockPlan
from dilabench.kernels.lse import merge_rows_
from dilabench.workload.spec import UNBOUNDED, Workload


@dataclass(frozen=True, slots=True)
class BlockExchange:
    """`function.Algorithm` of one rank, which holds some rows.

    own: its queries on its own keys. gathered: the same queries on the blocks of others, owner by owner (None: it needs
    none), with the keys that `placed` unpacks.
    """

    exchange: RowGather
    placed: RowSelection
    attend: BlockForward
    attend_backward: BlockBackward
    scale: float
    own: BlockPlan
    gathered: BlockPlan | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """out, lse, and the gathered K and V."""
        *arriving, pending = self.exchange.gather(k, v)
        out, lse = self.attend(q, k, v, self.own, scale=self.scale)
        pending.wait()
        keys, values = map(self.placed.unpack, arriving)
        if self.gathered is not None:
            far_out, far_lse = self.attend(q, keys, values, self.gathered, scale=self.scale)
            merge_rows_(out, lse, far_out, far_lse)
        return out, lse, (keys, values)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of this rank's shards."""
        sums = Sum.like(q), Sum.like(k), Sum.like(v)
        dkeys, dvalues = keys, values = kept
        if self.gathered is not None:
            far = self.attend_backward(dout, q, keys, values, out, lse, self.gathered, scale=self.scale)
            sums[0].put(far[0])
            dkeys, dvalues = far[1:]
        returned = self.exchange.give_back(self.placed.pack(dkeys), self.placed.pack(dvalues), k)
        own = self.attend_backward(dout, q, k, v, out, lse, self.own, scale=self.scale)
        for total, part in zip(sums, own, strict=True):
            total.put(part)
        returned.add(*sums[1:])
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
    """Ranks hold chunks of blocks assigned by the pairs that their rows see.

    Raises ConfigError for a file that does not fit, ValueError for windows and for a pattern without whole blocks.
    """
    if workload.window != UNBOUNDED:
        raise ValueError(
            f"window {workload.window} on a block mask over ranks: gathered blocks have no distance in rows; use a "
            "local_window mask, or block-sparse on one device"
        )
    world = context.world or World.single(context.device)
    assignment = BlockAssignment.of(workload, world.size)
    shards = shards_of(assignment.positions)
    algorithm = _exchange(workload, context.device, world, assignment) if shards.rows[world.rank] else NoRows()
    return ShardedAttention(workload, shards, world, algorithm)


Blocks = npt.NDArray[np.int64]


def _exchange(workload: Workload, device: torch.device, world: World, assignment: BlockAssignment) -> BlockExchange:
    """The computation and messages of this rank.

    The last block of the sequence may be short, so that its owner comes last among the owners of gathered blocks.
    """
    own = assignment.own(world.rank)
    given = {reader: assignment.sent(world.rank, reader) for reader in world.peers}
    needed = {owner: assignment.sent(owner, world.rank) for owner in world.peers}
    last = len(assignment.sizes) - 1
    needed = dict(sorted(needed.items(), key=lambda item: last in item[1] // assignment.parts))
    coming = np.concatenate([*needed.values(), own[:0]])
    queries = assignment.mask[:, own]
    rows = int(assignment.sizes[own].sum())
    slots = _slots(assignment, coming)
    key_rows = _rows_of_slots(assignment, coming, slots)
    kernels = kernels_for(device, getattr(torch, workload.dtype))
    needs = {owner: assignment.rows_of(parts) for owner, parts in needed.items()}
    gives = {}
    for reader, parts in given.items():
        everything = assignment.parts == 1 and len(parts) == len(own)
        index = None if everything else _rows(assignment, parts, own.searchsorted(parts // assignment.parts)).to(device)
        if len(parts):
            gives[reader] = [RowSelection(0, rows, index, assignment.parts)]
    order = _rows(assignment, coming, slots).to(device) if assignment.parts > 1 else None
    return BlockExchange(
        RowGather(world, sum(needs.values()), places_in_order(needs), gives, assignment.parts),
        RowSelection(0, key_rows, order, assignment.parts),
        kernels.attend,
        kernels.attend_backward,
        workload.softmax_scale,
        own=BlockPlan(queries[:, :, own], assignment.block_size, rows, workload.causal),
        gathered=BlockPlan(
            _gathered_mask(assignment, queries, coming, slots),
            assignment.block_size,
            rows,
            causal=False,
            key_rows=key_rows,
        )
        if len(coming)
        else None,
    )


def _slots(assignment: BlockAssignment, parts: Blocks) -> Blocks:
    """[parts]: the block of gathered keys of each: head by head, the short one last."""
    blocks, heads = parts // assignment.parts, parts % assignment.parts
    whole = assignment.sizes[blocks] == assignment.block_size
    slots = np.zeros(len(parts), dtype=np.int64)
    for head in range(assignment.parts):
        mine = np.flatnonzero(whole & (heads == head))
        slots[mine] = np.arange(len(mine))
    slots[~whole] = slots[whole].max(initial=-1) + 1
    return slots


def _rows_of_slots(assignment: BlockAssignment, parts: Blocks, slots: Blocks) -> int:
    """Rows of gathered keys, of the heads that have most."""
    return int((slots * assignment.block_size + assignment.sizes[parts // assignment.parts]).max(initial=0))


def _rows(assignment: BlockAssignment, parts: Blocks, places: Blocks) -> Tensor:
    """row·heads + head of the rows of parts whose blocks are the ones at these places, part by part."""
    inside = np.arange(assignment.block_size)
    rows = (places[:, None] * assignment.block_size + inside) * assignment.parts + (parts % assignment.parts)[:, None]
    return torch.from_numpy(rows[inside < assignment.sizes[parts // assignment.parts][:, None]])


def _gathered_mask(assignment: BlockAssignment, queries: BoolArray, parts: Blocks, slots: Blocks) -> BoolArray:
    """[heads of the mask, own blocks, slots] of the mask's rows [heads of the mask, own blocks, n]."""
    mask = np.zeros((*queries.shape[:2], slots.max() + 1), dtype=bool)
    sharing = len(mask) // assignment.parts
    for head, (found, seen) in enumerate(zip(mask, queries, strict=True)):
        mine = parts % assignment.parts == head // sharing
        found[:, slots[mine]] = seen[:, parts[mine] // assignment.parts]
    return mask
