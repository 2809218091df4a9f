"""Real worker processes: questions, answers, time-outs, deaths."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil
import pytest

from dilabench.engine.worker.client import WorkerFailure, WorkerPool
from dilabench.engine.worker.main import _open_log
from dilabench.engine.worker.process import Child, _child_environment, end_server, warm_server
from dilabench.engine.worker.protocol import MeasureCeilings, Verify, WorkerSettings
from tests.conftest import half_are_slow

SETTINGS = WorkerSettings(device="cpu")


@pytest.fixture
def pool():
    made = WorkerPool(SETTINGS)
    yield made
    made.close()


def test_a_worker_says_who_it_is(pool):
    worker = pool.resident("x")
    assert worker.hello.pid != os.getpid()
    assert worker.hello.torch["threads"].isdigit()
    assert pool.resident("x") is worker
    assert pool.resident("y") is not worker


@pytest.mark.parametrize("error", [EOFError("unexpected EOF"), BlockingIOError(errno.EAGAIN, "no more processes")])
def test_a_worker_that_cannot_be_started_is_a_failure_with_a_way_out(error, pool, monkeypatch):
    def refused(_):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(Child, "start", refused)
        with pytest.raises(WorkerFailure, match=r"no worker process could be started: .*ulimit -u"):
            pool.resident("x")
    assert pool.resident("x").alive


def test_a_server_that_cannot_be_warmed_is_left_to_the_first_worker(monkeypatch):
    def refused():
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr("multiprocessing.forkserver.ensure_running", refused)
    warm_server()


def test_the_server_is_deaf_to_an_interrupt_from_its_start(monkeypatch):
    masks = []

    def started():
        resource_tracker.ensure_running()
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    monkeypatch.setattr("multiprocessing.forkserver.ensure_running", started)
    monkeypatch.setattr(resource_tracker._resource_tracker, "_fd", None)
    warm_server()
    assert signal.SIGINT in masks[0]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_worker_that_comes_too_late_says_nothing(tmp_path, capfd):
    with pytest.raises(SystemExit):
        _open_log(str(tmp_path / "gone" / "output.log"))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("given", "seen"),
    [({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
)
def test_threads_of_workers_wait_briefly_unless_the_environment_says(given, seen, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with _child_environment():
        assert os.environ.get("GOMP_SPINCOUNT") == seen
    assert os.environ.get("GOMP_SPINCOUNT") == given.get("GOMP_SPINCOUNT")


def test_a_worker_is_ended_by_one_thread_at_a_time(pool):
    worker = pool.resident("x")
    child, ending, overlaps = worker._ranks[0]._child, threading.Lock(), []
    kill = child.kill

    def watched():
        if not ending.acquire(blocking=False):
            overlaps.append(threading.current_thread().name)
            return
        time.sleep(0.05)
        kill()
        ending.release()

    child.kill = watched
    threads = [threading.Thread(target=worker.kill) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not overlaps
    assert not worker.alive


def test_ceilings_are_measured_in_the_dtypes_asked_for(pool):
    ceilings = pool.resident("x").ask(MeasureCeilings(dtypes=("float32",)), timeout_s=60).ceilings
    assert set(ceilings) == {"matmul_float32_flops_per_s", "copy_bytes_per_s", "read_bytes_per_s"}
    assert min(ceilings.values()) > 1e6


def test_a_command_about_an_unknown_case_is_told_and_the_worker_lives(pool):
    worker = pool.resident("x")
    with pytest.raises(WorkerFailure, match="KeyError") as failed:
        worker.ask(Verify(), "nothing", timeout_s=30)
    assert not failed.value.died
    assert worker.alive


def test_a_worker_killed_while_it_works_is_a_failure_with_the_signal(pool):
    worker = pool.resident("x")
    # A stopped process gives no answer until it is killed.
    os.kill(worker.hello.pid, signal.SIGSTOP)
    killer = threading.Timer(0.2, os.kill, (worker.hello.pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(WorkerFailure, match="SIGKILL") as failed:
        worker.ask(MeasureCeilings(dtypes=()), timeout_s=60)
    killer.join()
    assert failed.value.died
    assert not worker.alive


def test_a_worker_killed_while_idle_is_replaced(pool):
    first = pool.resident("x")
    os.kill(first.hello.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while first.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    second = pool.resident("x")
    assert second is not first
    assert second.ask(MeasureCeilings(dtypes=()), timeout_s=60).ceilings


def test_a_worker_that_does_not_answer_is_ended(pool):
    worker = pool.resident("x")
    os.kill(worker.hello.pid, signal.SIGSTOP)
    with pytest.raises(WorkerFailure, match="hang") as failed:
        worker.ask(MeasureCeilings(dtypes=()), timeout_s=0.1)
    assert failed.value.code == "timeout"
    assert failed.value.died
    assert not worker.alive


@pytest.mark.parametrize(("doing", "ranks"), half_are_slow(["start", "ask"], [1, 2]))
def test_a_wait_for_workers_ends_with_an_interrupt(pool, doing, ranks, monkeypatch):
    """Stopped processes never answer."""
    started = []
    start = Child.start
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))

    def stopped(child):
        start(child)
        os.kill(child._process.pid, signal.SIGSTOP)
        started.append(child)
        if len(started) == ranks:
            timer.start()

    key = "x" if ranks == 1 else f"x@{ranks}"
    if doing == "start":
        monkeypatch.setattr(Child, "start", stopped)
    else:
        worker = pool.resident(key)
        started += [process._child for process in worker._ranks]
        for child in started:
            os.kill(child._process.pid, signal.SIGSTOP)
        timer.start()
    with pytest.raises(KeyboardInterrupt):
        pool.resident(key) if doing == "start" else worker.ask(MeasureCeilings(dtypes=()), timeout_s=200)
    timer.join()
    # At the start they are ended; later the pool does so.
    assert [child.alive for child in started] == [doing == "ask"] * ranks


def test_fresh_workers_end_with_their_block(pool):
    with pool.fresh("x") as worker:
        pid = worker.hello.pid
        assert pid != pool.resident("x").hello.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_closing_a_pool_leaves_no_process(pool):
    pids = [pool.resident(key).hello.pid for key in "xy"]
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_pool_that_has_ended_keeps_no_worker_that_was_starting():
    starting, ended = threading.Event(), threading.Event()
    killed = []

    class Slow:
        def __init__(self, *_):
            starting.set()
            assert ended.wait(10)

        def meet(self):
            return self

        alive = True

        def kill(self):
            killed.append(self)

    pool = WorkerPool(WorkerSettings(device="cpu"), Slow)
    failures = []

    def ask():
        with pytest.raises(WorkerFailure, match="the command was ended") as failure:
            pool.resident("x")
        failures.append(failure)

    thread = threading.Thread(target=ask)
    thread.start()
    assert starting.wait(10)
    pool.end()
    ended.set()
    thread.join(10)
    assert (len(failures), len(killed)) == (1, 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pool_that_ends_ends_workers_that_do_not_come(pool, ranks, monkeypatch):
    """Another thread waits for the first words of stopped processes."""
    start, started, failures = Child.start, threading.Semaphore(0), []

    def stopped(child):
        start(child)
        os.kill(child._process.pid, signal.SIGSTOP)
        started.release()

    def ask():
        try:
            # One that spoke before it was stopped is there.
            while pool.resident("x" if ranks == 1 else "x@2"):
                time.sleep(0.01)
        except WorkerFailure as failure:
            failures.append(failure)

    monkeypatch.setattr(Child, "start", stopped)
    thread = threading.Thread(target=ask)
    thread.start()
    for _ in range(ranks):
        assert started.acquire(timeout=60)
    pool.end()
    thread.join(60)
    assert len(failures) == 1


def test_the_server_ends_with_the_command():
    """It loads torch for seconds, and would keep the command's output open."""
    code = (
        "from multiprocessing import forkserver; from dilabench.engine.worker.process import warm_server; "
        "warm_server(); print(forkserver._forkserver._forkserver_pid)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    status = Path(f"/proc/{int(ended.stdout)}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_server_that_was_ended_is_not_asked_for_the_next_worker(monkeypatch):
    context = multiprocessing.get_context("forkserver")
    end_server()
    # Servers that start without torch.
    monkeypatch.setattr(forkserver._forkserver, "_preload_modules", [])
    for _ in range(3):
        forkserver.ensure_running()
        ended = psutil.Process(forkserver._forkserver._forkserver_pid)
        end_server()
        assert ended.status() == psutil.STATUS_ZOMBIE
        one = context.Process(target=int)
        one.start()
        one.join()
        assert one.exitcode == 0
    end_server()
