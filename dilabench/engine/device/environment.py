"""The environment of a run: processor, GPUs, packages, git, and the fingerprint for comparisons. No torch."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import psutil

from dilabench.machine import Machine, cpuinfo, torch_cuda_version
from dilabench.record import CpuInfo, Environment, GitInfo

PACKAGES = (
    "dilabench",
    "torch",
    "triton",
    "numpy",
    "pydantic",
    "flash-attn",
    "flash-attn-4",
    "xformers",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
GIT_TIMEOUT_S = 5.0
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))


def snapshot(machine: Machine, folder: Path | None = None) -> Environment:
    """The environment as it is now; `folder` (the working one by default) says which git repository counts."""
    torch_facts = {"version": _version("torch"), "cuda": torch_cuda_version()}
    environment = Environment(
        os=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        cpu=_cpu(),
        gpus=machine.gpus,
        packages={name: version for name in PACKAGES if (version := _version(name))},
        torch={name: value for name, value in torch_facts.items() if value},
        git=_git(folder or Path.cwd()),
        container=any(mark.exists() for mark in CONTAINER_MARKS) or "container" in os.environ,
    )
    return _fingerprinted(environment, machine)


def with_torch(environment: Environment, machine: Machine, torch_facts: Mapping[str, str]) -> Environment:
    """The environment with what a worker says of its torch, and the fingerprint that follows."""
    completed = environment.model_copy(update={"torch": {**environment.torch, **torch_facts}})
    return _fingerprinted(completed, machine)


def _fingerprinted(environment: Environment, machine: Machine) -> Environment:
    """Hard fields make times of two records incomparable, soft ones may explain a change (measurement.md §5.3)."""
    facts = environment.torch
    cpu: dict[str, object] = {
        "cpu": environment.cpu.model,
        "cores": environment.cpu.cores,
        "threads": facts.get("threads"),
    }
    soft: dict[str, object] = {
        "os": environment.os,
        "python": environment.python,
        "torch": facts.get("version"),
        "triton": environment.packages.get("triton"),
        "cudnn": facts.get("cudnn"),
        "openmp_turns": facts.get("openmp_turns"),
        "openmp_wait": facts.get("openmp_wait"),
        "governor": environment.cpu.governor,
        "container": environment.container,
    }
    hard: dict[str, object] = {
        "device": machine.device,
        "matmul_tf32": facts.get("matmul_tf32"),
        "deterministic": facts.get("deterministic"),
    }
    if machine.used_gpus and environment.gpus:
        gpu = environment.gpus[0]
        hard |= {
            "gpu": gpu.name,
            "compute_capability": gpu.compute_capability,
            "gpu_memory_bytes": gpu.memory_bytes,
            "power_limit_mw": gpu.power_limit_mw,
            "driver": gpu.driver,
            "cuda": facts.get("cuda"),
            "mig": gpu.mig,
        }
        soft |= {**cpu, "gpu_uuid_hash": gpu.uuid_hash}
    else:
        hard |= cpu
    return environment.model_copy(update={"fingerprint_hard": _texts(hard), "fingerprint_soft": _texts(soft)})


def _texts(fields: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in fields.items() if value is not None}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> CpuInfo:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return CpuInfo(
        model=_cpu_model(),
        cores=min(psutil.cpu_count(logical=False) or usable, usable),
        threads=usable,
        governor=GOVERNOR.read_text().strip() if GOVERNOR.exists() else None,
        load_1m=round(psutil.getloadavg()[0], 2),
        memory_bytes=psutil.virtual_memory().total,
    )


def _cpu_model() -> str:
    lines = cpuinfo().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    return names[0] if names else platform.processor() or platform.machine()


def _git(folder: Path) -> GitInfo | None:
    sha = _git_output(folder, "rev-parse", "HEAD")
    if not sha:
        return None
    # The repository may be a stranger's, and its configuration names programs that `git status` would run.
    filters = _git_output(folder, "config", "--local", "--includes", "--name-only", "--get-regexp", r"^filter\.") or ""
    programs = ["core.fsmonitor", *filters.splitlines()]
    without = {"GIT_CONFIG_COUNT": str(len(programs))}
    for index, name in enumerate(programs):
        without |= {f"GIT_CONFIG_KEY_{index}": name, f"GIT_CONFIG_VALUE_{index}": ""}
    status = _git_output(folder, "status", "--porcelain", "--untracked-files=no", variables=without)
    # An unknown status counts as dirty.
    return GitInfo(sha=sha, dirty=status != "")


def _git_output(folder: Path, *arguments: str, variables: Mapping[str, str] = MappingProxyType({})) -> str | None:
    try:
        finished = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            # Nothing is written or fetched.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", **variables},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return finished.stdout.strip()
