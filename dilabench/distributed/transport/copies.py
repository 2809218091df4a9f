"""Messages between the GPUs of one host by their copy engines, over memory that torch maps into every rank.

The sender copies its bytes into a ring buffer on the current stream, in one pass; the rest runs on other streams:
readers copy the bytes over the links directly to their destination.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dilabench.distributed.transport.messages import Message, Plan, TensorsOf, receive, send
from dilabench.distributed.transport.ring_buffers import (
    ALIGNMENT,
    COUNTER_STEP,
    LARGEST_COUNT,
    RingBuffers,
    Rows,
)
from dilabench.distributed.transport.slots import SLOTS, Slots
from dilabench.errors import first_line
from dilabench.kernels.streams import current_stream

_WAIT_UNTIL_AT_LEAST = 0


class StreamQueue:
    """A CUDA stream as a `ring_buffers.Queue`: copies by the copy engines, waits and counts by the front end.

    Nothing in it runs on a multiprocessor, so a transfer neither takes one from an attention kernel nor waits for one
    to be free. NCCL's kernels do both, and so does a copy within a device, which the driver leaves to the
    multiprocessors. torch has no call for a stream that waits for a value in memory, so functions of the CUDA driver
    API (sections "Stream Memory Operations" and "Memory Management" of its manual) are called by name.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._handle = stream.cuda_stream
        driver = _driver()
        self._wait, self._write = driver.cuStreamWaitValue32_v2, driver.cuStreamWriteValue32_v2
        self._copy, self._copy_rows = driver.cuMemcpyAsync, driver.cuMemcpy2DAsync_v2
        self._plane = _Plane(source_type=_UNIFIED, target_type=_UNIFIED)

    def wait(self, counter: int, count: int) -> None:
        """Wait until the counter has reached the count; counts may exceed 2^32, as they are compared cyclically."""
        if status := self._wait(self._handle, counter, count & LARGEST_COUNT, _WAIT_UNTIL_AT_LEAST):
            _refuse(status)

    def set(self, counter: int, count: int) -> None:
        """Write the count; the driver orders it after all writes before it, for all devices."""
        if status := self._write(self._handle, counter, count & LARGEST_COUNT, 0):
            _refuse(status)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy bytes from or to a device that this one can reach."""
        if status := self._copy(target, source, nbytes, self._handle):
            _refuse(status)

    def copy_rows(self, target: Rows, source: Rows, width: int, count: int) -> None:
        """Copy rows from or to such a device, by one call unless the driver allows no rows so far from each other."""
        if max(target[1], source[1]) > _LARGEST_PITCH:
            for row in range(count):
                self.copy(target[0] + row * target[1], source[0] + row * source[1], width)
            return
        plane = self._plane
        plane.source, plane.source_pitch = source
        plane.target, plane.target_pitch = target
        plane.width, plane.count = width, count
        if status := self._copy_rows(ctypes.byref(plane), self._handle):
            _refuse(status)


class _Plane(ctypes.Structure):
    """The driver's CUDA_MEMCPY2D."""

    _fields_ = (
        ("source_x", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("source_type", ctypes.c_int),
        ("source_host", ctypes.c_void_p),
        ("source", ctypes.c_uint64),
        ("source_array", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("target_x", ctypes.c_size_t),
        ("target_y", ctypes.c_size_t),
        ("target_type", ctypes.c_int),
        ("target_host", ctypes.c_void_p),
        ("target", ctypes.c_uint64),
        ("target_array", ctypes.c_void_p),
        ("target_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("count", ctypes.c_size_t),
    )


# Of the CUDA driver API: the memory type of any address, and the bound of every device's CU_DEVICE_ATTRIBUTE_MAX_PITCH.
_UNIFIED, _LARGEST_PITCH = 4, 2**31 - 1

# Arguments of the driver's functions: a stream's handle, addresses, and values of 32 bits or sizes.
_STREAM, _ADDRESS, _VALUE = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32
_ARGUMENTS = {
    "cuStreamWaitValue32_v2": (_STREAM, _ADDRESS, _VALUE, ctypes.c_uint),
    "cuStreamWriteValue32_v2": (_STREAM, _ADDRESS, _VALUE, ctypes.c_uint),
    "cuMemcpyAsync": (_ADDRESS, _ADDRESS, ctypes.c_size_t, _STREAM),
    "cuMemcpy2DAsync_v2": (ctypes.c_void_p, _STREAM),
}


@cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"the CUDA driver cannot be called: {error}") from error
    for name, arguments in _ARGUMENTS.items():
        getattr(driver, name).argtypes = arguments
    return driver


def let_others_capture() -> None:
    """From now on calls of this thread end no capture of a CUDA graph by another one."""
    _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))


