"""The store of the ranks, torchrun's environment of this rank, and its share of the machine's cores."""

from __future__ import annotations

import errno
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from dilabench.distributed.groups import DEFAULT_TIMEOUT_S
from dilabench.distributed.world import World
from dilabench.errors import EnvironmentNotReady

OVER_TCP = "tcp://"
# Processes that torch.compile compiles with; by default one per core, at most MOST_COMPILING.
COMPILE_VARIABLE = "TORCHINDUCTOR_COMPILE_THREADS"
MOST_COMPILING = 32


def share_cores(workers: int) -> None:
    """Limit this process to its share of the cores: threads, unless OMP_NUM_THREADS is set, and processes with which
    torch.compile compiles, unless COMPILE_VARIABLE is set. To be called before the first compilation.

    torch gives every process one thread per core, and threads wait by spinning: on two cores the same work took two
    processes of two threads 12.5 s, one such process 2 s, and two processes of one thread 0.2 s.
    """
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    os.environ.setdefault(COMPILE_VARIABLE, str(max(1, min(MOST_COMPILING, (os.cpu_count() or 1) // workers))))


def world_from_environment(device: str = "cpu", timeout_s: float = DEFAULT_TIMEOUT_S) -> World:
    """The world that torchrun describes in RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

    Raises EnvironmentNotReady if a variable is missing or wrong, the port is taken, this rank lacks a GPU, or the other
    ranks do not connect in time.
    """
    rank, size, local_rank = _integers("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not 0 <= rank < size:
        raise EnvironmentNotReady(f"RANK={rank} is not below WORLD_SIZE={size}; start the ranks with torchrun")
    if device == "cuda" and local_rank >= torch.cuda.device_count():
        raise EnvironmentNotReady(
            f"rank {rank} needs GPU {local_rank}, {torch.cuda.device_count()} visible; start at most as many ranks per "
            "node as it has GPUs (torchrun --nproc-per-node)"
        )
    store = store_from_environment(rank, size, timeout_s)
    where = torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")
    return World.join(store, rank, size, where, timeout_s)


def meeting_store(address: str, size: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> Store:
    """Open the ranks' store: a file that does not exist yet, or 'tcp://host:port/name', a prefix of a TCP store."""
    if not address.startswith(OVER_TCP):
        return FileStore(address, size)
    place, _, name = address.removeprefix(OVER_TCP).partition("/")
    host, _, port = place.rpartition(":")
    timeout = timedelta(seconds=timeout_s)
    return PrefixStore(name, TCPStore(host, int(port), timeout=timeout, wait_for_workers=False))


def store_from_environment(rank: int, size: int, timeout_s: float = DEFAULT_TIMEOUT_S, wait: bool = True) -> Store:
    """The ranks' store at MASTER_ADDR:MASTER_PORT; rank 0 opens it, on that address only, unless torchrun has.

    `wait`: until all ranks have come. This wait is torch's own, and no signal ends it.

    Raises EnvironmentNotReady if the port is taken or does not answer.
    """
    address, port = os.environ.get("MASTER_ADDR", "localhost"), _integers("MASTER_PORT")[0]
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    timeout = timedelta(seconds=timeout_s)
    try:
        if rank or by_agent:
            return TCPStore(address, port, size, wait_for_workers=wait, timeout=timeout)
        # By default the store would listen on every interface.
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((address, port), family=family, backlog=4 * size)
        return TCPStore(
            address,
            port,
            size,
            is_master=True,
            wait_for_workers=wait,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = "is taken by another program" if taken else f"cannot be listened on: {error.strerror}"
        raise EnvironmentNotReady(
            f"port {port} on {address} {why}; set MASTER_ADDR to an address of this machine and MASTER_PORT to a free "
            "port, or use torchrun --standalone, which finds them"
        ) from None
    except dist.DistNetworkError as error:
        first = str(error).splitlines()[0]
        raise EnvironmentNotReady(f"rank {rank} cannot reach rank 0 at {address}:{port}: {first}") from None
    except dist.DistStoreError as error:
        raise EnvironmentNotReady(
            f"{size} ranks did not meet at {address}:{port} within {timeout_s:g} s (WORLD_SIZE={size}): {error}; start "
            "WORLD_SIZE ranks"
        ) from None


def _integers(*names: str) -> list[int]:
    values = []
    for name in names:
        text = os.environ.get(name, "")
        if not text.isdigit():
            raise EnvironmentNotReady(f"{name}={text!r} is no number; start the ranks with torchrun, which sets it")
        values.append(int(text))
    return values
