"""A group of ranks here and over the processes of torchrun: the same worker, the same answers, the same failures."""

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from dilabench.engine.device.lock import locks_of
from dilabench.engine.worker import nodes as nodes_module
from dilabench.engine.worker import rank_group, store_channel
from dilabench.engine.worker.client import WorkerFailure
from dilabench.engine.worker.launcher import ThisMachine
from dilabench.engine.worker.node_agent import Agent
from dilabench.engine.worker.nodes import Nodes, RemoteAgent, RemoteWorker, gathered
from dilabench.engine.worker.protocol import BackendSpec, CaseSpec, WorkerSettings
from dilabench.engine.worker.rank_group import start_worker
from dilabench.engine.worker.torchrun import Rank
from dilabench.errors import ConfigError, EnvironmentNotReady
from dilabench.machine import Machine
from dilabench.record import Case, GpuInfo
from dilabench.request import RunRequest
from dilabench.suites.planner import asking_all
from dilabench.workload.spec import Workload
from tests.conftest import slow

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parents[2]
SETTINGS = WorkerSettings(device="cpu")
AGENT = """
import sys
from dilabench.engine.worker.nodes import on_ranks
from dilabench.engine.worker import store_channel
store_channel.SILENT_S = float(sys.argv[1])
sys.exit(on_ranks(None))
"""
ONE = Workload.model_validate(
    {
        "pattern": {"kind": "dense"},
        "batch_size": 1,
        "seq_len": 96,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "dtype": "float32",
        "mode": "both",
    }
)


class Torchrun:
    """What torchrun sets up for two ranks: this process is rank 0, `agent` is rank 1."""

    def __init__(self, monkeypatch, folder, silent_s=60.0):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in {**shared, "RANK": "0", "DILABENCH_LOCK_DIR": str(folder)}.items():
            monkeypatch.setenv(name, value)
        path = f"{ROOT}:{Path(__file__).parent / 'on_ranks'}"
        environment = {**os.environ, **shared, "RANK": "1", "PYTHONPATH": path}
        command = [sys.executable, "-c", AGENT, str(silent_s)]
        self.agent = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    def end(self):
        self.agent.kill()
        self.agent.communicate()


@pytest.fixture
def torchrun(request, monkeypatch, tmp_path):
    started = Torchrun(monkeypatch, tmp_path, getattr(request, "param", 60.0))
    yield started
    started.end()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """One agent for all tests that leave it alive."""
    with pytest.MonkeyPatch.context() as patch:
        started = Torchrun(patch, tmp_path_factory.mktemp("locks"))
        with gathered(Rank.from_environment()) as found:
            yield found
        started.end()


@pytest.fixture(params=["this machine", "torchrun"])
def launcher(request):
    return ThisMachine() if request.param == "this machine" else request.getfixturevalue("nodes")


@contextlib.contextmanager
def group_at(launcher):
    group = start_worker("tests@2", SETTINGS, launcher)
    try:
        yield group
    finally:
        group.kill()


def asked(target):
    case = Case(implementation="ring", backend="math", workload=ONE, world_size=2)
    backend = BackendSpec(
        name="math", target="dilabench.backends.math:attend", backward_target="dilabench.backends.math:attend_backward"
    )
    return CaseSpec(case=case, target=target, backend=backend, seed=3)


def prepared(group, target, timeout_s=60.0):
    spec = asked(target)
    group.ask("prepare", spec.handle, timeout_s=timeout_s, spec=spec.model_dump(mode="json"))
    return spec.handle


def test_ranks_verify_and_weigh_a_case_wherever_they_are(launcher):
    with group_at(launcher) as group:
        handle = prepared(group, "dilabench.impls.ring.rings:build")
        reply = group.ask("verify", handle, timeout_s=60)
        assert reply.verification.passed, reply.why
        assert {check.name for check in reply.verification.checks} >= {"out", "lse", "dq", "dk", "dv"}
        # This rank's q, k, v and dout: 48 rows of (4 + 2 + 2 + 4) heads.
        assert group.ask("memory", handle, timeout_s=60).memory.inputs_bytes == 48 * 12 * 8 * 4


