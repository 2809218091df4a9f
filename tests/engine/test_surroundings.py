"""Lock, environment, and what the light half may import."""

import contextlib
import errno
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from dilabench.engine import runner
from dilabench.engine.device import environment
from dilabench.engine.device.environment import snapshot, with_torch
from dilabench.engine.device.lock import device_lock, locks_of
from dilabench.engine.progress import Progress
from dilabench.errors import EnvironmentNotReady
from dilabench.machine import Machine
from dilabench.record import Case, GpuInfo, PlannedCase, RunHeader, Skipped
from dilabench.request import RunRequest
from dilabench.workload.spec import Workload

CPU = Machine(device="cpu", no_cuda="test")
GPU = Machine(
    device="cuda",
    gpus=(GpuInfo(name="H200", uuid_hash="abc", driver="580", power_limit_mw=700_000, compute_capability="9.0"),),
)


class Waiting(Progress):
    def __init__(self):
        self.said = []

    def waiting(self, why):
        self.said.append(why)


def test_the_second_run_waits_and_then_says_who_holds_the_device():
    waiting, slept = Waiting(), []
    now = [0.0]

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    def second():
        return device_lock(CPU, "second", waiting, wait_s=2.0, clock=lambda: now[0], sleep=sleep)

    with device_lock(CPU, "first", Progress()):
        with pytest.raises(EnvironmentNotReady, match=f"run first \\(process {os.getpid()}"), second():
            pass
        assert sum(slept) == 2.0
        assert "run first" in waiting.said[0]
    with second():
        pass


def test_the_lock_is_free_as_soon_as_its_holder_ends():
    waiting = Waiting()
    holder = device_lock(CPU, "first", Progress())
    holder.__enter__()

    def sleep(_):
        holder.__exit__(None, None, None)

    with device_lock(CPU, "second", waiting, sleep=sleep):
        assert len(waiting.said) == 1


def test_each_gpu_has_a_lock_of_its_own():
    assert locks_of(CPU) != locks_of(GPU)
    with device_lock(CPU, "first", Progress()), device_lock(GPU, "second", Progress(), wait_s=0):
        pass


def several(*uuids):
    return Machine(device="cuda", gpus=tuple(GpuInfo(name="H200", uuid_hash=uuid) for uuid in uuids))


def test_a_run_over_ranks_holds_the_gpu_of_each():
    machine = several("a", "b", "c")
    with device_lock(machine, "ranks", Progress(), gpus=range(2)):
        with device_lock(machine, "beside", Progress(), gpus=[2], wait_s=0):
            pass
        second = device_lock(machine, "second", Progress(), gpus=[1], wait_s=0)
        with pytest.raises(EnvironmentNotReady, match=r"GPU 1 \(H200\) is in use by run ranks"), second:
            pass
    with device_lock(machine, "after", Progress(), gpus=range(3), wait_s=0):
        pass


def test_all_runs_lock_gpus_in_one_order_whatever_they_see_first():
    """Two runs that see the GPUs in other orders would otherwise each hold what the other waits for."""
    one, other = several("b", "a", "c"), several("c", "b", "a")
    paths = [lock.path for lock in locks_of(one, range(3))]
    assert paths == [lock.path for lock in locks_of(other, range(3))]
    assert [lock.device for lock in locks_of(one, range(3))] == ["GPU 1 (H200)", "GPU 0 (H200)", "GPU 2 (H200)"]


def test_ranks_that_share_a_gpu_lock_it_once():
    with device_lock(several("a", "a"), "ranks", Progress(), gpus=range(3), wait_s=0):
        pass


def test_a_run_that_does_not_get_all_gpus_keeps_none():
    machine = several("a", "b")
    with device_lock(machine, "first", Progress(), gpus=[1]):
        second = device_lock(machine, "second", Progress(), gpus=range(2), wait_s=0)
        with pytest.raises(EnvironmentNotReady, match="GPU 1"), second:
            pass
        with device_lock(machine, "third", Progress(), gpus=[0], wait_s=0):
            pass


def test_a_run_locks_as_many_gpus_as_its_widest_case_has_ranks(catalogue, monkeypatch):
    locked = []

    @contextlib.contextmanager
    def told(machine, run_id, progress, *, gpus):
        locked.append(list(gpus))
        raise EnvironmentNotReady("seen")
        yield

    monkeypatch.setattr(runner, "device_lock", told)
    monkeypatch.setattr(runner, "warm_server", lambda: None)
    workload = Workload(pattern={"kind": "dense"}, batch_size=1, seq_len=64, num_heads=2, num_kv_heads=2, head_dim=8)
    planned = [
        PlannedCase(case=Case(implementation="ring", workload=workload, world_size=size), skip=skip)
        for size, skip in ((1, None), (3, None), (8, Skipped(code="unsupported", why="no such ranks")))
    ]
    header = RunHeader(
        tool_version="0", run_id="r", suite="ring", started_at="2026-01-01", environment=snapshot(several("a"))
    )
    with pytest.raises(EnvironmentNotReady, match="seen"):
        runner.run(planned, RunRequest(suite="ring"), catalogue, several("a", "b", "c"), header, None)
    assert locked == [[0, 1, 2]]