def _refuse(status: int) -> None:
    name = ctypes.c_char_p()
    _driver().cuGetErrorName(status, ctypes.byref(name))
    raise RuntimeError(f"the CUDA driver refused a transfer: {(name.value or b'').decode()} ({status})")


# Share of the device's memory for ring buffers: 2.2 GiB of an H200. A longer message goes in several chunks, and
# its sender waits for the first of them to be taken.
_MEMORY_SHARE = 64
# Share of each reader's region for messages in CUDA graphs.
_CAPTURED_SHARE = 4
# Interval at which the deadlines of transfers are checked.
_WATCH_S = 0.5
_TRIAL_NUMBERS = 1 << 20
# Kept for tensors of different shapes and strides.
_MOST_PLANS = 256
# Of the CUDA driver API's CUstreamCaptureMode: calls of this thread do not end a capture of another one.
_RELAXED = 2


class CopyWork:
    """A transfer to this rank, with `wait` like torch.distributed's `Work`.

    ended: in a graph, the count of exchanges that were waited for.
    """

    def __init__(
        self, copies: Copies, device: torch.device, event: torch.cuda.Event, ended: Tensor | None = None
    ) -> None:
        self._copies, self._device, self._event, self._ended = copies, device, event, ended

    def wait(self) -> None:
        """Make the current stream wait for it. Raises RuntimeError after a peer was too slow."""
        if self._copies.trouble:
            self._copies.check()
        current_stream(self._device).wait_event(self._event)
        if self._ended is not None:
            self._ended.add_(1)
            self._ended = None


class _Transfer(NamedTuple):
    """A queued transfer and its deadline."""

    deadline: float
    timeout_s: float
    done: torch.cuda.Event