@pytest.mark.parametrize(
    ("how", "why"),
    [
        slow("raising", "rank 1: ArithmeticError: the root cause"),
        ("killed", "rank 1: the worker process died during 'prepare': killed by SIGKILL"),
    ],
)
def test_what_goes_wrong_on_a_rank_is_told_and_the_next_group_works(launcher, how, why, monkeypatch):
    # The other rank waits for the one that raised, and has nothing to report.
    monkeypatch.setattr(rank_group, "GRACE_S", 0.5)
    with group_at(launcher) as group:
        with pytest.raises(WorkerFailure, match=why) as failed:
            prepared(group, f"failing:build_{how}")
        assert failed.value.died
        assert not group.alive
    with group_at(launcher) as group:
        assert prepared(group, "dilabench.impls.ring.rings:build")


def test_a_rank_that_does_not_answer_is_ended(launcher):
    with group_at(launcher) as group:
        started = time.monotonic()
        with pytest.raises(WorkerFailure, match="no answer to 'prepare' within 1 s"):
            prepared(group, "failing:build_slow", timeout_s=1.0)
        assert time.monotonic() - started < 60
        assert not group.alive


@pytest.mark.slow
def test_a_rank_whose_agent_is_gone_fails_with_that_reason_and_so_does_every_later_group(torchrun, monkeypatch):
    with gathered(Rank.from_environment()) as nodes, group_at(nodes) as group:
        monkeypatch.setattr(store_channel, "SILENT_S", 3.0)
        # Its next sign of life is the first that counts so.
        time.sleep(2 * store_channel.BEAT_S)
        torchrun.agent.send_signal(signal.SIGKILL)
        torchrun.agent.wait()
        deadline = time.monotonic() + 60
        while group.alive and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(WorkerFailure, match="rank 1: the "):
            prepared(group, "dilabench.impls.ring.rings:build")
        with pytest.raises(WorkerFailure, match=r"the process that torchrun started for rank 1 on .* is gone: no sign"):
            start_worker("tests@2", SETTINGS, nodes)


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [3.0], indirect=True)
def test_agents_end_when_rank_0_shows_no_sign_of_life(torchrun):
    """As when its machine is gone, while the store of torchrun is another's and stays."""
    nodes = Nodes(Rank.from_environment())
    nodes.meet()
    pid = nodes.start("tests#1", SETTINGS.model_copy(update={"rank": 1})).hello.pid
    nodes._channel.close()
    _, told = torchrun.agent.communicate(timeout=60)
    assert torchrun.agent.returncode == 130
    assert "rank 1: rank 0 is gone (no sign of life for 3 s); its workers here were ended" in told
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
def test_agents_end_with_the_store(torchrun):
    nodes = Nodes(Rank.from_environment())
    nodes.meet()
    nodes._channel.close()
    # Rank 0 opened it, for there is no torchrun here to do so.
    del nodes._channel._outbox
    _, told = torchrun.agent.communicate(timeout=60)
    assert torchrun.agent.returncode == 130
    assert "rank 1: rank 0 is gone (torch's store is gone" in told


@pytest.mark.slow
def test_the_store_of_rank_0_listens_on_the_named_address_alone(nodes):
    port = int(os.environ["MASTER_PORT"])
    listening = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    assert {address.ip for address in listening if address.port == port} == {"127.0.0.1"}


@pytest.mark.parametrize("name", ["__init__", "answer", "_workers", "exit", ""])
def test_an_agent_carries_out_its_commands_alone(name):
    agent = Agent(Rank(1, 2, 0, "127.0.0.1", 1), Machine(device="cpu"), contextlib.ExitStack())
    assert f"{name!r} is not a valid AgentCommand" in agent.answer(name, {})["failure"]["why"]


@pytest.mark.parametrize("ranks", [1, 7])
def test_dead_ranks_are_not_waited_for_at_the_end(monkeypatch, ranks):
    """torchrun kills rank 0 if it takes longer than 30 s, however many ranks died."""
    waited = [0.0]

    class Dead:
        def ask(self, _do, timeout_s):
            waited[0] += timeout_s
            raise WorkerFailure("crash", "it is gone", died=True)

    nodes = object.__new__(Nodes)
    nodes._agents = {rank: Dead() for rank in range(1, ranks + 1)}
    nodes._channel = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr("dilabench.engine.worker.nodes.time", SimpleNamespace(monotonic=lambda: waited[0]))
    nodes.close()
    assert 0 < waited[0] <= 10


