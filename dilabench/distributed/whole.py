"""Whole tensors around a function of shards, for `verify` and users with full inputs.

Every rank has the same whole q, k, v (from the same seed), computes its shards, and gets the whole out and gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dilabench.distributed.sharding import Shards
from dilabench.distributed.world import World


class Sharded(Protocol):
    """A function of this rank's shards."""

    @property
    def shards(self) -> Shards: ...
    @property
    def world(self) -> World: ...
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Whole:
    """A sharded function as one of whole tensors [B, N, ·, D] (packed [T, ·, D], or embeddings [B, N, E])."""

    def __init__(self, function: Sharded, packed: bool = False) -> None:
        self.function = function
        self._dim = 0 if packed else 1

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The whole out, on every rank; differentiable."""
        parameters = self.function.parameters() if isinstance(self.function, torch.nn.Module) else ()
        return _Whole.apply(self, q, k, v, *parameters)

    @property
    def with_lse(self) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        """(q, k, v) -> the whole out and lse, without gradient. AttributeError if the function returns no lse."""
        local = self.function.with_lse  # type: ignore[attr-defined]

        def whole(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                out, lse = local(*self.shards_of(q, k, v))
            return self.joined(out), self.joined(lse, -1)

        return whole

    def shards_of(self, *tensors: Tensor) -> list[Tensor]:
        """This rank's rows of each whole tensor."""
        rank = self.function.world.rank
        return [self.function.shards.take(x, rank, self._dim) for x in tensors]

    def joined(self, shard: Tensor, dim: int | None = None) -> Tensor:
        """The whole tensor from all ranks' rows, on every rank."""
        world, shards = self.function.world, self.function.shards
        dim = self._dim if dim is None else dim % shard.ndim
        sizes = []
        for rows in shards.rows:
            size = list(shard.shape)
            size[dim] = rows
            sizes.append(size)
        return shards.join(world.all_gather(shard, sizes), dim)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Whole, q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> Tensor:
        wanted = any(ctx.needs_input_grad)
        leaves = [x.requires_grad_(wanted) for x in whole.shards_of(*(x.detach() for x in (q, k, v)))]
        with torch.set_grad_enabled(wanted):
            out = whole.function(*leaves)
        ctx.whole, ctx.leaves, ctx.parameters, ctx.out = whole, leaves, parameters, out
        return whole.joined(out.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        whole: Whole = ctx.whole
        wanted = [*ctx.leaves, *ctx.parameters]
        local = torch.autograd.grad(ctx.out, wanted, whole.shards_of(dout)[0])
        # Gradients of parameters are already summed over the whole (`ring-multihead` sums them over the ranks).
        return None, *(whole.joined(gradient) for gradient in local[:3]), *local[3:]
