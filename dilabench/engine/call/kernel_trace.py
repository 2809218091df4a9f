"""Which kernels really ran: one call under torch's profiler (torch)."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler import profile

from dilabench.engine.device.device import device_of
from dilabench.record import KernelUse

MAX_KERNELS = 100
MEMORY_EVENT = "[memory]"


def profiled(call: Callable[[], object], device: torch.device, *, memory: bool = False) -> profile:
    """One call under the profiler; with `memory`, also the allocations of torch's allocators."""
    # torch.profiler.profile wraps this one and costs a second of imports.
    hardware = device_of(device)
    with profile(use_device=hardware.profiler, use_kineto=True, profile_memory=memory) as profiler:
        call()
        hardware.synchronize()
    return profiler


def kernel_ledger(profiler: profile, device: torch.device, trace: Path | None = None) -> tuple[KernelUse, ...]:
    """The kernels of a profiled call, longest first: CUDA kernels on a GPU, operators with their own time elsewhere.

    Only the longest 100 kernels are kept. With `trace`, a Chrome trace of the call is written there; raises OSError or
    RuntimeError if that fails.
    """
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
    uses: dict[str, tuple[int, int]] = {}
    for name, duration_ns in _entries(profiler, device):
        count, total = uses.get(name, (0, 0))
        uses[name] = (count + 1, total + duration_ns)
    ledger = [KernelUse(name=name, count=count, duration_ns=total) for name, (count, total) in uses.items()]
    return tuple(sorted(ledger, key=lambda use: -use.duration_ns)[:MAX_KERNELS])


def _entries(profiler: profile, device: torch.device) -> list[tuple[str, int]]:
    events = [event for event in profiler.function_events or [] if event.name != MEMORY_EVENT]
    if device_of(device).profiler:
        cuda = DeviceType.CUDA
        return [
            (event.name, round(event.time_range.elapsed_us() * 1000)) for event in events if event.device_type == cuda
        ]
    return [(event.name, round(event.self_cpu_time_total * 1000)) for event in events]
