"""Ranks that cannot meet or were given different work say why."""

import contextlib
import os
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from dilabench.distributed.launch import store_from_environment, world_from_environment
from dilabench.distributed.world import World
from dilabench.errors import DilabenchError, EnvironmentNotReady, ExitCode

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("how", "message"),
    [("workload", "ranks disagree on the workload"), ("shapes", r"got q, k, v of \[\(2, 7, 4, 6\)")],
)
def test_ranks_that_were_given_different_things_say_so(how, message, launch):
    import ring_cases

    with pytest.raises((DilabenchError, ValueError), match=message):
        launch(ring_cases.given_another, 3, [1, how], timeout_s=40)


def test_a_rank_without_a_gpu(monkeypatch):
    for name, value in {"RANK": "63", "WORLD_SIZE": "64", "LOCAL_RANK": "63"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentNotReady, match="rank 63 needs GPU 63"):
        world_from_environment("cuda")


def test_a_rank_beyond_the_world(monkeypatch):
    for name, value in {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentNotReady, match="RANK=2 is not below WORLD_SIZE=2"):
        world_from_environment()


def test_an_environment_without_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(EnvironmentNotReady, match="start the ranks with torchrun"):
        world_from_environment()


def test_a_port_that_is_taken(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(EnvironmentNotReady, match="is taken by another program") as caught:
            store_from_environment(0, 1, timeout_s=5)
    assert caught.value.exit_code == ExitCode.ENVIRONMENT


@pytest.mark.slow
def test_fewer_ranks_than_the_world_says():
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    code = (
        "from dilabench.distributed.launch import world_from_environment as w\n"
        "from dilabench.errors import EnvironmentNotReady\n"
        "try: w(timeout_s=4)\n"
        "except EnvironmentNotReady as e: print(e); raise SystemExit(e.exit_code)\n"
    )
    variables = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == ExitCode.ENVIRONMENT
    assert "2 ranks did not meet" in done.stdout


@pytest.mark.parametrize(("device", "failed", "ended"), [("cuda", True, 0), ("cuda", False, 1), ("cpu", True, 1)])
def test_a_rank_that_fails_does_not_wait_for_the_others_to_end_with_it(device, failed, ended, monkeypatch):
    # NCCL's communicators end together: seen on two GPUs, a failed rank that ended its own told nobody why.
    calls = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append(1))
    world = World(0, 2, torch.device(device), group=object())
    with contextlib.suppress(ArithmeticError), world:
        if failed:
            raise ArithmeticError
    assert len(calls) == ended
