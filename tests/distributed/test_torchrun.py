"""The same functions under torchrun: on one node, on two nodes of one machine, and when a rank fails."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
WORKER = Path(__file__).parent / "on_ranks" / "torchrun_worker.py"
ROOT = Path(__file__).parents[2]


def torchrun(*options, arguments=()):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(WORKER), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process):
    try:
        return process.communicate(timeout=100)[0], process.returncode
    finally:
        process.kill()


def test_one_node():
    text, code = ended(torchrun("--standalone", "--nproc-per-node", "2"))
    assert code == 0, text
    assert {"rank 0 of 2: []", "rank 1 of 2: []"} <= set(text.splitlines())


def test_two_nodes_on_loopback():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port))
    nodes = [torchrun(*shared, "--node-rank", str(node)) for node in range(2)]
    for rank, (text, code) in enumerate([ended(node) for node in nodes]):
        assert code == 0, text
        assert f"rank {rank} of 2: []" in text


def test_every_rank_tells_the_first_failure():
    text, code = ended(torchrun("--standalone", "--nproc-per-node", "2", arguments=["fail"]))
    assert code != 0
    assert "the root cause" in text