@pytest.mark.slow
def test_an_ended_run_ends_the_agents_and_leaves_no_process(torchrun):
    with gathered(Rank.from_environment()) as nodes:
        group = start_worker("tests@2", SETTINGS, nodes)
        pids = [rank.hello.pid for rank in group._ranks]
        group.kill()
    assert torchrun.agent.wait(timeout=60) == 0
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_ranks_without_a_gpu_or_of_another_version_are_refused(nodes, monkeypatch):
    assert nodes.machine(Machine(device="cpu")).device == "cpu"
    with pytest.raises(EnvironmentNotReady, match=r"rank 0 on .* needs GPU 0, 0 visible"):
        nodes.machine(Machine(device="cuda"))
    monkeypatch.setitem(nodes._agents[1].facts, "versions", {"dilabench": "0.0.1", "torch": "2.0"})
    with pytest.raises(EnvironmentNotReady, match=r"rank 1 on .* has .*0\.0\.1.*; install the same on every machine"):
        nodes.machine(Machine(device="cpu"))


def test_torchrun_decides_how_many_ranks_there_are(nodes):
    assert asking_all(RunRequest(suite="ring"), nodes).nproc == 2
    assert asking_all(RunRequest(suite="ring"), None).nproc == 1
    with pytest.raises(ConfigError, match="--nproc 3 needs more ranks than torchrun started"):
        asking_all(RunRequest(suite="ring", nproc=3), nodes)


@pytest.mark.parametrize(("name", "value"), [("RANK", "2"), ("RANK", "x"), ("MASTER_PORT", "http")])
def test_variables_that_make_no_sense_are_refused(monkeypatch, name, value):
    fields = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for key, text in {**fields, name: value}.items():
        monkeypatch.setenv(key, text)
    with pytest.raises(EnvironmentNotReady, match=f"{name}.*torchrun"):
        Rank.from_environment()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Rank.from_environment() is None


GPUS = Machine(device="cuda", gpus=tuple(GpuInfo(name="H200", uuid_hash=name) for name in "dbca"))


def free(lock):
    with lock.path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_the_agent_of_another_machine_holds_the_gpus_of_all_its_ranks(monkeypatch, tmp_path):
    monkeypatch.setenv("DILABENCH_LOCK_DIR", str(tmp_path))
    with contextlib.ExitStack() as held:
        Agent(Rank(8, 16, 0, "127.0.0.1", 1), GPUS, held).lock("this run", [0, 1, 3])
        assert [index for index in range(4) if not free(*locks_of(GPUS, [index]))] == [0, 1, 3]
    assert all(free(lock) for lock in locks_of(GPUS, range(4)))


def test_rank_0_holds_its_own_machine_and_asks_one_agent_of_each_other(nodes, monkeypatch):
    """Ranks 0 and 1 stand here, 2 and 3 on one other machine, 4 on another."""
    asked = []

    class Elsewhere:
        def __init__(self, machine, local_rank):
            self.facts = {"machine": machine, "local_rank": local_rank}

        def ask(self, do, *, timeout_s, **arguments):
            asked.append((self.facts["machine"], do, arguments["gpus"]))

    agents = {1: nodes._agents[1], 2: Elsewhere("y", 0), 3: Elsewhere("y", 1), 4: Elsewhere("x", 0)}
    monkeypatch.setattr(nodes, "_agents", agents)
    monkeypatch.setattr(nodes, "_locked", False)
    assert [list(nodes.gpus_here(ranks)) for ranks in (1, 2, 5)] == [[0], [0, 1], [0, 1]]
    for _ in range(2):
        nodes._lock_machines()
    assert asked == [("x", "lock", [0]), ("y", "lock", [0, 1])]
    monkeypatch.undo()


def test_a_worker_of_a_silent_rank_is_ended_without_a_long_wait(monkeypatch):
    """The rank may be only slow, so the next request still reaches it."""
    monkeypatch.setattr(nodes_module, "KILL_TIMEOUT_S", 0.01)
    agent, sent = RemoteAgent(1), []
    answers = {"start": {"hello": {"pid": 1, "torch": {}}}, "alive": {"alive": True}}

    def send(_, message):
        sent.append(str(message["do"]))
        if message["do"] in answers:
            agent.take(message["number"], answers[message["do"]])

    agent.channel = SimpleNamespace(send=send, lost=lambda _: None)
    worker, other = (RemoteWorker("tests@2", SETTINGS, agent, name) for name in "ab")
    worker.kill()
    assert (worker.alive, other.alive) == (False, True)
    assert sent == ["start", "start", "kill", "alive"]
