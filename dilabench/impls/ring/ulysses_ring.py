"""`ulysses-ring`: ranks as a mesh of heads x sequence (unified sequence parallelism, Fang and Zhao, arXiv 2405.07719).

Neighbours trade tokens for heads, as in `ulysses`; then each attends with its heads to all tokens of its group, and
the overlapping ring brings the keys of the other groups. For more ranks than there are K/V heads to share out, and for
hosts: trading stays inside one. A ring over fewer ranks has fewer and longer hops.
"""

from __future__ import annotations

from dataclasses import replace

from dilabench.contracts import BuildContext
from dilabench.distributed.sharding import contiguous, cut_parts, zigzag
from dilabench.distributed.some_ranks import SomeRanks
from dilabench.distributed.world import World
from dilabench.impls.ring.schedule.function import ShardedAttention
from dilabench.impls.ring.schedule.hops import Ring
from dilabench.impls.ring.schedule.share import share_of
from dilabench.impls.ring.ulysses import HeadDeal, Ulysses
from dilabench.workload.equal_parts import against_mesh, mesh_degrees
from dilabench.workload.spec import Workload


def build(workload: Workload, context: BuildContext) -> ShardedAttention:
    """Dense patterns, padded and packed. Causal sequences are cut zigzag over the ring, others in order; the ranks of a
    group hold successive parts of its rows.

    Raises ValueError for ranks that are no mesh.
    """
    world = context.world or World.alone(context.device)
    why = against_mesh(workload, world.size)
    if why:
        raise ValueError(why)
    heads, _ = mesh_degrees(workload, world.size)
    place, member = divmod(world.rank, heads)
    group = SomeRanks.of(world, range(place * heads, (place + 1) * heads))
    across = SomeRanks.of(world, range(member, world.size, heads))
    of_some_heads = workload.replace(num_heads=workload.num_heads // heads, num_kv_heads=workload.num_kv_heads // heads)
    share = share_of(of_some_heads, replace(context, world=across), zigzag if workload.causal else contiguous)
    rows = contiguous([(0, share.shards.rows[place])], heads)
    deal = HeadDeal.of(workload.num_heads, workload.num_kv_heads, heads)
    algorithm = Ulysses(group, rows, deal, Ring(share, overlap=True))
    return ShardedAttention(workload, cut_parts(share.shards, heads), world, algorithm)
