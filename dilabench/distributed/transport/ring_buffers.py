"""Messages through memory that all ranks can reach: no chunk is overwritten before it was read, no processor polls.

Every rank owns some memory: a ring buffer for each reader, and two counters for each other rank. A
sender waits until the old chunk there has been taken, writes the new one and increments `posted` at the reader; the
reader waits for that count, copies the chunk to its destination and increments `taken` at the sender. All of this is
queued on the device in advance, without further host work. Both sides know the lengths of all messages, so both know
the address of each chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

# A cache line for each counter: ranks that count at the same time write different lines.
COUNTER_STEP = 64
# Alignment of chunks, enough for every dtype.
ALIGNMENT = 512
# Counts are compared cyclically: half of what 32 bits hold is ahead of all that occur.
_RELEASED = 0x7FFFFFFF
LARGEST_COUNT = 0xFFFFFFFF


Rows = tuple[int, int]
"""The address of the first of equal rows, and the bytes from each to the next."""


class Queue(Protocol):
    """Work that is executed in the order in which it was queued. Addresses are this process's."""

    def wait(self, counter: int, count: int) -> None:
        """Wait until the 32-bit counter at this address has reached the count."""

    def set(self, counter: int, count: int) -> None:
        """Write the count, after everything before it has been written."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy bytes."""

    def copy_rows(self, target: Rows, source: Rows, width: int, count: int) -> None:
        """Copy `count` rows of `width` bytes."""


@dataclass(slots=True)
class _Channel:
    """A channel from one rank to another: chunks and bytes sent so far (with unused ends), chunks not yet taken.

    memory: where its region begins: at the sender the place in its memory, at the reader an address. posted, taken:
    addresses of its two counters.
    """

    memory: int
    posted: int
    taken: int
    count: int = 0
    position: int = 0
    untaken: deque[tuple[int, int]] = field(default_factory=deque)


class RingBuffers:
    """One rank's messages to and from the ring buffers of all ranks.

    addresses: where each rank's memory of `memory_bytes` is mapped in this process; its counters are zero at first.
    Messages between two ranks must be sent and received in the same order. If each exchange orders its peers by their
    distance, no deadlock is possible: the first unfinished transfer in that order can always continue.
    """

    def __init__(self, rank: int, addresses: Sequence[int], region: int) -> None:
        self._rank, self._addresses, self._region, self._size = rank, addresses, region, len(addresses)
        # Bytes: half a region, so that one is written while another is read.
        self.longest_chunk = region // 2
        peers = range(len(addresses))
        self._out = [
            _Channel(self._region_of(rank, peer), self._posted(peer, rank), self._taken(rank, peer)) for peer in peers
        ]
        self._in = [
            _Channel(addresses[peer] + self._region_of(peer, rank), self._posted(rank, peer), self._taken(peer, rank))
            for peer in peers
        ]

    @staticmethod
    def memory_bytes(size: int, region: int) -> int:
        """Bytes of one rank's memory among `size` ranks, with `region` bytes for each reader."""
        return _counters_bytes(size) + (size - 1) * region

    def send(self, queue: Queue, peer: int, nbytes: int, write_chunk: Callable[[int, int, int], None]) -> bool:
        """Queue a message to a rank; return True if the queue may have to wait for that rank.

        write_chunk: queues the copy of a chunk, given its place in this rank's memory, its start and its length.
        """
        waits = False
        channel, most = self._out[peer], self.longest_chunk
        for start in range(0, nbytes, most):
            length = min(most, nbytes - start)
            first = self._next(channel, length)
            must_be_taken = 0
            while channel.untaken and channel.untaken[0][0] < first + length - self._region:
                must_be_taken = channel.untaken.popleft()[1]
            if must_be_taken:
                queue.wait(channel.taken, must_be_taken)
                waits = True
            write_chunk(channel.memory + first % self._region, start, length)
            queue.set(channel.posted, channel.count)
            channel.untaken.append((first, channel.count))
        return waits

    def receive(self, queue: Queue, peer: int, nbytes: int, read_chunk: Callable[[int, int, int], None]) -> None:
        """Queue a message from a rank, of as many bytes as it sends.

        read_chunk: queues the copy of a chunk to its destination, given its address, its start and its length.
        """
        channel, most = self._in[peer], self.longest_chunk
        for start in range(0, nbytes, most):
            length = min(most, nbytes - start)
            place = self._next(channel, length) % self._region
            queue.wait(channel.posted, channel.count)
            read_chunk(channel.memory + place, start, length)
            queue.set(channel.taken, channel.count)

    def release(self, queue: Queue) -> None:
        """Raise this rank's counters, which ends all its waits although the messages have not arrived."""
        for other in range(self._size):
            for counter in (self._posted(self._rank, other), self._taken(self._rank, other)):
                queue.set(counter, _RELEASED)

    def unsettled(self, counters: Sequence[int]) -> list[str]:
        """Describe how this rank's counters, in the order of their addresses, differ from the queued counts; empty once
        all transfers of all ranks are done."""
        posted, taken = counters[: self._size], counters[self._size :]
        return [
            *(
                f"{posted[other]} of {channel.count} chunks came from rank {other}"
                for other, channel in enumerate(self._in)
                if (posted[other] - channel.count) & LARGEST_COUNT
            ),
            *(
                f"rank {other} took {taken[other]} of {channel.count} chunks"
                for other, channel in enumerate(self._out)
                if (taken[other] - channel.count) & LARGEST_COUNT
            ),
        ]

    @property
    def counters_bytes(self) -> int:
        """Bytes of a rank's memory, from its start, that hold counters: one in each line of COUNTER_STEP bytes."""
        return 2 * self._size * COUNTER_STEP

    def _next(self, channel: _Channel, length: int) -> int:
        """Where the next chunk starts, in bytes since the first one."""
        place = channel.position % self._region
        if place + length > self._region:
            channel.position += self._region - place
        first = channel.position
        channel.position += _aligned(length)
        channel.count += 1
        return first

    def _region_of(self, owner: int, reader: int) -> int:
        return _counters_bytes(self._size) + ((reader - owner) % self._size - 1) * self._region

    def _posted(self, owner: int, sender: int) -> int:
        """Address, in the reader's memory, of the count of chunks that this sender has written for it."""
        return self._addresses[owner] + sender * COUNTER_STEP

    def _taken(self, owner: int, reader: int) -> int:
        """Address, in the sender's memory, of the count of chunks that this reader has taken."""
        return self._addresses[owner] + (self._size + reader) * COUNTER_STEP


def _counters_bytes(size: int) -> int:
    return _aligned(2 * size * COUNTER_STEP)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