def test_a_lock_that_cannot_be_opened_names_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("DILABENCH_LOCK_DIR", str(tmp_path / "missing"))
    with pytest.raises(EnvironmentNotReady, match="DILABENCH_LOCK_DIR"), device_lock(CPU, "r", Progress()):
        pass


def test_a_lock_that_another_user_made_in_a_shared_folder_is_opened(monkeypatch):
    """Linux refuses O_CREAT there, though the file may be written (fs.protected_regular)."""
    with device_lock(CPU, "theirs", Progress()):
        pass
    real = os.open

    def refuse(path, flags, *mode):
        if flags & os.O_CREAT and os.path.exists(path):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    with device_lock(CPU, "ours", Progress()):
        pass


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    locks_of(CPU)[0].path.symlink_to(precious)
    with pytest.raises(EnvironmentNotReady, match="DILABENCH_LOCK_DIR"), device_lock(CPU, "r", Progress()):
        pass
    assert precious.read_text() == "keep me"


def test_a_lock_whose_text_is_garbage_is_held_by_another_run():
    with device_lock(CPU, "first", Progress()):
        locks_of(CPU)[0].path.write_bytes(b"\xff\xfe\x80")
        second = device_lock(CPU, "second", Progress(), wait_s=0)
        with pytest.raises(EnvironmentNotReady, match="in use by another run"), second:
            pass


# Programs that a repository's own configuration can name, which `git status` runs.
PROGRAMS = ["core.fsmonitor", "filter.theirs.clean", "filter.theirs.process", "filter.a=b.c.clean"]


@pytest.mark.parametrize("setting", PROGRAMS)
def test_a_repository_in_the_working_folder_is_no_code(tmp_path, setting):
    def git(*words):
        who = ("-c", "user.name=n", "-c", "user.email=e")
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    file, ran, program = tmp_path / "file", tmp_path / ".git" / "ran", tmp_path / ".git" / "program"
    git("init", "--quiet")
    file.write_text("text")
    (tmp_path / ".gitattributes").write_text(f"file filter={setting.removeprefix('filter.').rpartition('.')[0]}\n")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    program.write_text(f"#!/bin/sh\necho ran >> {ran}\ncat\n")
    program.chmod(0o755)
    git("config", setting, str(program))
    if setting.startswith("filter."):
        git("config", f"{setting.rpartition('.')[0]}.required", "true")
    # The index does not know whether a file of another time has changed.
    os.utime(file, (0, 0))
    assert snapshot(CPU, tmp_path).git.dirty is False
    file.write_text("else")
    assert snapshot(CPU, tmp_path).git.dirty is True
    assert not ran.exists()


def test_a_state_of_a_repository_that_is_unknown_is_no_clean_one(tmp_path, monkeypatch):
    answers = {"rev-parse": "abc", "config": None, "status": None}
    monkeypatch.setattr(environment, "_git_output", lambda _folder, command, *_words, **_more: answers[command])
    assert snapshot(CPU, tmp_path).git.dirty is True


def test_hard_fields_of_a_cpu_run_name_the_processor():
    found = snapshot(CPU)
    assert {"device", "cpu", "cores"} <= found.fingerprint_hard.keys()
    assert "gpu" not in found.fingerprint_hard
    assert found.packages["torch"]


def test_hard_fields_of_a_gpu_run_name_gpu_driver_and_power_limit():
    found = with_torch(snapshot(GPU), GPU, {"cuda": "13.0", "threads": "16", "matmul_tf32": "False"})
    hard = found.fingerprint_hard
    assert hard["gpu"] == "H200"
    assert hard["power_limit_mw"] == "700000"
    assert hard["driver"] == "580"
    assert hard["cuda"] == "13.0"
    assert hard["matmul_tf32"] == "False"
    assert "cpu" not in hard
    assert found.fingerprint_soft["gpu_uuid_hash"] == "abc"


def test_threads_that_torch_uses_are_part_of_a_cpu_fingerprint():
    one, two = (with_torch(snapshot(CPU), CPU, {"threads": count}) for count in ("1", "2"))
    assert one.fingerprint_hard["threads"] != two.fingerprint_hard["threads"]


def test_a_folder_without_git_has_no_commit(tmp_path):
    assert snapshot(CPU, tmp_path).git is None


def test_git_tells_commit_and_changes(monkeypatch):
    answers = {"rev-parse": "abc123\n", "config": "", "status": " M file\n"}

    def fake(command, **options):
        return SimpleNamespace(stdout=answers[command[3]])

    monkeypatch.setattr(environment.subprocess, "run", fake)
    found = snapshot(CPU).git
    assert (found.sha, found.dirty) == ("abc123", True)


LIGHT = "runner workload_group method plausibility progress device.environment device.lock "
LIGHT += "outcomes case_spec call.specs worker.protocol worker.client worker.main worker.torchrun"


def test_the_light_half_never_imports_torch():
    code = "import sys, importlib\nfor name in sys.argv[1:]:\n"
    code += "    importlib.import_module(f'dilabench.engine.{name}')\n    assert 'torch' not in sys.modules, name"
    subprocess.run([sys.executable, "-c", code, *LIGHT.split()], check=True, timeout=60)
