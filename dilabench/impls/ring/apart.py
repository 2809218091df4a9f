"""`fused-sharded`: every rank holds whole segments and runs `fused` on them; nothing is ever sent.

As in LongNet: with segments that end where ranks do, a sequence over P ranks costs each of them 1/P of the work, the
memory and no traffic. Nothing is allocated beside the results. A branch that crosses ranks needs `ring-allgather`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.distributed.sharding import Shards, Span
from dilabench.distributed.world import World
from dilabench.impls import fused
from dilabench.impls.ring.schedule.function import ShardedAttention
from dilabench.workload.cuts import cut_apart
from dilabench.workload.spec import Workload


class Local(Protocol):
    """Attention on one device, outside autograd; `forward` gives out and lse first, and `backward` needs no more."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]: ...
    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class Apart:
    """`function.Algorithm` without communication: each rank runs `local` on its shards."""

    local: Local

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """out and lse; nothing else is kept."""
        out, lse, *_ = self.local.forward(q, k, v)
        return out, lse, ()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, _kept: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv."""
        return self.local.backward(dout, q, k, v, out, lse)


def build(workload: Workload, context: BuildContext) -> ShardedAttention:
    """Rank r holds the r-th part, cut where segments end. Raises ValueError when there are not so many parts."""
    return build_apart(workload, context, fused.build)


def build_apart(
    workload: Workload, context: BuildContext, build_local: Callable[[Workload, BuildContext], Local]
) -> ShardedAttention:
    """`build` with another single-device implementation on each rank's part."""
    world = context.world or World.alone(context.device)
    lengths = cut_apart(workload, world.size)
    starts = accumulate(lengths, initial=0)
    shards = Shards(tuple((Span(start, start + length),) for start, length in zip(starts, lengths, strict=False)))
    local = build_local(workload.replace(seq_len=lengths[world.rank]), context)
    return ShardedAttention(workload, shards, world, Apart(local))
