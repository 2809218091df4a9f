"""`fused-sharded`: every rank holds whole segments and runs `fused` on them, without messages.

As in LongNet: with segments that end where ranks do, a sequence over P ranks costs each of them 1/P of the work, the
memory and no traffic. Only the results are allocated. A branch that crosses ranks needs `ring-allgather`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from dilabench.contracts import BuildContext
from dilabench.distributed.sharding import Shards, Span
from dilabench.distributed.world import World
from dilabench.impls import fused
from dilabench.impls.ring.schedule.function import Local, LocalOnly, ShardedAttention
from dilabench.workload.cuts import cut_apart
from dilabench.workload.spec import Workload


def build(workload: Workload, context: BuildContext) -> ShardedAttention:
    """Rank r holds the r-th part, cut where segments end. Raises ValueError when there are fewer parts than ranks."""
    return build_local(workload, context, fused.build)


def build_local(
    workload: Workload, context: BuildContext, single_device: Callable[[Workload, BuildContext], Local]
) -> ShardedAttention:
    """`build` with another single-device implementation on each rank's part."""
    world = context.world or World.single(context.device)
    lengths = cut_apart(workload, world.size)
    starts = accumulate(lengths, initial=0)
    shards = Shards(tuple((Span(start, start + length),) for start, length in zip(starts, lengths, strict=False)))
    local = single_device(workload.replace(seq_len=lengths[world.rank]), context)
    return ShardedAttention(workload, shards, world, LocalOnly(local))
