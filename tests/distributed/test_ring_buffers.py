"""Messages over ring buffers and slots, with threads for the device's queues and host memory for the device's."""

import ctypes
import random
import threading
import time
from queue import SimpleQueue
from unittest.mock import Mock

import pytest
import torch

from dilabench.distributed.transport.messages import MOST_ROWS, Message, receive, send
from dilabench.distributed.transport.ring_buffers import COUNTER_STEP, RingBuffers
from dilabench.distributed.transport.slots import SLOTS, Slots

# Places are multiples of 512 bytes: three of them, and the longest chunk takes half of that.
REGION = 1536
TIMEOUT_S = 20.0


class ThreadQueue:
    """Steps in order, in a thread of their own."""

    def __init__(self):
        self._steps = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self, counter, count):
        number = ctypes.c_uint32.from_address(counter)
        self._steps.put(lambda: self._until(lambda: ctypes.c_int32(number.value - count).value >= 0))

    def set(self, counter, count):
        number = ctypes.c_uint32.from_address(counter)
        self._steps.put(lambda: setattr(number, "value", count))

    def copy(self, target, source, nbytes):
        self._steps.put(lambda: ctypes.memmove(target, source, nbytes))

    def copy_rows(self, target, source, width, count):
        for row in range(count):
            self.copy(target[0] + row * target[1], source[0] + row * source[1], width)

    def do(self, step):
        self._steps.put(step)

    def finish(self, timeout_s=TIMEOUT_S):
        """Whether everything was done in time."""
        self._steps.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @staticmethod
    def _until(reached):
        while not reached():
            time.sleep(0)

    def _run(self):
        while (step := self._steps.get()) is not None:
            step()


def copying(queue, target):
    """Copies of chunks to where they follow each other."""
    return lambda address, start, length: queue.copy(target + start, address, length)


class Ranks:
    """RingBuffers of all ranks in one process; each rank with a queue that sends and one that receives."""

    def __init__(self, size, region=REGION):
        nbytes = RingBuffers.memory_bytes(size, region)
        self.memory = [ctypes.create_string_buffer(nbytes) for _ in range(size)]
        self.addresses = [ctypes.addressof(memory) for memory in self.memory]
        self.outward, self.inward = ([ThreadQueue() for _ in range(size)] for _ in range(2))
        self.buffers = [RingBuffers(rank, self.addresses, region) for rank in range(size)]

    def send(self, rank, peer, message):
        queue, source = self.outward[rank], ctypes.addressof(message)

        def lay(place, start, length):
            assert place + length <= len(self.memory[rank])
            queue.copy(self.addresses[rank] + place, source + start, length)

        self.buffers[rank].send(queue, peer, len(message) - 1, lay)

    def receive(self, rank, peer, place):
        queue, target = self.inward[rank], ctypes.addressof(place)
        self.buffers[rank].receive(queue, peer, len(place) - 1, copying(queue, target))

    def finish(self):
        return [queue.finish() for queue in self.outward + self.inward]


