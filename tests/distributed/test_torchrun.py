"""The same functions, and the whole command, under torchrun: on one node, on two nodes, and when a rank fails."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from dilabench.store.run_files import read_record

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
WORKER = Path(__file__).parent / "on_ranks" / "torchrun_worker.py"
ROOT = Path(__file__).parents[2]


def torchrun(*options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(WORKER)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


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
    shared = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", free_port())
    nodes = [torchrun(*shared, "--node-rank", str(node)) for node in range(2)]
    for rank, (text, code) in enumerate([ended(node) for node in nodes]):
        assert code == 0, text
        assert f"rank {rank} of 2: []" in text


def dilabench(node, port, folder, *arguments, ranks=None):
    """The command on one of two nodes; a node is (how to get there, address of node 0, network interface, number)."""
    there, address, interface, number = node
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": "1",
        "DILABENCH_LOCK_DIR": str(folder),
    }
    many = ("--nnodes", "1", "--nproc-per-node", str(ranks)) if ranks else ("--nnodes", "2", "--nproc-per-node", "1")
    shared = (*many, "--master-addr", address, "--master-port", port)
    command = [*there, sys.executable, "-m", "torch.distributed.run", *shared, "--node-rank", str(number)]
    command += ["-m", "dilabench", "run", *arguments, "--no-store", "-o", str(folder / "runs")]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def two_networks():
    """Two network namespaces with a cable between them; None where they may not be made."""
    names = [f"dilabench-{os.getpid()}-{side}" for side in "ab"]
    try:
        made = shutil.which("ip") is not None and all(ip("netns", "add", name) for name in names)
        made = made and ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "eth0", "netns", names[1])
        for number, name in enumerate(names if made else ()):
            inside = ("-n", name)
            made &= ip(*inside, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            made &= ip(*inside, "link", "set", "eth0", "up") and ip(*inside, "link", "set", "lo", "up")
        yield names if made else None
    finally:
        if shutil.which("ip"):
            for name in names:
                ip("netns", "del", name)


@pytest.fixture
def two_nodes():
    """Network namespaces where the system permits them, else two nodes that share this machine's loopback."""
    with two_networks() as names:
        if names is None:
            yield [([], "127.0.0.1", "lo", number) for number in range(2)]
        else:
            enter = ("ip", "netns", "exec")
            yield [([*enter, name], "10.77.0.1", "eth0", number) for number, name in enumerate(names)]


ASKED = ("ring", "--budget", "60s", "--set", "seq_len=128", "--set", "pattern=dense", "--mode", "both", "-i", "ring")
ASKED += ("--timing", "simple", "--timing-runs", "3", "--warmup-runs", "1")


def test_the_command_on_two_nodes_is_planned_printed_and_written_by_rank_0(two_nodes, tmp_path):
    port = free_port()
    texts = [ended(node) for node in [dilabench(node, port, tmp_path, *ASKED) for node in two_nodes]]
    assert [code for _, code in texts] == [0, 0], texts
    assert "verdict: ok" in texts[0][0]
    assert "verdict" not in texts[1][0]
    (folder,) = (tmp_path / "runs").iterdir()
    rows = [row for row in read_record(folder).rows if row.case.world_size == 2]
    assert rows
    for row in rows:
        assert row.outcome.status == "measured", row.outcome
        assert row.outcome.verification.passed
        assert row.outcome.counters["received_keys_bytes"] > 0


def listening(pid):
    """(process, port) of all TCP sockets on which it and its descendants listen; nothing when it has ended."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                for connection in one.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        yield one, connection.laddr


def test_only_torch_listens_and_silent_clients_hold_nothing_up(tmp_path):
    port = free_port()
    nodes = [dilabench(([], "127.0.0.1", "lo", number), port, tmp_path, *ASKED) for number in range(2)]
    texts, clients, command_lines = [], {}, {}
    waiting = threading.Thread(target=lambda: texts.extend(ended(node) for node in nodes))
    waiting.start()
    with contextlib.ExitStack() as opened:
        while waiting.is_alive():
            for process, address in (found for node in nodes for found in listening(node.pid)):
                if address not in clients:
                    with contextlib.suppress(psutil.Error):
                        command_lines[address] = " ".join(process.cmdline())
                    with contextlib.suppress(OSError):
                        client = socket.create_connection(address[:2], timeout=5)
                        clients[address] = opened.enter_context(client)
            time.sleep(0.05)
    assert [code for _, code in texts] == [0, 0], texts
    assert "verdict: ok" in texts[0][0]
    assert int(port) in {address.port for address in clients}
    for address, command in command_lines.items():
        # torchrun's store, and in workers gloo, which computes the collectives.
        store = address.port == int(port) and "torch.distributed.run" in command
        assert store or "multiprocessing.forkserver" in command, (address, command)


def test_a_request_that_rank_0_refuses_ends_every_node(two_nodes, tmp_path):
    port = free_port()
    texts = [ended(node) for node in [dilabench(node, port, tmp_path, "no-such-suite") for node in two_nodes]]
    assert texts[0][1] != 0
    assert "no-such-suite" in texts[0][0]


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("1", signal.SIGKILL),
        ("1", signal.SIGSTOP),
        ("0", signal.SIGTERM),
        (None, signal.SIGTERM),
        (None, signal.SIGINT),
    ],
    ids=["rank 1 is killed", "rank 1 is stopped", "rank 0 is ended", "torchrun is ended", "torchrun is interrupted"],
)
def test_whoever_is_ended_while_it_measures_the_record_is_kept(victim, number, tmp_path):
    """torchrun kills what is still there after 30 s: then there would be no record."""
    node = dilabench(([], "127.0.0.1", "lo", 0), free_port(), tmp_path, *ASKED, ranks=2)
    try:
        while not any(len(path.read_text().splitlines()) > 1 for path in tmp_path.glob("runs/*/rows.jsonl")):
            assert node.poll() is None, node.communicate()
            time.sleep(0.1)
        ranks = {}
        for process in psutil.Process(node.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "dilabench" in process.cmdline():
                    ranks[process.environ()["RANK"]] = process
        os.kill(node.pid if victim is None else ranks[victim].pid, number)
        ranks["0"].wait(timeout=100)
        if number == signal.SIGSTOP:
            ranks[victim].send_signal(signal.SIGCONT)
        text, _ = ended(node)
    finally:
        node.kill()
    (folder,) = (tmp_path / "runs").iterdir()
    record = read_record(folder)
    assert record.rows, text
    assert record.status == ("complete" if number == signal.SIGSTOP else "interrupted"), text
