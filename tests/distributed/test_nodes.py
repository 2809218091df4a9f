"""A group of ranks here and over the processes of torchrun: the same worker, the same answers, the same failures."""

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from dilabench.engine.call.specs import BackendSpec, CaseSpec
from dilabench.engine.device.lock import locks_of
from dilabench.engine.worker import client, shared_store
from dilabench.engine.worker.client import ThisMachine, Worker, WorkerFailure
from dilabench.engine.worker.nodes import Nodes, Peer, RankFacts, Request, Serving, gathered
from dilabench.engine.worker.protocol import MeasureMemory, Prepare, Verify, WorkerSettings
from dilabench.engine.worker.replies import Hello
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
from dilabench.engine.worker import shared_store
shared_store.SILENT_S = float(sys.argv[1])
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

    def __init__(self, monkeypatch, folder, silent_s=8.0):
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
    started = Torchrun(monkeypatch, tmp_path, getattr(request, "param", 8.0))
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
    group = Worker("tests@2", SETTINGS, launcher).meet()
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
    group.ask(Prepare(spec=spec), spec.handle, timeout_s=timeout_s)
    return spec.handle


def test_ranks_verify_and_weigh_a_case_wherever_they_are(launcher):
    with group_at(launcher) as group:
        handle = prepared(group, "dilabench.impls.ring.rings:build")
        reply = group.ask(Verify(), handle, timeout_s=60)
        assert reply.verification.passed, reply.why
        assert {check.name for check in reply.verification.checks} >= {"out", "lse", "dq", "dk", "dv"}
        # This rank's q, k, v and dout: 48 rows of (4 + 2 + 2 + 4) heads.
        assert group.ask(MeasureMemory(), handle, timeout_s=60).memory.inputs_bytes == 48 * 12 * 8 * 4


@pytest.mark.parametrize(
    ("how", "why"),
    [
        slow("raising", "rank 1: ArithmeticError: the root cause"),
        ("killed", "rank 1: the worker process died during 'prepare': killed by SIGKILL"),
    ],
)
def test_what_goes_wrong_on_a_rank_is_told_and_the_next_group_works(launcher, how, why, monkeypatch):
    # The other rank waits for the one that raised, and has nothing to report.
    monkeypatch.setattr(client, "GRACE_S", 0.5)
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
def test_a_rank_whose_process_is_gone_fails_with_that_reason_and_so_does_every_later_group(torchrun, monkeypatch):
    with gathered(Rank.from_environment()) as nodes, group_at(nodes) as group:
        monkeypatch.setattr(shared_store, "SILENT_S", 3.0)
        torchrun.agent.send_signal(signal.SIGKILL)
        torchrun.agent.wait()
        deadline = time.monotonic() + 60
        while group.alive and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(WorkerFailure, match="rank 1: the "):
            prepared(group, "dilabench.impls.ring.rings:build")
        with pytest.raises(WorkerFailure, match=r"the process that torchrun started for rank 1 on .* is gone: no sign"):
            Worker("tests@2", SETTINGS, nodes).meet()


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [3.0], indirect=True)
def test_agents_end_when_rank_0_shows_no_sign_of_life(torchrun):
    """As when its machine is gone, while the store of torchrun is another's and stays."""
    nodes = Nodes(Rank.from_environment())
    nodes.meet()
    process = nodes.start(SETTINGS.model_copy(update={"rank": 1, "world_size": 2}))
    assert process.arrived(60)
    pid = process.take("start").pid
    nodes._store.close()
    _, told = torchrun.agent.communicate(timeout=60)
    assert torchrun.agent.returncode == 130
    assert "rank 1: rank 0 is gone (no sign of life for 3 s); its workers here were ended" in told
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
def test_agents_end_with_the_store(torchrun):
    nodes = Nodes(Rank.from_environment())
    nodes.meet()
    nodes._store.close()
    # Rank 0 opened it, for there is no torchrun here to do so; its last sign of life still uses it.
    time.sleep(2 * shared_store.BEAT_S)
    del nodes._store._store
    _, told = torchrun.agent.communicate(timeout=60)
    assert torchrun.agent.returncode == 130
    assert "rank 1: rank 0 is gone (torch's store is gone" in told


@pytest.mark.slow
def test_the_store_of_rank_0_listens_on_the_named_address_alone(nodes):
    port = int(os.environ["MASTER_PORT"])
    listening = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    assert {address.ip for address in listening if address.port == port} == {"127.0.0.1"}


class Kept:
    """A store in this process: requests that are there, and answers."""

    def __init__(self, *requests, lost=None):
        self.messages = {f"1/{number}": request for number, request in enumerate(requests, 1)}
        self.lost = lambda _: lost

    def arrived(self, key, within_s=0.0):
        return key in self.messages

    def take(self, key, kind):
        return kind.validate_python(self.messages.pop(key))

    def put(self, key, message):
        self.messages[key] = message


@pytest.mark.parametrize("do", ["eval", "__init__", ""])
def test_a_rank_takes_its_four_requests_alone(do):
    with pytest.raises(ValueError, match="'start', 'ask', 'kill' or 'end'"):
        Request(do=do)