class Copies:
    """This rank's transfers. All ranks construct it together.

    A stream that waits for a peer cannot be interrupted, so a thread watches the deadlines. After a missed one, or if
    the device fails, the thread sets this rank's counters beyond every count, which ends all waits. From then on each
    use raises RuntimeError, and no result may be read, because the device continued without the messages. A
    replay of a CUDA graph makes no call that could raise: if its messages are late, the process ends, as by NCCL's
    watchdog.
    region: bytes of this rank's memory for each reader, the same on all ranks.
    Raises RuntimeError if the devices cannot map each other's memory.
    """

    def __init__(
        self, rank: int, device: torch.device, group: dist.ProcessGroup, region: int, timeout_s: float
    ) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self.timeout_s = timeout_s
        self._rank, self._size, self._device = rank, group.size(), device
        slot = region // _CAPTURED_SHARE // SLOTS // ALIGNMENT * ALIGNMENT
        region -= SLOTS * slot
        first = RingBuffers.memory_bytes(self._size, region)
        nbytes = first + Slots.memory_bytes(self._size, slot)
        self._memory = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        self._memory.zero_()
        torch.cuda.synchronize(device)
        # Stored, because the mapping ends with it.
        self._handle = symmetric.rendezvous(self._memory, group)
        self._inward, self._rescue = (StreamQueue(torch.cuda.Stream(device, priority=-1)) for _ in range(2))
        self._queues: dict[int, StreamQueue] = {}
        self._buffers = RingBuffers(rank, self._handle.buffer_ptrs, region)
        # By exchange, because each begins with the first slots.
        self._slots = partial(Slots, rank, [address + first for address in self._handle.buffer_ptrs], slot)
        self._captured_memory = self._memory[first:]
        # Exchanges in graphs: how many have begun on the device, and how many were waited for; and as seen last.
        self._exchanges = torch.zeros(2, dtype=torch.int64, device=device)
        self._seen = torch.zeros(2, dtype=torch.int64, pin_memory=True, device="cpu")
        self._captures, self._since = False, 0.0
        self._slots().begin(self._inward)
        self._read = torch.empty(self._buffers.counters_bytes, dtype=torch.uint8, pin_memory=True, device="cpu")
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._under_way: deque[_Transfer] = deque()
        self._trouble = ""
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="dilabench transfers")
        self._watcher.start()

    @staticmethod
    def most_bytes(device: torch.device, size: int) -> int:
        """The longest region that fits into this device's memory, in whole mebibytes."""
        share = torch.cuda.get_device_properties(device).total_memory // _MEMORY_SHARE // (size - 1)
        return max(1, share >> 20) << 20

    def plan(self, sends: TensorsOf, receives: TensorsOf) -> tuple[Plan, list[Tensor]]:
        """Messages of tensors to ranks, and into tensors from ranks, which are rows at equal distances in memory; and
        all tensors in the order in which messages number them. Made once for tensors of these shapes and strides.
        """
        tensors = [x for several in (*sends.values(), *receives.values()) for x in several]
        numbers = [(peer, len(tensors_of)) for peers in (sends, receives) for peer, tensors_of in peers.items()]
        key = (len(sends), *numbers, *[(x.shape, x.stride(), x.dtype) for x in tensors])
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = Plan.of_tensors(sends, receives)
        return plan, tensors

    def exchange(
        self, sends: Mapping[int, Message], receives: Mapping[int, Message], tensors: Sequence[Tensor]
    ) -> CopyWork:
        """Send messages to ranks and receive messages from ranks, after the work in the current stream; `tensors` are
        those that messages number.

        Later work on the current stream may overwrite the sent tensors. While a CUDA graph is captured, the messages
        become part of it. A copy on another stream would not be sooner: within a device it takes multiprocessors, which
        an attention kernel that began meanwhile does not give up.
        """
        self.check()
        current = current_stream(self._device)
        queue = self._queues.get(current.stream_id)
        if queue is None:
            queue = self._queues[current.stream_id] = StreamQueue(current)
        captured = torch.cuda.is_current_stream_capturing()
        messages, memory = (self._slots(), self._captured_memory) if captured else (self._buffers, self._memory)
        if captured:
            self._captures = True
            self._exchanges[:1].add_(1)
        # Earlier work in the stream may still use the memory of the received tensors.
        self._inward.stream.wait_event(queue.stream.record_event())
        waits = False
        for peer in self._by_distance(sends, 1) if len(sends) > 1 else sends:
            waits |= send(messages, memory, queue, peer, sends[peer], tensors)
        for peer in self._by_distance(receives, -1) if len(receives) > 1 else receives:
            receive(messages, self._inward, peer, receives[peer], tensors)
        arrived = self._inward.stream.record_event()
        if captured:
            return CopyWork(self, self._device, arrived, self._exchanges[1:])
        # Sends that wait for no rank need no deadline.
        events = (queue.stream.record_event(), arrived) if waits else (arrived,)
        deadline = time.monotonic() + self.timeout_s
        self._under_way.extend(_Transfer(deadline, self.timeout_s, event) for event in events)
        return CopyWork(self, self._device, arrived)

    def _by_distance(self, peers: Collection[int], direction: int) -> Iterable[int]:
        """Peers in the order in which they follow this rank, or precede it (-1)."""
        return sorted(peers, key=lambda peer: direction * (peer - self._rank) % self._size)

    def try_out(self) -> None:
        """Exchange known values with every rank. Raises RuntimeError when they do not arrive as they were sent."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        sent = torch.full((_TRIAL_NUMBERS,), self._rank, device=self._device, dtype=torch.int64)
        received = {rank: torch.full_like(sent, -1) for rank in others}
        plan, tensors = self.plan({rank: [sent] for rank in others}, {rank: [x] for rank, x in received.items()})
        self.exchange(plan.sends, plan.receives, tensors).wait()
        torch.cuda.synchronize(self._device)
        self.check()
        wrong = [rank for rank, numbers in received.items() if not bool((numbers == rank).all())]
        if wrong:
            raise RuntimeError(f"copies from ranks {wrong} arrived changed")

    def check(self) -> None:
        """Raise RuntimeError after a transfer was too late or could not be watched: later results are wrong."""
        if not (self._trouble or self._closed.is_set() or self._watcher.is_alive()):
            self._trouble = f"rank {self._rank}: the thread that watches its transfers has ended"
        if self._trouble:
            raise RuntimeError(self._trouble)

    @property
    def trouble(self) -> str:
        """Why no result may be used; empty if nothing is known against it."""
        return self._trouble

    def end_waits(self, reason: str) -> None:
        """Let the device go on without the messages that it waits for. From now on `check` raises the reason."""
        self._trouble = self._trouble or reason

    def confirm_counts(self) -> None:
        """Compare the counters on this device with the counts that were queued, once every rank's device is done.

        Raises RuntimeError when they differ: a transfer was made twice, not at all, or by a replayed graph.
        """
        self.check()
        unsettled = self._buffers.unsettled(self._counters())
        if unsettled:
            self._trouble = f"rank {self._rank}: messages were miscounted: {', '.join(unsettled)}"
        self.check()

    def close(self) -> None:
        """Stop the thread that watches deadlines."""
        self._closed.set()
        self._watcher.join(timeout=10 * _WATCH_S)

    def _counters(self) -> list[int]:
        """This rank's counters as they are on the device now, read without a kernel: the device may be stuck."""
        self._rescue.copy(self._read.data_ptr(), self._memory.data_ptr(), self._read.nbytes)
        self._rescue.stream.synchronize()
        counters: list[int] = self._read.view(torch.int32)[:: COUNTER_STEP // 4].tolist()
        return counters

    def _watch(self) -> None:
        let_others_capture()
        while not self._closed.wait(_WATCH_S):
            try:
                torch.cuda.set_device(self._device)
                trouble = self._late()
                stuck = self._stuck()
            # After any device error here, the queued transfers may be incomplete.
            except RuntimeError as error:
                trouble, stuck = f"rank {self._rank}: its transfers cannot be watched: {first_line(error)}", ""
            if stuck:
                _end_process(stuck)
            self._trouble = self._trouble or trouble
            if self._trouble:
                # Repeated each time, because a late peer lowers a counter.
                self._buffers.release(self._rescue)

    def _late(self) -> str:
        """Name the missing messages if a transfer is past its deadline; else empty."""
        while self._under_way and self._under_way[0].done.query():
            self._under_way.popleft()
        if not self._under_way or time.monotonic() <= self._under_way[0].deadline or self._trouble:
            return ""
        missing = ", ".join(self._buffers.unsettled(self._counters())) or "the device did not come to them"
        return f"rank {self._rank}: messages did not come within {self._under_way[0].timeout_s:g} s: {missing}"

    def _stuck(self) -> str:
        """Name a replay whose messages are past their deadline; else empty."""
        if not self._captures:
            return ""
        begun, ended = before = self._seen.tolist()
        self._rescue.copy(self._seen.data_ptr(), self._exchanges.data_ptr(), self._seen.nbytes)
        self._rescue.stream.synchronize()
        if begun == ended or self._seen.tolist() != before:
            self._since = time.monotonic()
        if time.monotonic() - self._since <= self.timeout_s:
            return ""
        return f"rank {self._rank}: messages of a replayed CUDA graph did not come within {self.timeout_s:g} s"


def _end_process(message: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"{message}\n")
        sys.stderr.flush()
    os.abort()
