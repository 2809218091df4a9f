"""`ring-multihead`, `block-sparse-ring-multihead`: projections around attention on shards of embeddings.

Projections work on each token separately, so they need no communication forward. Each rank has the parameter gradients
of its own tokens; they are summed over the ranks in the backward pass, as data parallelism does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dilabench.contracts import BuildContext
from dilabench.distributed.sharding import Shards, contiguous
from dilabench.distributed.world import World
from dilabench.impls.multihead import SEED, ProjectedAttention
from dilabench.impls.ring import block_sparse, rings
from dilabench.impls.ring.schedule.function import ShardedAttention
from dilabench.impls.ring.schedule.sums import wide
from dilabench.workload.spec import Workload


class ShardedProjection(nn.Module):
    """A `ProjectedAttention` on shards of embeddings [B, N_local, E], with the same parameters on every rank.

    Parameter gradients come out summed over the ranks: what one device would have.
    """

    def __init__(self, module: ProjectedAttention, attention: ShardedAttention) -> None:
        super().__init__()
        self.module = module
        self._core = attention

    @property
    def shards(self) -> Shards:
        """Which positions each rank holds."""
        return self._core.shards

    @property
    def world(self) -> World:
        """The ranks."""
        return self._core.world

    def forward(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None) -> Tensor:
        """[B, N_local, E] of query [B, N_local, E]; key and value as in `ProjectedAttention`."""
        names, parameters = zip(*self.module.named_parameters(), strict=True)
        shared = _SummedGradients.apply(self.world, *parameters)
        by_name = dict(zip(names, shared, strict=True))
        return torch.func.functional_call(self.module, by_name, (query, key, value))


class _SummedGradients(torch.autograd.Function):
    """The parameters themselves; their gradients summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, world: World, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.world = world
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        parts = _summed(ctx.world, flat).split([gradient.numel() for gradient in gradients])
        return None, *(part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True))


def _summed(world: World, flat: Tensor) -> Tensor:
    """[n] summed over the ranks: each sums its part of all shares in a wider dtype and rounds it once.

    An all-reduce moves the same bytes, but rounds the partial sum at every rank that it passes.
    """
    sizes = contiguous([(0, flat.numel())], world.size).rows
    shares, pending = world.all_to_all(flat, sizes, [sizes[world.rank]] * world.size, "parameters")
    pending.wait()
    part = shares.view(world.size, -1).sum(0, dtype=wide(flat.dtype)).to(flat.dtype)
    return torch.cat(world.all_gather(part, [(size,) for size in sizes], "parameters"))


def build(workload: Workload, context: BuildContext) -> ShardedProjection | ProjectedAttention:
    """Causal dense attention on zigzag shards, everything else in order; on one rank the plain module."""
    build_ring = rings.build_zigzag if workload.causal and workload.is_dense else rings.build_overlap
    return projected(workload, context, build_ring(workload, context))


def build_block_sparse(workload: Workload, context: BuildContext) -> ShardedProjection | ProjectedAttention:
    """The same around `block-sparse-ring`, with its shards and refusals."""
    return projected(workload, context, block_sparse.build(workload, context))


def projected(
    workload: Workload, context: BuildContext, attention: ShardedAttention
) -> ShardedProjection | ProjectedAttention:
    """Projections around a rank's attention; on one rank the plain module."""
    module = ProjectedAttention(
        workload.num_heads * workload.head_dim, workload.num_heads, attention, num_kv_heads=workload.num_kv_heads
    )
    module.reset_parameters(torch.Generator().manual_seed(SEED))
    module = module.to(context.device, getattr(torch, workload.dtype))
    return ShardedProjection(module, attention) if attention.world.size > 1 else module
