"""A bounded pool of workspace buffers, for the `buffer_pool_bytes` optimization."""

import threading
from math import prod

import torch
from torch import Tensor

from dilabench.engine.device.device import device_of
from dilabench.metadata import (
    BUFFER_POOL_HELD_BYTES,
    BUFFER_POOL_PEAK_BYTES,
    BUFFER_POOL_REQUESTS,
    BUFFER_POOL_REUSED_BYTES,
    BUFFER_POOL_REUSES,
)

# The stream that work is given to belongs to a buffer: on another one, its last use may not be over.
Place = tuple[torch.device, int]

LARGEST_WASTE = 4


class SizedBufferPool:
    """Keeps up to `max_bytes` of buffers that were given back; `take` reuses the smallest one that is large enough.

    Buffers are raw bytes in sizes rounded up to a power of two, so that shapes which differ a little share them. A
    buffer in use is identified by its tensor, so giving it back twice, or another tensor, has no effect. While a CUDA
    graph is captured, every buffer is new and from the graph's own memory, which the graph keeps using.

    Safe to use from several threads: one lock, under which no code runs that could call the pool.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._free: dict[Place, list[Tensor]] = {}
        self._used: dict[int, tuple[Tensor, Tensor, Place]] = {}
        self._held_bytes = 0
        self._used_bytes = 0
        self._requests = 0
        self._reuses = 0
        self._reused_bytes = 0
        self._peak_bytes = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor that is not in use; give it back with `give`."""
        nbytes = prod(shape) * dtype.itemsize
        hardware = device_of(device)
        if hardware.is_capturing:
            with self._lock:
                self._requests += 1
            return torch.empty(shape, dtype=dtype, device=device)
        place = device, hardware.stream
        with self._lock:
            self._requests += 1
            raw = self._pop_fitting(place, nbytes)
            if raw is not None:
                self._reuses += 1
                self._reused_bytes += nbytes
        if raw is None:
            raw = torch.empty(1 << max(0, nbytes - 1).bit_length(), dtype=torch.uint8, device=device)
        buffer = raw[:nbytes].view(dtype).view(shape)
        with self._lock:
            # A reference here keeps the tensor's id unique while it is in use.
            self._used[id(buffer)] = (buffer, raw, place)
            self._used_bytes += raw.nbytes
            self._peak_bytes = max(self._peak_bytes, self._held_bytes + self._used_bytes)
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back, the very tensor that `take` gave; it is dropped when the pool is full."""
        with self._lock:
            used = self._used.pop(id(buffer), None)
            if used is None:
                return
            _, raw, place = used
            self._used_bytes -= raw.nbytes
            if self._held_bytes + raw.nbytes <= self.max_bytes:
                self._free.setdefault(place, []).append(raw)
                self._held_bytes += raw.nbytes

    def clear(self) -> None:
        """Forget every buffer, as after a reset of the device; those in use are not taken back any more."""
        with self._lock:
            self._free.clear()
            self._used.clear()
            self._held_bytes = self._used_bytes = 0

    def counters(self) -> dict[str, int]:
        """Requests, reuses, and bytes: reused, peak (in use and free) and held now (free)."""
        with self._lock:
            return {
                BUFFER_POOL_REQUESTS.key: self._requests,
                BUFFER_POOL_REUSES.key: self._reuses,
                BUFFER_POOL_REUSED_BYTES.key: self._reused_bytes,
                BUFFER_POOL_PEAK_BYTES.key: self._peak_bytes,
                BUFFER_POOL_HELD_BYTES.key: self._held_bytes,
            }

    @property
    def held_bytes(self) -> int:
        """Bytes that the pool keeps between calls."""
        return self._held_bytes

    def _pop_fitting(self, place: Place, nbytes: int) -> Tensor | None:
        """The smallest free buffer that is large enough; one far larger is left to a request of its size."""
        free = self._free.get(place, [])
        fitting = [i for i, raw in enumerate(free) if nbytes <= raw.nbytes <= LARGEST_WASTE * max(1, nbytes)]
        if not fitting:
            return None
        raw = free.pop(min(fitting, key=lambda i: free[i].nbytes))
        self._held_bytes -= raw.nbytes
        return raw
