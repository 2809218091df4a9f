"""What a machine means for a run: device, dtype, and why CUDA is not used."""

import sys
from pathlib import Path

import pytest

from dilabench import machine
from dilabench.errors import EnvironmentNotReady
from dilabench.machine import GroupLimits, Machine, cxx_compiler, detect, group_limits
from dilabench.record import GpuInfo
from dilabench.runs import machine_state


def gpu(capability):
    return GpuInfo(name="a GPU", compute_capability=capability)


@pytest.mark.parametrize(
    ("capability", "number", "dtype"),
    [
        ("9.0", 90, "bfloat16"),
        ("10.0", 100, "bfloat16"),
        ("8.0", 80, "bfloat16"),
        ("7.5", 75, "float16"),
        ("6.1", 61, "float32"),
    ],
)
def test_auto_dtype_follows_the_compute_capability(capability, number, dtype):
    found = Machine(device="cuda", gpus=(gpu(capability),))
    assert (found.compute_capability, found.auto_dtype) == (number, dtype)


def test_a_cpu_run_ignores_the_gpus():
    assert Machine(device="cpu", gpus=(gpu("9.0"),)).auto_dtype == "float32"


def test_cuda_by_name_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(machine, "_nvml_gpus", lambda: ())
    with pytest.raises(EnvironmentNotReady, match="no NVIDIA GPU is visible; use --device cpu or auto"):
        detect("cuda")
    assert detect("auto").device == "cpu"
    assert detect("auto").no_cuda == "no NVIDIA GPU is visible"


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_are_not_used(monkeypatch, hidden):
    monkeypatch.setattr(machine, "_nvml_gpus", lambda: (gpu("9.0"),))
    monkeypatch.setattr(machine, "torch_cuda_version", lambda: "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert detect().device == "cuda"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert detect().no_cuda == f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU"


@pytest.mark.parametrize(
    ("chosen", "names"),
    [("2", "c"), ("3,1", "db"), ("0, 1", "ab"), ("1,9,2", "b"), ("GPU-5f3", "abcd"), (None, "abcd")],
)
def test_a_run_sees_the_gpus_that_cuda_will_see(monkeypatch, chosen, names):
    installed = tuple(GpuInfo(name=name, compute_capability="9.0") for name in "abcd")
    monkeypatch.setattr(machine, "_nvml_gpus", lambda: installed)
    monkeypatch.setattr(machine, "torch_cuda_version", lambda: "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert "".join(one.name for one in detect().gpus) == names


def test_a_cpu_build_of_torch_is_named(monkeypatch):
    monkeypatch.setattr(machine, "_nvml_gpus", lambda: (gpu("9.0"),))
    monkeypatch.setattr(machine, "torch_cuda_version", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert detect().no_cuda == "the installed torch is a CPU build"


def test_a_cpu_run_by_choice_says_so(monkeypatch):
    monkeypatch.setattr(machine, "_nvml_gpus", lambda: (gpu("9.0"),))
    monkeypatch.setattr(machine, "torch_cuda_version", lambda: "13.0")
    assert detect("cpu") == Machine(device="cpu", gpus=(gpu("9.0"),), no_cuda="device cpu was requested")


def test_torch_version_is_read_without_importing_it(monkeypatch, tmp_path):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    version = package / "version.py"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    version.write_text("from typing import Optional\n__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\n")
    assert machine.torch_cuda_version() == "13.0"
    version.write_text("__version__ = '2.13.0+cpu'\ncuda = None\n")
    assert machine.torch_cuda_version() is None


def _command(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_first_compiler_that_works_is_taken(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "none-such")
    assert cxx_compiler() is None
    _command(tmp_path, "c++", "echo 'no developer tools were found' >&2; exit 1")
    working = _command(tmp_path, "g++", "exit 0")
    # What is on a path is looked for once in a process.
    monkeypatch.setenv("PATH", f"{tmp_path}:")
    assert cxx_compiler() == str(working)
    named = _command(tmp_path, "mine", "exit 0")
    monkeypatch.setenv("CXX", str(named))
    assert cxx_compiler() == str(named)


def group_tree(folder: Path, own: str, files: dict[str, str]) -> dict[str, Path]:
    """A file as /proc/self/cgroup, and a tree as /sys/fs/cgroup with these files."""
    (folder / "own").write_text(own)
    for name, text in files.items():
        path = folder / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("latin-1"))
    return {"own": folder / "own", "root": folder / "tree"}


V1 = "9:name=systemd:/\n4:memory:/pod/one\n1:cpu,cpuacct:/pod/one\n"


@pytest.mark.parametrize(
    ("own", "files", "limits"),
    [
        ("0::/\n", {"memory.max": "1048576\n", "cpu.max": "150000 100000\n"}, (2**20, 1.5)),
        ("0::/\n", {"memory.max": "max\n", "cpu.max": "max 100000\n"}, (None, None)),
        ("0::/a/b\n", {"a/memory.max": "500\n", "a/b/memory.max": "900\n", "a/b/cpu.max": "5000 1000"}, (500, 5.0)),
        ("0::/a/b\n", {"a/memory.max": "max", "a/b/memory.max": "900", "a/cpu.max": "2000 1000"}, (900, 2.0)),
        ("0::/host/path\n", {"memory.max": "700"}, (700, None)),
        ("0::/../other\n", {"memory.max": "700", "other/memory.max": "5"}, (700, None)),
        ("0::/a\n", {"unified/a/memory.max": "77"}, (77, None)),
        (V1, {"memory/pod/one/memory.limit_in_bytes": "4096\n"}, (4096, None)),
        (V1, {"memory/pod/memory.limit_in_bytes": "4", "memory/pod/one/memory.limit_in_bytes": "8"}, (4, None)),
        (V1, {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, (None, None)),
        (V1, {"cpu,cpuacct/pod/one/cpu.cfs_quota_us": "50000", "cpu,cpuacct/pod/one/cpu.cfs_period_us": "100000"}, 0.5),
        (V1, {"cpu/pod/one/cpu.cfs_quota_us": "50000", "cpu/pod/one/cpu.cfs_period_us": "100000"}, 0.5),
        (V1, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, (None, None)),
        (V1, {"memory.max": "9", "memory/pod/one/memory.limit_in_bytes": "8"}, (8, None)),
        # A container sees its own group as the root of a host's path.
        (V1, {"memory/memory.limit_in_bytes": "64"}, (64, None)),
    ],
)
def test_the_smallest_limit_along_the_control_groups_counts(tmp_path, own, files, limits):
    expected = GroupLimits(*limits) if isinstance(limits, tuple) else GroupLimits(None, limits)
    assert group_limits(**group_tree(tmp_path, own, files)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "max max",
        "12abc",
        "1 2 3",
        "0 0",
        "1000 0",
        "-5 100",
        "1e9 1",
        "\xff\xfe\x00",
        "9" * 5000,
        "½ 1",
        "1\x001",
    ],
)
@pytest.mark.parametrize("own", [None, "", "garbage", "0::", "::::::", "0::/a\n\xff", "1:cpu\n"])
def test_a_malformed_control_group_limits_nothing(tmp_path, text, own):
    names = ("memory.max", "cpu.max", "memory/memory.limit_in_bytes", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")
    tree = group_tree(tmp_path, own or "", dict.fromkeys(names, text))
    if own is None:
        tree["own"].unlink()
    assert group_limits(**tree) == GroupLimits()


def test_plan_doctor_and_run_read_the_same_limits(tmp_path, monkeypatch):
    tree = group_tree(tmp_path, "0::/a\n", {"a/memory.max": "3145728", "a/cpu.max": "50000 100000"})
    monkeypatch.setattr(machine, "OWN_GROUPS", tree["own"])
    monkeypatch.setattr(machine, "GROUPS", tree["root"])
    cpu = Machine(device="cpu")
    assert machine.memory_bytes(cpu) == 3 * 2**20
    state = machine_state.read(cpu)
    found = {note.code: note.message for note in machine_state.notes_at_start(state)}
    assert found["cpu_quota"].startswith("the control group allows 0.5 of ")
    assert found["memory_limit"].startswith("the control group allows 3.0 MiB of ")
