"""A CUDA stream as a `ring_buffers.Queue`: copies by the copy engines, waits and counts by the front end.

Nothing in it runs on a multiprocessor, so a transfer neither takes one from an attention kernel nor waits for one to be
free. NCCL's kernels do both, and so does a copy within a device, which the driver leaves to the multiprocessors. torch
has no call for a stream that waits for a value in memory, so the three functions of the CUDA driver API (section
"Stream Memory Operations" of its manual) are called by name.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

_WAIT_UNTIL_AT_LEAST = 0
_LARGEST = 0xFFFFFFFF


class StreamQueue:
    """Queues work onto a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._handle = ctypes.c_void_p(stream.cuda_stream)
        self._driver = _driver()

    def wait(self, counter: int, count: int) -> None:
        """Go on when the counter has reached the count; counts may pass 2^32, for they are compared cyclically."""
        address, value = ctypes.c_uint64(counter), ctypes.c_uint32(count & _LARGEST)
        _check(self._driver.cuStreamWaitValue32_v2(self._handle, address, value, _WAIT_UNTIL_AT_LEAST))

    def set(self, counter: int, count: int) -> None:
        """Write the count; the driver orders it after all writes before it, for all devices."""
        address, value = ctypes.c_uint64(counter), ctypes.c_uint32(count & _LARGEST)
        _check(self._driver.cuStreamWriteValue32_v2(self._handle, address, value, 0))

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy bytes from or to a device that this one can reach."""
        sizes = ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(nbytes)
        _check(self._driver.cuMemcpyAsync(*sizes, self._handle))


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"the CUDA driver cannot be called: {error}") from error


def _check(status: int) -> None:
    if status:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(name))
        raise RuntimeError(f"the CUDA driver refused a transfer: {(name.value or b'').decode()} ({status})")
