"""What `doctor` says about a machine."""

import json
from pathlib import Path

import pytest

from dilabench.atomic_file import CACHE_VARIABLE, OTHER_CACHE
from dilabench.kernels.cpu import compiled
from dilabench.machine import Machine
from dilabench.runs.machine_state import GpuState, MachineState, notes, notes_at_start, read

QUIET = {
    "cpus": 8,
    "usable_cpus": 4,
    "load_1m": 0.1,
    "available_bytes": 2**35,
    "governor": "performance",
    "turbo": False,
}


def test_a_quiet_machine_has_no_notes():
    assert notes(MachineState(**QUIET, gpus=(GpuState(name="H200", persistence=True, temperature_c=35),))) == ()


@pytest.mark.parametrize(
    ("change", "code", "hint"),
    [
        ({"load_1m": 3.0}, "load", "end them"),
        ({"governor": "powersave"}, "governor", "cpupower frequency-set -g performance"),
        ({"turbo": True}, "turbo", "no_turbo"),
        ({"quota_cpus": 1.5}, "cpu_quota", "OMP_NUM_THREADS=1"),
        ({"usable_cpus": 8}, "affinity", "taskset -c 0-3"),
        ({"thread_variables": ("OMP_NUM_THREADS",)}, "thread_variables", "unset"),
        ({"available_bytes": 2**30}, "low_memory", "end other programs"),
        ({"swap_used_bytes": 2**30}, "swap", "end other programs"),
        ({"on_battery": True}, "battery", "plug it in"),
        ({"gpus": (GpuState(name="A", processes=2),)}, "gpu_shared", "CUDA_VISIBLE_DEVICES"),
        ({"gpus": (GpuState(name="A", utilization_percent=60),)}, "gpu_busy", "wait"),
        ({"gpus": (GpuState(name="A", temperature_c=85),)}, "gpu_hot", "cool"),
        ({"gpus": (GpuState(name="A", persistence=False),)}, "gpu_persistence_off", "nvidia-smi -pm 1"),
    ],
)
def test_each_source_of_noise_has_advice(change, code, hint):
    (note,) = notes(MachineState(**{**QUIET, **change}))
    assert note.code == code
    assert hint in note.hint


def test_no_more_processors_are_seen_than_there_are():
    (note,) = notes(MachineState(**{**QUIET, "load_1m": 9.44}))
    assert note.observed == QUIET["usable_cpus"]


def test_a_small_quota_lowers_the_limit_of_the_load():
    found = notes(MachineState(**{**QUIET, "cpus": 64, "usable_cpus": 64, "quota_cpus": 2, "load_1m": 1.0}))
    assert [note.code for note in found] == ["load", "cpu_quota"]


def test_this_machine_can_be_read():
    reading = read(Machine(device="cpu"))
    assert 1 <= reading.usable_cpus <= reading.cpus
    assert reading.available_bytes > 0
    assert reading.gpus == ()


def test_doctor_reports_the_machine(cli):
    result = cli("doctor")
    assert result.exit_code == 0, result.stderr
    for text in ("runs use:", "CPU:", "packages:", "noisy"):
        assert text in result.stdout


@pytest.mark.parametrize(
    ("variable", "name"),
    [("DILABENCH_STORE", "store"), ("DILABENCH_LOCK_DIR", "locks"), ("TMPDIR", "temporary"), ("", "results")],
)
def test_doctor_names_each_folder_that_cannot_be_written(cli, monkeypatch, tmp_path, variable, name):
    """And makes none."""
    monkeypatch.chdir(tmp_path)
    results = Path("benchmark_results")
    assert json.loads(cli("doctor", "--json").stdout)["folders"][name]["why_not"] is None
    assert not results.exists()
    taken = tmp_path / "taken" if variable else results
    taken.write_text("")
    if variable == "TMPDIR":
        monkeypatch.setattr("tempfile.tempdir", str(taken))
    elif variable:
        monkeypatch.setenv(variable, str(taken / "below"))
    said = " ".join(cli("doctor").stdout.split())
    assert f"{name}:" in said
    assert "cannot be written: Not a directory; " in said


def test_doctor_json(cli):
    report = json.loads(cli("doctor", "--json").stdout)
    assert set(report) == {
        *("device", "no_cuda", "environment", "notes", "advice"),
        *("cache", "folders", "compiled_kernels", "broken_plugins"),
    }
    assert report["environment"]["cpu"]["threads"] >= 1


def test_a_run_warns_of_what_works_beside_it_and_not_of_how_the_machine_is_set_up():
    reading = MachineState(**{**QUIET, "load_1m": 3.0, "governor": "powersave"})
    assert {note.code for note in notes(reading)} == {"load", "governor"}
    assert [note.code for note in notes_at_start(reading)] == ["load"]
    assert notes_at_start(MachineState(**QUIET)) == ()


@pytest.mark.parametrize("place", ["/proc/none-such", "/dev/null", "/dev/null/below"])
def test_doctor_says_that_a_cache_cannot_be_written(place, cli, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, place)
    compiled.why_unavailable.cache_clear()
    compiled.library.cache_clear()
    said = " ".join(cli("doctor").stdout.split())
    compiled.why_unavailable.cache_clear()
    assert f"cache: '{place}' cannot be written: " in said
    assert f"C++ kernels: unavailable: '{place}/cpu': " in said
    assert said.count(OTHER_CACHE) == 2
