"""A ceiling on what a worker may allocate, so that a search for the longest sequence ends in an error, not a kill."""

import contextlib
import resource
from collections.abc import Iterator

import torch

from dilabench.engine.device.device import resident_bytes


@contextlib.contextmanager
def memory_limited(device: torch.device, limit_bytes: int | None) -> Iterator[None]:
    """Let this process allocate at most so many bytes more on the device; beyond that an allocation raises.

    CUDA: a cap on torch's caching allocator; other libraries' memory does not count. CPU: RLIMIT_DATA above what the
    process has mapped now, with every thread's stack and heap. None sets no limit.
    """
    if limit_bytes is None:
        yield
    elif device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
    else:
        yield from _data_limited(limit_bytes)


def _data_limited(limit_bytes: int) -> Iterator[None]:
    # The threads of both passes take their stacks and buffers now, not out of the limit.
    torch.ones(2**20, requires_grad=True).mul(2).sum().backward()
    before = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = resident_bytes("VmData") + limit_bytes
    ceiling = wanted if before[1] == resource.RLIM_INFINITY else min(wanted, before[1])
    resource.setrlimit(resource.RLIMIT_DATA, (ceiling, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
