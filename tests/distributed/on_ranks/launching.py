"""A function on several ranks of this machine, each in a process of its own (CPU: gloo; CUDA: NCCL, a GPU each)."""

import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from dilabench.distributed.failures import tells_of_another
from dilabench.distributed.launch import meeting_store
from dilabench.distributed.world import World


def launch(function, size, arguments=(), *, device="cpu", timeout_s=120.0):
    """What function(world, *arguments) returns on each rank; of what ranks raise, the first that is a cause."""
    context = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(size, context) as processes:
        shared = size, str(Path(folder, "store")), device, timeout_s, function, arguments
        ranks = [processes.submit(on_rank, rank, *shared) for rank in range(size)]
        errors = [error for rank in ranks if (error := rank.exception())]
        if errors:
            raise next((error for error in errors if not tells_of_another(str(error))), errors[0])
        return [rank.result() for rank in ranks]


def on_rank(rank, size, store, device, timeout_s, function, arguments):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    where = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
    with World.join(meeting_store(store, size), rank, size, where, timeout_s) as world:
        result = function(world, *arguments)
        world.barrier()
        return result
