"""Messages of several tensors: where their bytes are, and how they are written into a chunk and read from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, prod
from typing import NamedTuple

from torch import Tensor

from dilabench.distributed.transport.ring_buffers import ALIGNMENT, Queue, RingBuffers
from dilabench.distributed.transport.slots import Slots
from dilabench.distributed.transport.strided_copy import copy_strided_

# A tensor of more rows is written by a kernel of torch: the driver's is slow for short rows.
MOST_ROWS = 16
# Where a tensor begins in a message: the widest word of `copy_strided_`.
_PART_ALIGNMENT = 16

RowsOf = tuple[int, int, int]
"""The number of a tensor, and its rows [first, stop)."""


class Part(NamedTuple):
    """Bytes [start, start + nbytes) of a message: `rows` rows of `width` bytes of a tensor, `pitch` bytes from each to
    the next, the first one `offset` bytes after its address; rows 0: a tensor of other strides.
    """

    start: int
    nbytes: int
    tensor: int
    offset: int = 0
    width: int = 0
    pitch: int = 0
    rows: int = 0

    def copy(self, queue: Queue, address: int, packed: int, first: int, stop: int, *, pack: bool) -> None:
        """Queue the copy of its bytes [first, stop) to an address where they follow each other (`pack`), or from there.

        address: of the tensor.
        """
        address += self.offset
        if self.rows == 1:
            place = address + first
            queue.copy(*((packed, place) if pack else (place, packed)), stop - first)
        elif stop - first == self.nbytes:
            apart, packed_rows = (address, self.pitch), (packed, self.width)
            queue.copy_rows(*((packed_rows, apart) if pack else (apart, packed_rows)), self.width, self.rows)
        else:
            for row in range(first // self.width, -(-stop // self.width)):
                start = row * self.width
                low, high = max(first, start), min(stop, start + self.width)
                place, away = packed + low - first, address + row * self.pitch + low - start
                queue.copy(*((place, away) if pack else (away, place)), high - low)


class Message(NamedTuple):
    """All tensors that go from a rank to another in an exchange. nbytes: of their chunk."""

    parts: tuple[Part, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor], number: int = 0, most_rows: float = inf) -> Message:
        """Whole tensors, numbered from `number` on. most_rows: more rows are treated as if strides were irregular."""
        parts, start = [], 0
        for at, x in enumerate(tensors, number):
            width, pitch, rows = _rows(x)
            parts.append(Part(start, x.nbytes, at, 0, width, pitch, rows if rows <= most_rows else 0))
            start = _aligned(start + x.nbytes, _PART_ALIGNMENT)
        return cls(tuple(parts), _aligned(start, ALIGNMENT))

    @classmethod
    def of_rows(cls, rows: Sequence[RowsOf], tensors: Sequence[Tensor]) -> Message:
        """Rows of contiguous tensors [B, N, K, D]. One of [2, B, N, K, D] is as its two halves."""
        parts, start = [], 0
        for number, first, stop in rows:
            x = tensors[number]
            *lead, length, heads, dim = x.shape
            row, items = heads * dim * x.element_size(), prod(lead)
            width, pitch = (stop - first) * row, length * row
            halves = 2 if len(lead) > 1 and items * width // 2 % _PART_ALIGNMENT else 1
            for half in range(halves):
                count = items // halves
                offset, nbytes = half * count * pitch + first * row, count * width
                whole = width == pitch
                sizes = (nbytes if whole else width, nbytes if whole else pitch, 1 if whole else count)
                parts.append(Part(start, nbytes, number, offset, *(sizes if nbytes else (0, 0, 0))))
                start = _aligned(start + nbytes, _PART_ALIGNMENT)
        return cls(tuple(parts), _aligned(start, ALIGNMENT))


TensorsOf = Mapping[int, Sequence[Tensor]]
"""By peer, tensors that go to it, or come from it."""

Counts = Mapping[int, tuple[int, int]]
"""By peer the number of tensors, and their bytes."""


class Plan(NamedTuple):
    """The messages of an exchange, by peer, and their counts: what depends on shapes alone."""

    sends: Mapping[int, Message]
    receives: Mapping[int, Message]
    sent: Counts
    received: Counts

    @classmethod
    def of_tensors(cls, sends: TensorsOf, receives: TensorsOf) -> Plan:
        """Whole tensors, numbered in this order."""
        number = 0

        def messages(of_peers: TensorsOf, most_rows: float) -> dict[int, Message]:
            nonlocal number
            found = {}
            for peer, tensors in of_peers.items():
                found[peer] = Message.of(tensors, number, most_rows)
                number += len(tensors)
            return found

        return cls(messages(sends, MOST_ROWS), messages(receives, inf), counts_of(sends), counts_of(receives))


def counts_of(tensors: TensorsOf) -> Counts:
    """How many tensors, and bytes, go to or come from each peer."""
    return {peer: (len(several), sum(x.nbytes for x in several)) for peer, several in tensors.items()}


def _rows(x: Tensor) -> tuple[int, int, int]:
    """(width, pitch, count) of a tensor whose memory is rows at equal distances, in its order; else count 0."""
    nbytes = x.nbytes
    if not nbytes:
        return 0, 0, 0
    if x.is_contiguous():
        return nbytes, nbytes, 1
    item = width = x.element_size()
    pitch, count = 0, 1
    for size, step in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if size == 1:
            continue
        if count == 1 and step * item == width:
            width *= size
        elif count == 1:
            pitch, count = step * item, size
        elif step * item == pitch * count:
            count *= size
        else:
            return 0, 0, 0
    return width, pitch, count


def _aligned(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def send(
    messages: RingBuffers | Slots, memory: Tensor, queue: Queue, peer: int, message: Message, tensors: Sequence[Tensor]
) -> bool:
    """Queue a message to a rank through the sender's memory; return as `RingBuffers.send`."""
    base = memory.data_ptr()
    if message.nbytes > messages.longest_chunk and not all(part.rows for part in message.parts):
        # Outputs of a kernel are made contiguous first: chunks end anywhere in them.
        tensors = [tensors[part.tensor].contiguous() for part in message.parts]
        message = Message.of(tensors)

    def write_chunk(place: int, start: int, length: int) -> None:
        for part in message.parts:
            first, stop = max(part.start, start), min(part.start + part.nbytes, start + length)
            if first >= stop:
                continue
            x, target = tensors[part.tensor], place + first - start
            if part.rows:
                part.copy(queue, x.data_ptr(), base + target, first - part.start, stop - part.start, pack=True)
            else:
                copy_strided_(memory[target : target + part.nbytes].view(x.dtype).view(x.shape), x)

    return messages.send(queue, peer, message.nbytes, write_chunk)


def receive(
    messages: RingBuffers | Slots, queue: Queue, peer: int, message: Message, tensors: Sequence[Tensor]
) -> None:
    """Queue a message from a rank into tensors, which are rows at equal distances in memory."""

    def read_chunk(address: int, start: int, length: int) -> None:
        for part in message.parts:
            first, stop = max(part.start, start), min(part.start + part.nbytes, start + length)
            if first < stop:
                assert part.rows, "a tensor to receive into has rows at equal distances"
                place, target = address + first - start, tensors[part.tensor].data_ptr()
                part.copy(queue, target, place, first - part.start, stop - part.start, pack=False)

    messages.receive(queue, peer, message.nbytes, read_chunk)
