"""A device of a worker as one object: all that the engine asks torch about it, by `device_of`; its measured peaks."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch

from dilabench.machine import CPU, CUDA, device_named
from dilabench.metadata import COPY_KEY, READ_KEY, TENSOR_CORE_DTYPE, matmul_key

# For the measurement of peak rates.
REPEATS = 5
# Longest measurement of a product. Many CPUs need seconds for one large product in float16; they get a small one.
LONGEST_S = 1.0
# Side of the large matrix divided by the side of the small one.
SMALLER = 4


class Device:
    """A device through `torch.accelerator`, which knows no kernels, streams or clocks of it; `Cpu` and `Cuda` do more.

    `where`: as torch names it. `facts`: what is known without torch. `profiler`: the name under which torch's profiler
    lists its kernels, None if the profiler shows operators only. `profiles_memory`: the profiler also counts its
    memory. `has_graphs`: calls can be captured. `has_streams`: verification calls on a side stream. `peak_method`: what
    `peak_over` reads.
    """

    profiler: str | None = None
    profiles_memory = False
    has_graphs = False
    has_streams = False
    has_tensor_cores = False
    peak_method = "torch.accelerator.max_memory_allocated over one call after a first call"

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self.facts = device_named(where.type)

    def synchronize(self) -> None:
        """Wait for all work given to the device."""
        torch.accelerator.synchronize(self.where)

    def seconds_of(self, work: Callable[[], object]) -> float:
        """Seconds that some work takes the device, waited for."""
        self.synchronize()
        started = time.perf_counter_ns()
        work()
        self.synchronize()
        return (time.perf_counter_ns() - started) * 1e-9

    def make_current(self) -> None:
        """Make it the device of this process, if there are several."""

    @property
    def l2_bytes(self) -> int:
        """Size of the L2 cache that timers flush; 0 if it is unknown or not flushed."""
        return 0

    @property
    def uuid(self) -> str | None:
        """The UUID by which NVML finds its clocks."""
        return None

    @property
    def stream(self) -> int:
        """The number of the current stream; 0 if there is only one."""
        return 0

    @property
    def is_capturing(self) -> bool:
        """Whether a graph is being captured now."""
        return False

    @property
    def verifies_on(self) -> torch.device:
        """The device of the oracle: this one, or the host for a device without float64."""
        return self.where if self.facts.holds_float64 else torch.device(CPU.name)

    def release_cached(self) -> None:
        """Give memory that the allocator holds back to the device, for other processes."""
        # Not every device has a cache.
        with suppress(RuntimeError):
            torch.accelerator.empty_cache()

    def free_bytes(self) -> int | None:
        """Free memory of the device; None if it is not taken into account."""
        return None

    def peak_over(self, work: Callable[[], object]) -> int | None:
        """Peak bytes of the allocator during `work`, minus the bytes before it; None if torch does not report them."""
        try:
            self.release_cached()
            self.synchronize()
            before = int(torch.accelerator.memory_allocated(self.where))
            torch.accelerator.reset_peak_memory_stats(self.where)
        # A device whose allocator keeps no statistics.
        except RuntimeError:
            return None
        work()
        return int(torch.accelerator.max_memory_allocated(self.where)) - before

    @contextmanager
    def high_water(self) -> Iterator[list[int]]:
        """The list receives the peak bytes of the process inside the block beyond those before; empty if unknown."""
        yield []

    @contextmanager
    def memory_limited(self, limit_bytes: int) -> Iterator[None]:
        """Limit torch's allocator to this many bytes. Raises ValueError if torch has no such limit."""
        raise ValueError(f"memory of {self.facts.name} cannot be limited to {limit_bytes} bytes: leave out the limit")
        yield

    def describe(self) -> dict[str, str]:
        """Facts about the device for the record, by name."""
        return {"accelerator": self.facts.name}


class Cpu(Device):
    """The host's processor. Calls are synchronous, and torch's profiler counts its memory."""

    profiles_memory = True
    peak_method = "all that torch's CPU allocator reported to torch's profiler over one call after a first call"

    def synchronize(self) -> None:
        """Return immediately: calls are synchronous."""

    def seconds_of(self, work: Callable[[], object]) -> float:
        """Seconds by the clock, or of the processor's time per thread, if less: other programs have the cores, too."""
        began = time.process_time_ns()
        seconds = super().seconds_of(work)
        return min(seconds, (time.process_time_ns() - began) * 1e-9 / torch.get_num_threads())

    def release_cached(self) -> None:
        """Do nothing: the allocator has no cache."""

    @contextmanager
    def high_water(self) -> Iterator[list[int]]:
        """The list gets the largest resident set inside, less that before; none outside Linux."""
        found: list[int] = []
        try:
            # Freed memory is returned first; otherwise it would be reused inside and not be counted.
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            before = resident_bytes("VmRSS")
        except (OSError, AttributeError):
            yield found
            return
        yield found
        found.append(max(0, resident_bytes("VmHWM") - before))

    def describe(self) -> dict[str, str]:
        """Empty: `environment` reads the processor's facts without torch."""
        return {}


