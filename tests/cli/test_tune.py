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

    monkeypatch.setattr("dilabench.cli.run.shown.show_run", nothing)
    result = cli("tune", "--lengths", "64", "--device", "cpu", "-o", "tuned.json")
    assert result.exit_code == code, result.output
    assert "0 workloads tuned" in result.stdout
    assert not (tmp_path / "tuned.json").exists()


def test_json_is_all_that_stdout_holds(cli, monkeypatch, tmp_path):
    def nothing(execution, formats):
        assert formats == ()
        execution.folder.discard_if_empty()
        return ExitCode.OK

    monkeypatch.setattr("dilabench.cli.run.shown.show_run", nothing)
    result = cli("tune", "--lengths", "64", "--device", "cpu", "-i", "gather", "-o", "tuned.json", "--json")
    assert json.loads(result.stdout) == {"exit_code": 0, "added": 0, "path": "tuned.json"}


def test_compile_ahead_asks_for_every_common_case_and_says_why_there_is_none(cli):
    result = cli("tune", "--compile", "-i", "fused", "--device", "cpu", "--json")
    assert result.exit_code == ExitCode.NOTHING_MEASURED, result.stderr
    cases = json.loads(result.stdout)
    assert {(one["head_dim"], one["dtype"], one["causal"], one["mode"]) for one in cases} == {
        (head_dim, dtype, causal, "both")
        for head_dim in ("48", "64", "96", "128")
        for dtype in ("bfloat16", "float16")
        for causal in ("yes", "no")
    }
    assert all("needs cuda" in one["why_not"] for one in cases)


def test_compile_ahead_makes_the_first_call_in_a_worker(cli):
    arguments = "--compile -i strided --head-dim 16,32 --dtype float32 --set causal=false --lengths 128 --device cpu"
    result = cli("tune", *arguments.split())
    assert result.exit_code == 0, result.stderr
    assert [line.split()[:6] for line in result.stdout.splitlines()[1:-1]] == [
        ["strided", head_dim, "float32", "no", "both", "0"] for head_dim in ("16", "32")
    ]
    assert result.stdout.splitlines()[-1].startswith("0 kernels compiled")


def test_compile_ahead_counts_the_kernels_that_are_new_in_tritons_cache(cli, monkeypatch, tmp_path):
    """Whatever the first call writes there: the second case finds what the first has left."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def first_call(*_about):
        for folder in ("forward", "by_queries", "by_keys"):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / "kernel.cubin").touch()
        return 1

    monkeypatch.setattr("dilabench.cli.run.compile_ahead.first_call_in", first_call)
    arguments = "--compile -i strided --head-dim 16 --dtype float32 --device cpu --json"
    result = cli("tune", *arguments.split())
    assert [one["kernels"] for one in json.loads(result.stdout)] == [3, 0]


def test_compile_ahead_takes_no_option_of_measuring(cli):
    result = cli("tune", "--compile", "--budget", "5s")
    assert result.exit_code == ExitCode.BAD_REQUEST
    assert "--compile measures nothing" in result.stderr
