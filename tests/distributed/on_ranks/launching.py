"""A function on several ranks of this machine, each in a process of its own (CPU: gloo; CUDA: NCCL, a GPU each)."""

import io
import multiprocessing
import os
import runpy
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

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


def printed(script, size, arguments=()):
    """What rank 0 of a script for torchrun prints; ranks meet by a file, not a port, and need not load torch anew."""
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(size, context) as processes:
        shared = size, str(Path(folder, "store")), str(script), arguments
        ranks = [processes.submit(as_script, rank, *shared) for rank in range(size)]
        first, *_ = [rank.result() for rank in ranks]
        return first


def as_script(rank, size, store, script, arguments):
    join = partial(dist.init_process_group, store=meeting_store(store, size), rank=rank, world_size=size)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["LOCAL_RANK"] = str(rank)
    sys.argv, sys.path[:0] = [script, *arguments], [str(Path(script).parent)]
    with mock.patch.object(dist, "init_process_group", join), redirect_stdout(io.StringIO()) as output:
        runpy.run_path(script, run_name="__main__")
    return output.getvalue()
