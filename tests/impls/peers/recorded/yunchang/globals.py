"""The groups of yunchang 0.6.4: successive ranks trade heads, ranks apart by their number form rings."""

from types import SimpleNamespace

import torch.distributed as dist

PROCESS_GROUP = SimpleNamespace(ULYSSES_PG=None, RING_PG=None)


def set_seq_parallel_pg(sp_ulysses_degree, sp_ring_degree, rank, world_size, use_ulysses_low=True):
    assert sp_ulysses_degree * sp_ring_degree == world_size
    every = range(world_size)
    for first in range(0, world_size, sp_ulysses_degree):
        ranks = list(every[first : first + sp_ulysses_degree])
        group = dist.new_group(ranks)
        PROCESS_GROUP.ULYSSES_PG = group if rank in ranks else PROCESS_GROUP.ULYSSES_PG
    for first in range(sp_ulysses_degree):
        ranks = list(every[first::sp_ulysses_degree])
        group = dist.new_group(ranks)
        PROCESS_GROUP.RING_PG = group if rank in ranks else PROCESS_GROUP.RING_PG
