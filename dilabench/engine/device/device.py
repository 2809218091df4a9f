"""The device of a worker: torch names, synchronisation, cache size."""

import os
from pathlib import Path

import torch

from dilabench.machine import DeviceKind


def torch_device(kind: DeviceKind, gpu: int = 0) -> torch.device:
    """The device that a worker computes on: the CPU, or one of the visible GPUs."""
    return torch.device("cpu") if kind == "cpu" else torch.device("cuda", gpu)


def synchronize(device: torch.device) -> None:
    """Wait for all work given to the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cache_bytes(device: torch.device) -> int:
    """Size of the L2 cache of a GPU; 0 for a CPU, whose timers do not flush."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0


def release_cached(device: torch.device) -> None:
    """Give memory that the allocator holds back to the device, for other processes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def describe_torch(device: torch.device) -> dict[str, str]:
    """torch, its libraries and the switches that change results or speed."""
    cudnn = torch.backends.cudnn.version() if device.type == "cuda" else None
    facts: dict[str, object] = {
        "version": torch.__version__,
        "git": (torch.version.git_version or "")[:12],
        "cuda": torch.version.cuda,
        "cudnn": cudnn,
        "threads": torch.get_num_threads(),
        "openmp_turns": os.environ.get("GOMP_SPINCOUNT"),
        "openmp_wait": os.environ.get("OMP_WAIT_POLICY"),
        "matmul_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["l2_bytes"] = cache_bytes(device)
    return {name: str(value) for name, value in facts.items() if value not in (None, "")}


def resident_bytes(field: str) -> int:
    """A memory field of this process in /proc/self/status such as 'VmData', in bytes. Raises OSError without it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
