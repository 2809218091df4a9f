"""Messages in a CUDA graph: every replay waits for the same values and writes the same values, so no count may grow.

A channel from one rank to another has a few slots of memory, each with two flags: `full` at the reader, `free` at the
sender. The sender waits until a slot is free, clears that flag, writes a chunk and sets `full`. The reader waits for
`full`, clears it, copies the chunk to its destination and sets `free`. After each chunk all flags are as before it, so
any number of graphs may be replayed any number of times, by all ranks in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dilabench.distributed.transport.ring_buffers import ALIGNMENT, COUNTER_STEP, Queue

SLOTS = 4


class Slots:
    """One rank's messages of one exchange; its chunks take the slots of each channel in order.

    addresses: where each rank's memory of `memory_bytes` is mapped in this process; all `free` flags are set at first
    (`begin`), all others are zero. slot: bytes of each, a multiple of 512.
    """

    def __init__(self, rank: int, addresses: Sequence[int], slot: int) -> None:
        self._rank, self._addresses, self._slot = rank, addresses, slot
        self._sent, self._received = [0] * len(addresses), [0] * len(addresses)

    @staticmethod
    def memory_bytes(size: int, slot: int) -> int:
        """Bytes of one rank's memory among `size` ranks."""
        return _flags_bytes(size) + (size - 1) * SLOTS * slot

    @property
    def longest_chunk(self) -> int:
        """Bytes: a slot."""
        return self._slot

    def begin(self, queue: Queue) -> None:
        """Set this rank's `free` flags, once before the first exchange of any rank."""
        for peer in range(len(self._addresses)):
            for slot in range(SLOTS):
                queue.set(self._free(self._rank, peer, slot), 1)

    def send(self, queue: Queue, peer: int, nbytes: int, write_chunk: Callable[[int, int, int], None]) -> bool:
        """As `RingBuffers.send`."""
        for slot, start, length in self._chunks(self._sent, peer, nbytes):
            queue.wait(self._free(self._rank, peer, slot), 1)
            queue.set(self._free(self._rank, peer, slot), 0)
            write_chunk(self._place(self._rank, peer, slot), start, length)
            queue.set(self._full(peer, self._rank, slot), 1)
        return True

    def receive(self, queue: Queue, peer: int, nbytes: int, read_chunk: Callable[[int, int, int], None]) -> None:
        """As `RingBuffers.receive`."""
        for slot, start, length in self._chunks(self._received, peer, nbytes):
            queue.wait(self._full(self._rank, peer, slot), 1)
            queue.set(self._full(self._rank, peer, slot), 0)
            read_chunk(self._addresses[peer] + self._place(peer, self._rank, slot), start, length)
            queue.set(self._free(peer, self._rank, slot), 1)

    def _chunks(self, counts: list[int], peer: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """(slot, start, length) of each."""
        for start in range(0, nbytes, self._slot):
            yield counts[peer] % SLOTS, start, min(self._slot, nbytes - start)
            counts[peer] += 1

    def _place(self, owner: int, reader: int, slot: int) -> int:
        """Where a slot is in its owner's memory."""
        size = len(self._addresses)
        return _flags_bytes(size) + (((reader - owner) % size - 1) * SLOTS + slot) * self._slot

    def _full(self, owner: int, sender: int, slot: int) -> int:
        """Address, in the reader's memory, of the flag that this sender sets."""
        return self._addresses[owner] + (sender * SLOTS + slot) * COUNTER_STEP

    def _free(self, owner: int, reader: int, slot: int) -> int:
        """Address, in the sender's memory, of the flag that this reader sets."""
        return self._full(owner, len(self._addresses) + reader, slot)


def _flags_bytes(size: int) -> int:
    return -(-2 * size * SLOTS * COUNTER_STEP // ALIGNMENT) * ALIGNMENT