class Cuda(Device):
    """A GPU of NVIDIA."""

    profiler = "cuda"
    has_graphs = True
    has_streams = True
    peak_method = "torch.cuda.max_memory_allocated over one call after a first call"

    def synchronize(self) -> None:
        """Wait for all work given to the device."""
        torch.cuda.synchronize(self.where)

    def make_current(self) -> None:
        """Make it the process's current device."""
        torch.cuda.set_device(self.where)

    @property
    def has_tensor_cores(self) -> bool:  # type: ignore[override]
        """Whether it multiplies in tensor cores."""
        return torch.cuda.is_bf16_supported(including_emulation=False)

    @property
    def l2_bytes(self) -> int:
        """Size of the L2 cache."""
        return int(torch.cuda.get_device_properties(self.where).L2_cache_size)

    @property
    def uuid(self) -> str:
        """Its UUID as NVML spells it."""
        return f"GPU-{torch.cuda.get_device_properties(self.where).uuid}"

    @property
    def stream(self) -> int:
        """The address of the current stream."""
        return torch.cuda.current_stream(self.where).cuda_stream

    @property
    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured now."""
        return torch.cuda.is_current_stream_capturing()

    def release_cached(self) -> None:
        """Give memory that the allocator holds back to the device, for other processes."""
        torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        """Memory that is free on the device, other processes counted."""
        return torch.cuda.mem_get_info(self.where)[0]

    def peak_over(self, work: Callable[[], object]) -> int:
        """Bytes that the caching allocator held at most during `work` beyond those before it."""
        torch.cuda.empty_cache()
        self.synchronize()
        before = torch.cuda.memory_allocated(self.where)
        torch.cuda.reset_peak_memory_stats(self.where)
        work()
        return torch.cuda.max_memory_allocated(self.where) - before

    @contextmanager
    def memory_limited(self, limit_bytes: int) -> Iterator[None]:
        """Cap torch's caching allocator; the memory of other libraries does not count."""
        total = torch.cuda.get_device_properties(self.where).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), self.where)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self.where)

    def describe(self) -> dict[str, str]:
        """The GPU's name, its L2, and the version of cuDNN."""
        facts = {"gpu": torch.cuda.get_device_name(self.where), "l2_bytes": str(self.l2_bytes)}
        cudnn = torch.backends.cudnn.version()
        return facts if cudnn is None else {**facts, "cudnn": str(cudnn)}


# By torch's name; any other is a `Device`.
KINDS: dict[str, type[Device]] = {CPU.name: Cpu, CUDA.name: Cuda}


@cache
def device_of(where: torch.device) -> Device:
    """The device that tensors with this `.device` live on."""
    return KINDS.get(where.type, Device)(where)


def torch_device(kind: str, index: int = 0) -> torch.device:
    """The device that a worker computes on: the CPU, or one of the visible GPUs or accelerators."""
    return torch.device(CPU.name) if kind == CPU.name else torch.device(kind, index)


def describe_torch(device: Device) -> dict[str, str]:
    """torch, its libraries, the switches that change results or speed, and the device."""
    facts: dict[str, object] = {
        "version": torch.__version__,
        "git": (torch.version.git_version or "")[:12],
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "openmp_turns": os.environ.get("GOMP_SPINCOUNT"),
        "openmp_wait": os.environ.get("OMP_WAIT_POLICY"),
        "matmul_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        **device.describe(),
    }
    return {name: str(value) for name, value in facts.items() if value not in (None, "")}


def resident_bytes(field: str) -> int:
    """A memory field of this process in /proc/self/status such as 'VmData', in bytes. Raises OSError without it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def measure_ceilings(device: torch.device, dtypes: Sequence[str]) -> dict[str, float]:
    """FLOP/s of a square matrix product in each dtype, bytes/s of a copy (read and written bytes count) and
    of a sum, which only reads.

    In float32 also the rate of tensor cores, if any, which bounds it too (`metadata.peak_flops`). Without tensor cores
    half precision may be multiplied in float32, so its rate is the larger of the two.
    """
    hardware = device_of(device)

    def product_seconds(dtype: str, size: int) -> float:
        left = torch.randn(size, size, device=device).to(getattr(torch, dtype))
        out = torch.empty_like(left)
        return _best_seconds(lambda: torch.matmul(left, left, out=out), hardware)

    def product_flops(dtype: str) -> float:
        large = hardware.facts.wide_matmul_size if dtype in {"float64", "float32"} else hardware.facts.matmul_size
        size = large // SMALLER
        seconds = product_seconds(dtype, size)
        if REPEATS * SMALLER**3 * seconds < LONGEST_S:
            size, seconds = large, product_seconds(dtype, large)
        return 2.0 * size**3 / seconds

    more = {TENSOR_CORE_DTYPE} if "float32" in dtypes and hardware.has_tensor_cores else set()
    ceilings = {matmul_key(dtype): product_flops(dtype) for dtype in sorted({*dtypes, *more})}
    halves = {"float16", "bfloat16"}.intersection(dtypes)
    if halves and not hardware.has_tensor_cores:
        wide = ceilings.get(matmul_key("float32")) or product_flops("float32")
        ceilings |= {key: max(wide, ceilings[key]) for key in map(matmul_key, halves)}
    source = torch.ones(hardware.facts.copy_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    ceilings[COPY_KEY] = 2.0 * source.nbytes / _best_seconds(lambda: target.copy_(source), hardware)
    ceilings[READ_KEY] = source.nbytes / _best_seconds(source.sum, hardware)
    return ceilings


def _best_seconds(work: Callable[[], object], device: Device) -> float:
    work()
    return max(1e-9, min(device.seconds_of(work) for _ in range(REPEATS)))
