"""The common form of peers over ranks: a function of local shards that another project computes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.distributed.sharding import Shards
from dilabench.distributed.world import World


class PeerOverRanks:
    """out [B, N_local, H, D] of this rank's q [B, N_local, H, D] and k, v [B, N_local, K, D].

    `shards` tells which positions they are. The project sends without `World`, so its bytes are not counted.
    """

    def __init__(self, shards: Shards, world: World) -> None:
        self.shards, self.world = shards, world

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Differentiable."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> PeerOverRanks:
        """Itself: ranks and their connections cannot be copied."""
        return self


def world_of(context: BuildContext, reason: str | None) -> World:
    """The ranks that a peer is built for. Raises ValueError with the reason against it, or without ranks."""
    if context.world is None or context.world.group is None:
        raise ValueError("this peer needs the other ranks, and the build context has no world of several; use --nproc")
    if reason is not None:
        raise ValueError(reason)
    return context.world
