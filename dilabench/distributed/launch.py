"""P ranks on this machine, each a process that runs one function, and what came of it.

A rank that fails or dies ends all of them at once, and what is raised names the rank that failed first. Works the same
for CPU (gloo) and CUDA (NCCL, one GPU per rank).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from dilabench.distributed.failures import Failure, RankFailedError, first_cause, report_failure, reported_failures
from dilabench.distributed.world import DEFAULT_TIMEOUT_S, World
from dilabench.errors import EnvironmentNotReady, ExitCode
from dilabench.temporary_folder import temporary_folder

GRACE_S = 2.0
OVER_TCP = "tcp://"
RankFunction = Callable[..., Any]
"""Called as function(world, *arguments) on every rank; what it returns must be picklable."""


def launch(
    function: RankFunction,
    size: int,
    arguments: Sequence[Any] = (),
    *,
    device: str = "cpu",
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> list[Any]:
    """Run a function on `size` ranks; their results, in the order of ranks.

    Raises EnvironmentNotReady when there are fewer GPUs than ranks, RankFailedError when a rank fails or dies, or when
    any wait, or the whole call, takes longer than `timeout_s`.
    """
    require_gpus(device, size)
    context = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
    if device == "cpu":
        context.set_forkserver_preload([__name__])
    with temporary_folder("ranks") as folder:
        store = str(folder / "store")
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        processes = [
            context.Process(  # type: ignore[attr-defined]
                target=_rank, args=(pipes[rank][1], function, rank, size, store, device, timeout_s, arguments)
            )
            for rank in range(size)
        ]
        try:
            for process in processes:
                process.start()
            for _, theirs in pipes:
                theirs.close()
            return _results(processes, [ours for ours, _ in pipes], timeout_s)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()


def share_cores(workers: int) -> None:
    """Leave each of this machine's workers its part of the cores, unless OMP_NUM_THREADS says how many threads.

    torch gives every process as many threads as there are cores, and they wait for each other by spinning: on two cores
    the same work took two processes of two threads 12.5 s, one such process 2 s, and two processes of one thread 0.2 s.
    """
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, torch.get_num_threads() // workers))


def require_gpus(device: str, size: int) -> None:
    """Raise EnvironmentNotReady when ranks outnumber the visible GPUs."""
    if device == "cuda" and torch.cuda.device_count() < size:
        raise EnvironmentNotReady(
            f"{size} ranks need {size} GPUs, {torch.cuda.device_count()} visible; ask for fewer ranks or set "
            "CUDA_VISIBLE_DEVICES"
        )


def world_from_environment(device: str = "cpu", timeout_s: float = DEFAULT_TIMEOUT_S) -> World:
    """The world that torchrun describes in RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

    Raises EnvironmentNotReady when a variable is missing or does not fit, the port is taken, this rank has no GPU, or
    the other ranks do not connect.
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
    """Where ranks meet: a file that none of them has written yet, or 'tcp://host:port/name', a name at a TCP store."""
    if not address.startswith(OVER_TCP):
        return FileStore(address, size)
    place, _, name = address.removeprefix(OVER_TCP).partition("/")
    host, _, port = place.rpartition(":")
    timeout = timedelta(seconds=timeout_s)
    return PrefixStore(name, TCPStore(host, int(port), timeout=timeout, wait_for_workers=False))