def test_a_request_about_an_unknown_worker_is_answered_with_the_reason():
    store = Kept(Request(do="ask", worker="7"), Request(do="kill", worker="7"), Request(do="end"))
    rank = Rank(1, 2, 0, "127.0.0.1", 1)
    assert Serving(rank, Machine(device="cpu"), store).until_the_end() == 0
    assert store.messages["1/1/answer"].why == "there is no worker '7'"
    assert store.messages.keys() == {"1/1/answer", "1/3/answer"}


@pytest.mark.parametrize("ranks", [1, 7])
def test_dead_ranks_are_not_waited_for_at_the_end(monkeypatch, ranks):
    """torchrun kills rank 0 if it takes longer than 30 s, however many ranks died."""
    waited = [0.0]

    class Dead(Peer):
        def lost(self):
            return None

        def post(self, request):
            return ""

        def arrived(self, key, within_s):
            waited[0] += max(0.0, within_s)
            return False

    nodes = object.__new__(Nodes)
    nodes._peers = {rank: object.__new__(Dead) for rank in range(1, ranks + 1)}
    nodes._store = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr("dilabench.engine.worker.nodes.time", SimpleNamespace(monotonic=lambda: waited[0]))
    nodes.close()
    assert 0 < waited[0] <= 10


@pytest.mark.slow
def test_an_ended_run_ends_the_other_ranks_and_leaves_no_process(torchrun):
    with gathered(Rank.from_environment()) as nodes:
        group = Worker("tests@2", SETTINGS, nodes).meet()
        children = psutil.Process(torchrun.agent.pid).children(recursive=True)
        group.kill()
    assert torchrun.agent.wait(timeout=60) == 0
    assert len(children) > 1
    assert not psutil.wait_procs(children, timeout=60)[1]


def test_ranks_without_a_gpu_or_of_another_version_are_refused(nodes, monkeypatch):
    assert nodes.machine(Machine(device="cpu")).device == "cpu"
    with pytest.raises(EnvironmentNotReady, match=r"rank 0 on .* needs GPU 0, 0 visible"):
        nodes.machine(Machine(device="cuda"))
    other = nodes._peers[1].facts.model_copy(update={"versions": {"dilabench": "0.0.1", "torch": "2.0"}})
    monkeypatch.setattr(nodes._peers[1], "facts", other)
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


def test_the_first_rank_of_another_machine_holds_the_gpus_of_all_its_ranks(monkeypatch, tmp_path):
    monkeypatch.setenv("DILABENCH_LOCK_DIR", str(tmp_path))
    held = []

    class Started:
        def __init__(self, _settings):
            held.append([index for index in range(4) if not free(*locks_of(GPUS, [index]))])

        def arrived(self, _within_s):
            return True

        def take(self, _doing):
            return Hello(pid=1)

        def kill(self):
            pass

    monkeypatch.setattr("dilabench.engine.worker.nodes.WorkerProcess", Started)
    starts = [Request(do="start", worker=name, settings=SETTINGS, locks=(0, 1, 3)) for name in "ab"]
    store = Kept(*starts, Request(do="end"))
    assert Serving(Rank(1, 16, 0, "127.0.0.1", 1), GPUS, store).until_the_end() == 0
    assert held == [[0, 1, 3]] * 2
    assert all(free(lock) for lock in locks_of(GPUS, range(4)))


def test_rank_0_holds_its_own_machine_and_the_first_rank_of_each_other_holds_that(nodes, monkeypatch):
    """Ranks 0 and 1 are here, 2 and 3 on one other machine, 4 on another."""
    places = {2: ("y", 0), 3: ("y", 1), 4: ("x", 0)}
    peers = {1: nodes._peers[1]}
    for rank, (machine, local_rank) in places.items():
        peers[rank] = Peer(rank, nodes._store)
        own = RankFacts(host=machine, machine=machine, gpus=2, local_rank=local_rank, gpu=None, versions={})
        peers[rank].facts = own
    monkeypatch.setattr(nodes, "_peers", peers)
    assert [list(nodes.gpus_here(ranks)) for ranks in (1, 2, 5)] == [[0], [0, 1], [0, 1]]
    assert {rank: nodes._locks(rank) for rank in peers} == {1: (), 2: (0, 1), 3: (), 4: (0,)}
    monkeypatch.undo()


@pytest.mark.parametrize("doing", ["start", "ask"])
def test_a_wait_for_another_rank_ends_with_an_interrupt(nodes, doing, monkeypatch):
    """Its worker computes on; the request that ends it is sent, and the next worker starts."""
    with contextlib.ExitStack() as ended:
        if doing == "start":
            monkeypatch.setattr(nodes._peers[1], "post", lambda _request: "never")
        else:
            group = ended.enter_context(group_at(nodes))
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            Worker("tests@2", SETTINGS, nodes).meet() if doing == "start" else prepared(
                group, "failing:build_slow", 300.0
            )
        timer.join()
    monkeypatch.undo()
    with group_at(nodes) as group:
        assert prepared(group, "dilabench.impls.ring.rings:build")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_rank_0_waits_for_others_until_an_interrupt(tmp_path, number):
    """The ranks never come: without the signal it would wait for minutes."""
    with socket.socket() as free_port:
        free_port.bind(("127.0.0.1", 0))
        port = free_port.getsockname()[1]
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "dilabench", "run", "ring", "-o", str(tmp_path)]
    process = subprocess.Popen(command, env={**os.environ, **ranks}, stderr=subprocess.PIPE, text=True)
    while not any(one.laddr.port == port for one in psutil.Process(process.pid).net_connections("tcp")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