def exchange(size, rounds, lengths):
    """All ranks send to all, nearest first, many times; the messages as sent and as received."""
    ranks = Ranks(size)
    sent, received = {}, {}
    for step in range(rounds):
        for distance in range(1, size):
            for rank in range(size):
                peer = (rank + distance) % size
                message = ctypes.create_string_buffer(random.randbytes(lengths(step, rank, peer)))
                sent[step, rank, peer] = message
                ranks.send(rank, peer, message)
            for rank in range(size):
                peer = (rank - distance) % size
                place = ctypes.create_string_buffer(len(sent[step, peer, rank]))
                received[step, peer, rank] = place
                ranks.receive(rank, peer, place)
    assert all(ranks.finish()), "some queue waits for ever"
    return {key: x.raw[:-1] for key, x in sent.items()}, {key: x.raw[:-1] for key, x in received.items()}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_message_arrives_as_it_was_sent(size):
    sizes = [0, 1, 511, 512, 513, REGION // 2, REGION // 2 + 1, REGION, 3 * REGION + 5]
    sent, received = exchange(size, 12, lambda step, rank, peer: sizes[(step + rank + 2 * peer) % len(sizes)])
    assert sent == received


def test_a_message_longer_than_the_region_waits_for_the_reader():
    ranks = Ranks(2)
    message = ctypes.create_string_buffer(random.randbytes(2 * REGION))
    ranks.send(0, 1, message)
    assert not ranks.outward[0].finish(0.2), "the sender overran bytes that nobody had taken"
    place = ctypes.create_string_buffer(len(message))
    ranks.receive(1, 0, place)
    assert all(ranks.finish())
    assert place.raw == message.raw


MESSAGES = {
    "whole": lambda x: x,
    "rows of each item": lambda x: x[:, 2:5],
    "rows first": lambda x: x.transpose(0, 1),
    "heads": lambda x: x[:, :, 1:],
    "many parts": lambda x: x.flatten(0, 1)[:, 1:],
    "no rows": lambda x: x[:, :0],
}


@pytest.mark.parametrize("items", [1, 3])
@pytest.mark.parametrize("names", [*((name,) for name in MESSAGES), ("rows of each item", "heads"), tuple(MESSAGES)])
@pytest.mark.parametrize("rows", [7, 60])
def test_tensors_of_any_strides_arrive_in_their_order(names, items, rows):
    """The longer ones take several chunks, which end anywhere in a row."""
    sent = [MESSAGES[name](torch.randn(items, rows, 3, 5)) for name in names]
    message = Message.of(sent, most_rows=MOST_ROWS)
    # Some tensors are written by the host, which does not wait until a chunk was taken.
    by_host = not all(part.rows for part in message.parts)
    ranks = Ranks(2, 64 * REGION if by_host else REGION)
    memory, queue = torch.frombuffer(ranks.memory[0], dtype=torch.uint8), ranks.outward[0]
    send(ranks.buffers[0], memory, queue, 1, message, sent)
    places = [torch.empty(len(x), x.shape[1] + 2, *x.shape[2:])[:, 1:-1] for x in sent]
    receive(ranks.buffers[1], ranks.inward[1], 0, Message.of(places), places)
    assert all(ranks.finish())
    for place, x in zip(places, sent, strict=True):
        assert torch.equal(place, x)


@pytest.mark.parametrize("spans", [[(0, 9)], [(2, 5)], [(0, 1), (1, 4), (6, 9)], [(3, 3), (8, 9)]])
@pytest.mark.parametrize("dim", [8, 3])
@pytest.mark.parametrize("region", [REGION, 64 * REGION])
def test_rows_of_two_tensors_arrive_in_one_of_both(spans, dim, region):
    """Also where the second one does not begin at a multiple of what messages are aligned to."""
    sent = [torch.randn(3, 9, 1, dim) for _ in range(2)]
    both = torch.zeros(2, 3, 12, 1, dim)
    ranks = Ranks(2, region)
    memory, queue = torch.frombuffer(ranks.memory[0], dtype=torch.uint8), ranks.outward[0]
    message = Message.of_rows([(number, *span) for span in spans for number in range(2)], sent)
    arriving = Message.of_rows([(0, first + 2, stop + 2) for first, stop in spans], [both])
    assert message.nbytes == arriving.nbytes
    send(ranks.buffers[0], memory, queue, 1, message, sent)
    receive(ranks.buffers[1], ranks.inward[1], 0, arriving, [both])
    assert all(ranks.finish())
    wanted = torch.zeros_like(both)
    for first, stop in spans:
        wanted[:, :, first + 2 : stop + 2] = torch.stack([x[:, first:stop] for x in sent])
    assert torch.equal(both, wanted)


@pytest.mark.parametrize(
    ("part", "count"),
    [
        (lambda x: x, 1),
        (lambda x: x[1:3], 1),
        (lambda x: x[:, 2:4], 4),
        (lambda x: x[:, :, :1], 24),
        (lambda x: x[:1, 2:4], 1),
        (lambda x: x[..., 0], 48),
        (lambda x: x[:, 1:5, :1], 0),
        (lambda x: x[:0], 0),
    ],
)
def test_a_tensor_is_rows_at_equal_distances_if_its_strides_are(part, count):
    x = part(torch.empty(4, 6, 2, 8))
    (found,), _ = Message.of([x])
    assert found.rows == count
    assert not count or found.width * count == x.nbytes


def test_a_send_says_whether_a_rank_must_take_something_first():
    buffers, queue = Ranks(2).buffers[0], Mock()
    assert [buffers.send(queue, 1, REGION // 3, Mock()) for _ in range(4)] == [False, False, False, True]
    assert queue.wait.call_count == 1


def test_a_released_rank_waits_for_nobody():
    ranks = Ranks(2)
    ranks.receive(0, 1, ctypes.create_string_buffer(9))
    assert not ranks.inward[0].finish(0.2), "nothing was sent"
    rescue = ThreadQueue()
    ranks.buffers[0].release(rescue)
    assert rescue.finish()
    assert ranks.inward[0].finish()


def test_counters_agree_with_the_queued_counts_only_when_all_is_done():
    ranks = Ranks(2)
    message, place = ctypes.create_string_buffer(random.randbytes(600)), ctypes.create_string_buffer(601)

    def unsettled(rank):
        raw = ranks.memory[rank].raw[: ranks.buffers[rank].counters_bytes]
        return ranks.buffers[rank].unsettled([*memoryview(raw).cast("i")][:: COUNTER_STEP // 4])

    assert unsettled(0) == unsettled(1) == []
    ranks.send(0, 1, message)
    assert unsettled(0) == ["rank 1 took 0 of 1 chunks"]
    ranks.receive(1, 0, place)
    assert all(ranks.finish())
    assert unsettled(0) == unsettled(1) == []
    # Queued, and never carried out.
    ranks.buffers[1].receive(Mock(), 0, 600, Mock())
    assert unsettled(1) == ["1 of 2 chunks came from rank 0"]


SLOT = 1024


class Replayed:
    """Exchanges of all ranks that are recorded once and carried out many times, as CUDA graphs do."""

    def __init__(self, size):
        self.size = size
        self.memory = [ctypes.create_string_buffer(Slots.memory_bytes(size, SLOT)) for _ in range(size)]
        self.addresses = [ctypes.addressof(memory) for memory in self.memory]
        self.outward, self.inward = ([ThreadQueue() for _ in range(size)] for _ in range(2))
        for rank, queue in enumerate(self.inward):
            Slots(rank, self.addresses, SLOT).begin(queue)
        self.sent, self.arrived = [], []

    def record(self, lengths):
        """A graph: the message of each pair of ranks as it is sent and as it arrives, and each queue's steps."""
        size, pairs = self.size, [(a, b) for a in range(self.size) for b in range(self.size) if a != b]
        graph = {
            "mine": {pair: ctypes.create_string_buffer(lengths(*pair)) for pair in pairs},
            "place": {pair: ctypes.create_string_buffer(lengths(*pair)) for pair in pairs},
        }
        for rank in range(size):
            outward, inward = Steps(), Steps()
            slots = Slots(rank, self.addresses, SLOT)
            for distance in range(1, size):
                peer = (rank + distance) % size
                source = ctypes.addressof(graph["mine"][rank, peer])

                def lay(place, start, length, rank=rank, source=source, outward=outward):
                    assert place + length <= len(self.memory[rank])
                    outward.copy(self.addresses[rank] + place, source + start, length)

                slots.send(outward, peer, lengths(rank, peer), lay)
            for distance in range(1, size):
                peer = (rank - distance) % size
                place = ctypes.addressof(graph["place"][peer, rank])
                slots.receive(inward, peer, lengths(peer, rank), copying(inward, place))
            graph[rank] = outward.steps, inward.steps
        return graph

    def replay(self, graph):
        """Queue it on every rank with other messages; nothing waits for it here."""
        number = len(self.sent)
        messages = {pair: random.randbytes(len(mine)) for pair, mine in graph["mine"].items()}
        self.sent.append(messages)
        self.arrived.append({})
        for rank in range(self.size):
            own = {pair: message for pair, message in messages.items() if pair[0] == rank}
            for pair, message in own.items():
                self.outward[rank].do(lambda pair=pair, message=message: setattr(graph["mine"][pair], "raw", message))
            for queue, steps in zip((self.outward[rank], self.inward[rank]), graph[rank], strict=True):
                for name, arguments in steps:
                    getattr(queue, name)(*arguments)
            for pair in (pair for pair in messages if pair[1] == rank):
                self.inward[rank].do(lambda pair=pair: self.arrived[number].__setitem__(pair, graph["place"][pair].raw))

    def finish(self):
        return [queue.finish() for queue in self.outward + self.inward]


class Steps:
    """A queue that only writes down what is asked of it."""

    def __init__(self):
        self.steps = []

    def __getattr__(self, name):
        return lambda *arguments: self.steps.append((name, arguments))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_graphs_bring_the_messages_of_each_replay_in_any_order_of_graphs(size):
    ranks = Replayed(size)
    sizes = [1, 511, SLOT, SLOT + 1, SLOTS * SLOT, (2 * SLOTS + 1) * SLOT + 5]
    graphs = [ranks.record(lambda a, b, at=at: sizes[(at + a + 2 * b) % len(sizes)]) for at in range(3)]
    for at in (0, 0, 1, 0, 2, 2, 1, 0, 2, 1):
        ranks.replay(graphs[at])
    assert all(ranks.finish()), "some queue waits for ever"
    assert ranks.sent == ranks.arrived


def test_a_replay_waits_for_the_message_of_this_replay():
    """The counts of a ring buffer would have been reached by the first."""
    ranks = Replayed(2)
    graph = ranks.record(lambda *_: 9)
    ranks.replay(graph)
    assert all(ranks.finish())
    sender, reader = ThreadQueue(), ThreadQueue()
    for name, arguments in graph[1][1]:
        getattr(reader, name)(*arguments)
    assert not reader.finish(0.2), "nothing was sent"
    for name, arguments in graph[0][0]:
        getattr(sender, name)(*arguments)
    assert sender.finish()
    assert reader.finish()