def store_from_environment(rank: int, size: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> Store:
    """The ranks' meeting place at MASTER_ADDR:MASTER_PORT; rank 0 opens it unless torchrun's agent has.

    Raises EnvironmentNotReady when the port is taken or nobody answers there.
    """
    address, port = os.environ.get("MASTER_ADDR", "localhost"), _integers("MASTER_PORT")[0]
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return TCPStore(address, port, size, is_master=rank == 0 and not by_agent, timeout=timedelta(seconds=timeout_s))
    except dist.DistNetworkError as error:
        first = str(error).splitlines()[0]
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            raise EnvironmentNotReady(
                f"port {port} on {address} is taken by another program; set MASTER_PORT to a free one, or use "
                "torchrun --standalone, which finds one"
            ) from None
        raise EnvironmentNotReady(f"rank {rank} cannot reach rank 0 at {address}:{port}: {first}") from None
    except dist.DistStoreError as error:
        raise EnvironmentNotReady(
            f"{size} ranks did not meet at {address}:{port} within {timeout_s:g} s (WORLD_SIZE={size}): {error}; start "
            "as many ranks as WORLD_SIZE says"
        ) from None


def _integers(*names: str) -> list[int]:
    values = []
    for name in names:
        text = os.environ.get(name, "")
        if not text.isdigit():
            raise EnvironmentNotReady(f"{name}={text!r} is no number; start the ranks with torchrun, which sets it")
        values.append(int(text))
    return values


def _rank(
    connection: Any,
    function: RankFunction,
    rank: int,
    size: int,
    store_path: str,
    device: str,
    timeout_s: float,
    arguments: Sequence[Any],
) -> None:
    """The main function of one rank: join the world, run the function, send the result or the failure."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device == "cpu":
        torch.set_num_threads(1)
    else:
        share_cores(size)
    store = meeting_store(store_path, size)
    where = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
    try:
        with World.join(store, rank, size, where, timeout_s) as world:
            result = function(world, *arguments)
            world.barrier()
    # The boundary of the process: whatever a rank's function raises is sent to the parent.
    except BaseException as error:  # noqa: BLE001
        connection.send(Failure.of(rank, error))
        connection.close()
        # The others are waiting for this rank; they must not wait for its interpreter to end as well.
        os._exit(int(ExitCode.CASE_FAILED))
    connection.send((result,))
    connection.close()


def _results(processes: Sequence[Any], connections: Sequence[Any], timeout_s: float) -> list[Any]:
    """Results of all ranks, or the first failure as soon as there is one."""
    size = len(processes)
    results: dict[int, Any] = {}
    failures: list[Failure] = []
    died: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) < size:
        open_ranks = [rank for rank in range(size) if rank not in results and rank not in _told(failures, died)]
        limit = min(deadline, time.monotonic() + GRACE_S) if failures or died else deadline
        ready = wait([connections[rank] for rank in open_ranks], max(0.0, limit - time.monotonic()))
        for rank in open_ranks:
            if connections[rank] in ready:
                _hear(rank, connections[rank], processes[rank], results, failures, died)
        if failures or died:
            # Other ranks may still report an earlier failure; those that only wait for a peer are not waited for.
            if not ready or len(results) + len(_told(failures, died)) == size:
                raise first_cause(failures, died)
        elif not ready:
            missing = ", ".join(str(rank) for rank in open_ranks)
            raise RankFailedError(open_ranks[0], f"no result from rank {missing} within {timeout_s:g} s")
    return [results[rank] for rank in range(size)]


def _told(failures: Sequence[Failure], died: dict[int, str]) -> set[int]:
    return {failure.rank for failure in failures} | set(died)


def _hear(
    rank: int, connection: Any, process: Any, results: dict[int, Any], failures: list[Failure], died: dict[int, str]
) -> None:
    try:
        message = connection.recv()
    except (EOFError, OSError):
        process.join(timeout=5.0)
        died[rank] = f"the process ended without a word (exit code {process.exitcode})"
        return
    if isinstance(message, Failure):
        failures.append(message)
    else:
        results[rank] = message[0]


@contextlib.contextmanager
def reporting_failures(store: Store, rank: int, size: int) -> Any:
    """Around a rank's work under torchrun: report a failure through the store, raise RankFailedError with the first."""
    try:
        yield
    except Exception as error:
        failure = Failure.of(rank, error)
        with contextlib.suppress(RuntimeError):
            report_failure(store, failure)
            if failure.is_consequence:
                time.sleep(GRACE_S)
            raise first_cause([failure, *reported_failures(store, size)]) from error
        raise
