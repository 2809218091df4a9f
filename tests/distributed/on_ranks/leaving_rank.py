"""Three ranks, of which rank 1 dies between two steps or no longer takes part."""

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from dilabench.attention import ring_attention, sequence_shards


def step(attend, shards):
    x = torch.randn(1, shards.rows, 2, 8, requires_grad=True)
    attend(x, x, x, shards).sum().backward()


def run(rank, store, end, compiled, told):
    """Tell what the second step raises on the ranks that are left."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 3), rank=rank, world_size=3)
    attend = torch.compile(ring_attention, fullgraph=True, backend="aot_eager") if compiled else ring_attention
    # What is loaded and compiled at the first step takes longer on some ranks than others may wait afterwards.
    step(attend, sequence_shards(24))
    shards = sequence_shards(24, group=dist.new_group(timeout=timedelta(seconds=2)))
    step(attend, shards)
    if rank == 1:
        if end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    try:
        step(attend, shards)
    except RuntimeError as error:
        told.send(str(error))
