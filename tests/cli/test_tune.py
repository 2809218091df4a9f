"""`dilabench tune`: measures, keeps the fastest, and `-i auto` then goes by it."""

import json
from dataclasses import replace

import pytest

from dilabench.engine import method
from dilabench.errors import ExitCode
from dilabench.machine import CPU

SMALL = "--lengths 256 --set num_heads=2 --set batch_size=1 --set segment_lengths=64,128 --set dilation_rates=1,2"


@pytest.mark.slow
def test_keeps_the_fastest_and_auto_takes_it(cli, monkeypatch, tmp_path):
    monkeypatch.setenv("DILABENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DILABENCH_LOCK_DIR", str(tmp_path))
    monkeypatch.setattr(method, "device_named", lambda _name: replace(CPU, sampling_s=0.2))
    shared = [*SMALL.split(), "--device", "cpu"]
    done = cli("tune", *shared, "--budget", "60s")
    assert done.exit_code == 0, done.output
    assert "1 workload tuned in" in done.stdout
    (file,) = (tmp_path / "cache" / "tune").glob("cpu-*.json")
    (cell,) = json.loads(file.read_text())["cells"]
    assert cell["implementation"] in {"gather", "strided"}
    assert cell["runner_up_ns"] >= cell["median_ns"]
    dry = cli("run", "implementations", "-i", "auto", *shared, "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert cell["implementation"] in dry.stdout


@pytest.mark.parametrize("code", [ExitCode.INTERRUPTED, ExitCode.CASE_FAILED])
def test_a_run_without_a_time_ends_as_it_ended(cli, monkeypatch, tmp_path, code):
    def nothing(execution, *_):
        execution.folder.discard_if_empty()
        return code

    monkeypatch.setattr("dilabench.runs.execute.execute", nothing)
    result = cli("tune", "--lengths", "64", "--device", "cpu", "-o", "tuned.json")
    assert result.exit_code == code, result.output
    assert "0 workloads tuned" in result.stdout
    assert not (tmp_path / "tuned.json").exists()


def test_json_is_all_that_stdout_holds(cli, monkeypatch, tmp_path):
    def nothing(execution, output, formats):
        assert formats == ()
        execution.folder.discard_if_empty()
        return ExitCode.OK

    monkeypatch.setattr("dilabench.runs.execute.execute", nothing)
    result = cli("tune", "--lengths", "64", "--device", "cpu", "-i", "gather", "-o", "tuned.json", "--json")
    assert json.loads(result.stdout) == {"exit_code": 0, "added": 0, "path": "tuned.json"}
