"""What a machine means for a run: device, dtype, and why CUDA is not used."""

import sys
from pathlib import Path

import pytest

from dilabench import machine
from dilabench.errors import EnvironmentNotReady
from dilabench.machine import Machine, cxx_compiler, detect
from dilabench.record import GpuInfo


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
    assert detect("cpu") == Machine(device="cpu", gpus=(gpu("9.0"),), no_cuda="device cpu was asked for")


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
