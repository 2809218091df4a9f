"""`--resume`: what a run that goes on keeps of its first part."""

import os
import threading
from types import SimpleNamespace

import pytest

from dilabench.engine.device.environment import snapshot, with_torch
from dilabench.machine import Machine
from dilabench.patterns.mask_files import named_file
from dilabench.record import RunHeader
from dilabench.request import RunRequest
from dilabench.runs.execution import new_header
from dilabench.runs.resume import recorded_request, resumed_header
from dilabench.store.run_files import RunFolder

CPU = Machine(device="cpu", no_cuda="test")


@pytest.fixture
def header():
    return RunHeader(tool_version="0", run_id="r", suite="quick", started_at="now", environment=snapshot(CPU))


def test_what_a_worker_told_of_its_torch_is_not_lost(header):
    """The fingerprint would be another machine's if all rows were measured by the first part."""
    facts = {"threads": "7", "matmul_tf32": "False", "git": "abc"}
    environment = with_torch(header.environment, CPU, facts)
    earlier = header.model_copy(update={"environment": environment, "ceilings": {"a": 1.0}})
    found = resumed_header(earlier, header, CPU)
    assert found == earlier
    assert found.environment.fingerprint_hard["threads"] == "7"


def test_the_environment_is_that_of_now(header):
    now = header.model_copy(update={"environment": header.environment.model_copy(update={"os": "Linux 99"})})
    found = resumed_header(header, now, CPU)
    assert found.environment.os == found.environment.fingerprint_soft["os"] == "Linux 99"


def test_a_run_goes_on_in_its_own_folder(cli, tmp_path, header):
    folder = RunFolder.create(tmp_path, "quick", "r")
    folder.start(header.model_copy(update={"config": {"suite": "quick"}}))
    folder.close()
    result = cli("run", "quick", "--resume", str(folder.path), "-o", "elsewhere", "--dry-run")
    assert result.exit_code == 2
    assert "--resume continues the run as it was requested; omit -o elsewhere" in result.stderr
    for own in ("copy.json", str(tmp_path)):
        assert cli("run", "quick", "--resume", str(folder.path), "-o", own, "--dry-run").exit_code == 0


@pytest.mark.parametrize("recorded", ["block-sparse", "sparse"])
def test_a_run_goes_on_without_its_suite_or_by_any_of_its_names(cli, tmp_path, header, recorded):
    folder = RunFolder.create(tmp_path, recorded, "r")
    folder.start(header.model_copy(update={"suite": recorded, "config": {"suite": recorded, "device": "cpu"}}))
    folder.close()
    cases = [
        cli("run", *suite, "--resume", str(folder.path), "--dry-run", "--json")
        for suite in ([], ["block-sparse"], ["sparse"])
    ]
    assert [case.exit_code for case in cases] == [0, 0, 0]
    assert len({case.stdout for case in cases}) == 1
    other = cli("run", "quick", "--resume", str(folder.path), "--dry-run")
    assert other.exit_code == 2
    said = " ".join(other.stderr.split())
    assert f"is of suite {recorded!r}, not 'quick'; omit 'quick': --resume takes the suite from the run" in said


@pytest.mark.parametrize("field", ["mask_file", "indices_file", "bounds_file"])
def test_what_a_pipe_sent_is_read_from_a_file_when_the_run_goes_on(tmp_path, monkeypatch, field):
    monkeypatch.setenv("DILABENCH_CACHE", str(tmp_path / "cache"))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"[[0]]",))
    writer.start()
    kept, digest = named_file(str(pipe))
    writer.join()
    request = RunRequest(suite="range", overrides={field: str(pipe), "block_size": 64})
    folder = RunFolder.create(tmp_path, "range", "r")
    folder.start(new_header(SimpleNamespace(plugins=()), CPU, request))
    folder.close()
    found, _ = recorded_request(folder.path, ("range",), ())
    assert found.overrides == {field: kept, "block_size": 64}
    assert named_file(found.overrides[field]) == (kept, digest)
