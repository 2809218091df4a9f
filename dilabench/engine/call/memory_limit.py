"""A ceiling on what a worker may allocate, so that a search for the longest sequence ends in an error, not a kill."""

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Iterator

import torch

from dilabench.engine.call.kernel_trace import profiled
from dilabench.engine.device.device import device_of, resident_bytes
from dilabench.errors import said, text_of

# What Python, and what C++ and the system say where a thread or a process gets no memory for its stack.
NO_THREAD = ("can't start new thread", os.strerror(errno.EAGAIN))


@contextlib.contextmanager
def memory_limited(device: torch.device, limit_bytes: int | None, *, backward: bool = True) -> Iterator[None]:
    """Let this process allocate at most so many bytes more on the device; beyond that an allocation raises.

    CUDA: a cap on torch's caching allocator; other libraries' memory does not count. CPU: RLIMIT_DATA above what the
    process has mapped now, with every thread's stack and heap; a thread that finds too little left raises MemoryError.
    Raises ValueError on any other device. None sets no limit. `backward`: what is called inside has a backward pass.
    """
    if limit_bytes is None:
        yield
    elif (hardware := device_of(device)).facts.own_memory:
        with hardware.memory_limited(limit_bytes):
            yield
    else:
        yield from _data_limited(limit_bytes, backward)


def _data_limited(limit_bytes: int, backward: bool) -> Iterator[None]:
    # The threads of torch and of its profiler, and the modules that it imports at a first backward pass, take their
    # memory now, not out of the limit: tens of MiB.
    profiled(lambda: _use_torch(backward), torch.device("cpu"), memory=True)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = resident_bytes("VmData") + limit_bytes
    ceiling = wanted if before[1] == resource.RLIM_INFINITY else min(wanted, before[1])
    resource.setrlimit(resource.RLIMIT_DATA, (ceiling, before[1]))
    try:
        yield
    except (OSError, RuntimeError) as error:
        resource.setrlimit(resource.RLIMIT_DATA, before)
        if any(phrase in text_of(error) for phrase in NO_THREAD) and _thread_starts():
            raise MemoryError(f"none is left for a thread ({said(error)})") from error
        raise
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _use_torch(backward: bool) -> None:
    leaf = torch.ones(2**20, requires_grad=backward)
    result = leaf.mul(2)
    if backward:
        torch.autograd.grad(result, leaf, torch.ones_like(result))


def _thread_starts() -> bool:
    """Whether it was the limit that a thread did not start, not a want of threads or processes."""
    try:
        thread = threading.Thread(target=int)
        thread.start()
    except RuntimeError:
        return False
    thread.join()
    return True
