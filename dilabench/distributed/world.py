"""The ranks that compute one workload together, and how tensors get from one to another.

All messages use torch.distributed (NCCL for CUDA, gloo for the CPU) and are counted; between the GPUs of one host they
use the copy engines if possible (`transport.selection`). Point-to-point messages are always batched: a send before a
receive on every rank would wait forever. A rank sends nothing to itself.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from dilabench.distributed.calls import NO_CALL, Calls, Request, calls_of
from dilabench.distributed.groups import DEFAULT_TIMEOUT_S, control_of, timeout_of
from dilabench.distributed.transport.copies import Copies
from dilabench.distributed.transport.messages import Counts, counts_of
from dilabench.distributed.transport.strided_copy import copy_strided_
from dilabench.distributed.transport.transport import transport_of
from dilabench.kernels.streams import is_captured
from dilabench.metadata import RECEIVED_BYTES, SENT_BYTES, traffic_key

NOT_NUMBERED = contextlib.nullcontext()


class Traffic:
    """Bytes that one rank actually sent and received; local copies do not count.

    Kinds are the keys of `metadata.TRAFFIC`, or a plug-in's ('plugin:kind').
    """

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()

    def add(self, kind: str, *, sent: int, received: int) -> None:
        """Count one operation."""
        self.sent[kind] += sent
        self.received[kind] += received
        self.operations[kind] += 1

    def clear(self) -> None:
        """Start from zero."""
        for counter in (self.sent, self.received, self.operations):
            counter.clear()

    def total(self) -> tuple[int, int]:
        """All bytes sent, and all received."""
        return self.sent.total(), self.received.total()

    def counters(self) -> dict[str, int]:
        """The counters of a measurement: 'sent_keys_bytes', 'received_keys_bytes' and so on, and the sums."""
        named = {traffic_key("sent", kind): count for kind, count in self.sent.items()}
        named |= {traffic_key("received", kind): count for kind, count in self.received.items()}
        return named | dict(zip((SENT_BYTES.key, RECEIVED_BYTES.key), self.total(), strict=True))


class MessageCounts:
    """Messages and their bytes that this rank has sent to, and received from, every rank since it joined."""

    def __init__(self, size: int) -> None:
        self.sent = [[0, 0] for _ in range(size)]
        self.received = [[0, 0] for _ in range(size)]

    def add(self, sent: Counts, received: Counts) -> tuple[int, int]:
        """Count an exchange; return the bytes sent and received."""
        return self._added(self.sent, sent), self._added(self.received, received)

    @staticmethod
    def _added(counts: list[list[int]], messages: Counts) -> int:
        total = 0
        for peer, (number, nbytes) in messages.items():
            of_peer = counts[peer]
            of_peer[0] += number
            of_peer[1] += nbytes
            total += nbytes
        return total


class Work:
    """Messages in flight. `wait` makes the current stream (on the CPU: the caller) wait until they have arrived.

    staged: strided tensors to receive into, each with the contiguous one that its message arrives in.
    """

    def __init__(
        self,
        works: Sequence[Any],
        kept: Sequence[Tensor] = (),
        staged: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        self._works = works
        self._kept = kept
        self._staged = staged

    def wait(self) -> None:
        """Return when the received tensors may be used. Raises RuntimeError if a peer is gone or too slow."""
        for work in self._works:
            work.wait()
        for place, arrived in self._staged:
            copy_strided_(place, arrived)
        self._works, self._kept, self._staged = (), (), ()


@dataclass(frozen=True, slots=True)
class World:
    """This process among `size` ranks. A world of one has no process group and sends nothing.

    `control`: a gloo group for small facts (sizes, times, failures), so that asking never waits for the device.
    `copies`: the copy engines, if they carry the messages, else None. `transport`: what carries them, as text.
    `counts`: messages of this rank by peer, which ranks compare. `calls`: those of all worlds of the group.
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    traffic: Traffic = field(default_factory=Traffic)
    timeout_s: float = DEFAULT_TIMEOUT_S
    copies: Copies | None = None
    transport: str = "gloo"
    calls: Calls | None = None
    counts: MessageCounts = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", MessageCounts(self.size))

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> World:
        """The world of a process without peers."""
        return cls(0, 1, torch.device(device))

    @property
    def peers(self) -> list[int]:
        """The other ranks, in ascending order."""
        return [rank for rank in range(self.size) if rank != self.rank]

    @classmethod
    def join(
        cls, store: Store, rank: int, size: int, device: torch.device, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> World:
        """Connect to the other ranks by a store and warm up the communicators, so that the first call does not.

        Every wait in this world ends after `timeout_s` seconds with an error. End with `close` or a `with` block.
        """
        timeout = timedelta(seconds=timeout_s)
        store.set_timeout(timeout)
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=PrefixStore("world", store),
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if cuda else None,
        )
        try:
            world = cls.of_group()
            world._warm_up()
            world = world.on(device)
        except BaseException:
            if not cuda:
                # With NCCL this would wait for the missing ranks: see `close`.
                dist.destroy_process_group()
            raise
        return world

    @classmethod
    def of_group(cls, group: dist.ProcessGroup | None = None) -> World:
        """The ranks of an existing process group, by default all ranks. Its creator ends it.

        With NCCL, on the device that the group is bound to (`device_id` of `init_process_group`), else on the current
        one until tensors determine it (`on`). Worlds of one group share their control group. Waits end after the
        group's timeout. Raises RuntimeError if there is no process group.
        """
        if not dist.is_initialized():
            raise RuntimeError("there is no process group: call torch.distributed.init_process_group first")
        group = group or dist.group.WORLD
        cuda = dist.get_backend(group) == "nccl"
        device, control = torch.device("cpu"), group
        if cuda and group is not None:
            device = group.bound_device_id or torch.device("cuda", torch.cuda.current_device())
            control = control_of(group)
        rank, size, name = dist.get_rank(group), dist.get_world_size(group), dist.get_backend(group)
        calls = calls_of(control, rank, size) if control is not None and size > 1 else None
        return cls(rank, size, device, group, control, timeout_s=timeout_of(group), transport=name, calls=calls)

    def on(self, device: torch.device) -> World:
        """The same ranks for tensors on a device, with the transport of their group there. All ranks call it.

        Raises ValueError if the group is bound to another device.
        """
        if self.device.type != "cuda":
            return self
        if device != self.device and self.group is not None and self.group.bound_device_id is not None:
            raise ValueError(
                f"tensors are on {device} and the process group on {self.device}, the device_id that "
                "init_process_group was given; move one of them"
            )
        transport = transport_of(replace(self, device=device))
        if self.calls is not None and transport.copies is not None:
            self.calls.ends[device] = transport.copies.end_waits
        if (device, transport) == (self.device, (self.transport, self.copies)):
            return self
        return replace(self, device=device, copies=transport.copies, transport=transport.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.close(failed=error is not None)

    def close(self, *, failed: bool = False) -> None:
        """Leave the world together with the other ranks. failed: leave immediately, because the process ends.

        Ranks end NCCL's communicators together: one that does so alone waits for the others without an error.
        """
        if self.copies is not None:
            self.copies.close()
        if failed and self.device.type == "cuda":
            return
        if self.group is not None and dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()

    def send_recv(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]], kind: str
    ) -> Work:
        """Send tensors to peers and receive into tensors from peers, all in one batch. Tensors to receive into may be
        rows of each batch item, [B, n, ...] of a contiguous tensor.

        Sent tensors may be overwritten after `Work.wait`, because NCCL reads them on its stream.
        """
        if not any(sends.values()) and not any(receives.values()):
            return Work(())
        if self.copies is not None:
            plan, tensors = self.copies.plan(sends, receives)
            self.count(plan.sent, plan.received, kind)
            work = self.copies.exchange(plan.sends, plan.receives, tensors)
            return Work([work], [x for several in receives.values() for x in several])
        self.count(counts_of(sends), counts_of(receives), kind)
        self._refuse_capture(next(x for tensors in (*sends.values(), *receives.values()) for x in tensors))
        contiguous = {peer: [tensor.contiguous() for tensor in tensors] for peer, tensors in sends.items()}
        staged: list[tuple[Tensor, Tensor]] = []
        arriving = {peer: [_contiguous_for(x, staged) for x in tensors] for peer, tensors in receives.items()}
        works = dist.batch_isend_irecv(
            [*self._operations(dist.irecv, arriving), *self._operations(dist.isend, contiguous)]
        )
        return Work(works, [tensor for tensors in contiguous.values() for tensor in tensors], staged=staged)

    def count(self, sent: Counts, received: Counts, kind: str) -> None:
        """Count an exchange."""
        sent_bytes, received_bytes = self.counts.add(sent, received)
        self.traffic.add(kind, sent=sent_bytes, received=received_bytes)

    def _refuse_capture(self, x: Tensor) -> None:
        """Raise RuntimeError while a CUDA graph of x is captured: graphs of NCCL's messages did not end in tests."""
        if is_captured(x):
            raise RuntimeError(
                f"messages over {self.transport} cannot be captured in a CUDA graph, only those by copy engines can; "
                "call without a graph"
            )

    def all_to_all(
        self, flat: Tensor, input_split_sizes: Sequence[int], output_split_sizes: Sequence[int], kind: str
    ) -> tuple[Tensor, Work]:
        """Send rank p `input_split_sizes[p]` elements of a flat tensor, receive `output_split_sizes[p]`; asynchronous.

        Elements for oneself are copied with the rest but not counted.
        """
        # A fresh buffer: `empty_like` of a view would keep strides that gloo writes past.
        received = flat.new_empty(sum(output_split_sizes))
        if self.size == 1:
            received.copy_(flat)
            return received, Work(())
        given, taken = flat.split(list(input_split_sizes)), received.split(list(output_split_sizes))
        sends, receives = (
            {peer: [parts[peer]] for peer in self.peers if parts[peer].numel()} for parts in (given, taken)
        )
        if self.copies is not None or self.device.type == "cpu":
            taken[self.rank].copy_(given[self.rank])
            return received, self.send_recv(sends, receives, kind)
        self.count(counts_of(sends), counts_of(receives), kind)
        self._refuse_capture(flat)
        work = dist.all_to_all_single(
            received, flat, list(output_split_sizes), list(input_split_sizes), group=self.group, async_op=True
        )
        return received, Work([work], [flat])

    def all_gather(self, shard: Tensor, sizes: Sequence[Sequence[int]], kind: str = "whole") -> list[Tensor]:
        """Every rank's tensor, of the given shapes, on every rank; its own may be `shard` itself."""
        parts = [shard.new_empty(tuple(size)) for rank, size in enumerate(sizes) if rank != self.rank]
        parts.insert(self.rank, shard.contiguous())
        # A rank without rows sends nothing.
        sends = {peer: [parts[self.rank]] for peer in self.peers if shard.numel()}
        receives = {peer: [parts[peer]] for peer in self.peers if parts[peer].numel()}
        self.send_recv(sends, receives, kind).wait()
        return parts

    def summed(self, x: Tensor) -> Tensor:
        """The sum of a tensor over the ranks, added in their order: a new tensor with the same bits on all of them."""
        first, *others = self.all_gather(x, [x.shape] * self.size, "parameters")
        total = first.clone()
        for other in others:
            total += other
        return total

    def sum_in_place(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks."""
        if self.size == 1:
            return
        for tensor in tensors:
            dist.all_reduce(tensor, group=self.group)

    def share(self, fact: Any) -> list[Any]:
        """A small picklable fact of every rank, in the order of ranks."""
        if self.size == 1:
            return [fact]
        facts: list[Any] = [None] * self.size
        dist.all_gather_object(facts, fact, group=self.control)
        return facts

    def numbered(self, request: Request) -> AbstractContextManager[None]:
        """Number a call of the group for as long as the context is open (`calls`). All ranks do."""
        return NOT_NUMBERED if self.calls is None else self.calls.numbered(request)

    def max_over_ranks(self, values: Sequence[int]) -> tuple[int, ...]:
        """The element-wise maximum of every rank's numbers: a parallel call takes as long as its slowest rank."""
        return tuple(max(column) for column in zip(*self.share(list(values)), strict=True))

    def barrier(self) -> None:
        """Wait until every rank is here, with the device's work done. Raises RuntimeError when one does not come."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.check()
        if self.size > 1:
            dist.monitored_barrier(self.control, timedelta(seconds=self.timeout_s), wait_all_ranks=True)

    def device_barrier(self) -> None:
        """Make later work in the current CUDA stream wait until every rank's device is here; the host goes on."""
        if self.size > 1 and self.device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=self.device, dtype=torch.float32), group=self.group)

    def check(self) -> None:
        """Raise RuntimeError if a message of this rank was lost, RanksDisagreeError if ranks were found in different
        calls: no later result may be used.
        """
        if self.calls is not None:
            self.calls.check()
        if self.copies is not None:
            self.copies.check()

    def confirm_counts(self) -> None:
        """Compare the devices' counters with the queued messages; call it after a `barrier`.

        Raises RuntimeError if a message was not delivered exactly once.
        """
        if self.copies is not None:
            self.copies.confirm_counts()

    def limit_waits(self, timeout_s: float | None) -> None:
        """Limit later waits for messages by copy engines to `timeout_s` seconds, but at most this world's limit; None:
        that limit.
        """
        if self.copies is not None:
            self.copies.timeout_s = self.timeout_s if timeout_s is None else min(self.timeout_s, timeout_s)

    def _operations(self, operation: Any, tensors: Mapping[int, Sequence[Tensor]]) -> list[dist.P2POp]:
        # NCCL has no tags.
        tag = NO_CALL if self.calls is None or self.device.type == "cuda" else self.calls.tag
        return [
            dist.P2POp(operation, x, group=self.group, group_peer=peer, tag=tag)
            for peer in tensors
            for x in tensors[peer]
        ]

    def _warm_up(self) -> None:
        """Every kind of operation once, with every peer: NCCL connects at the first use."""
        if self.size == 1:
            return
        token = torch.ones(self.size, device=self.device, dtype=torch.float32)
        dist.all_reduce(token, group=self.group)
        self.all_to_all(token, [1] * self.size, [1] * self.size, "warm up")[1].wait()
        for distance in range(1, self.size):
            inbox = torch.empty_like(token)
            peers = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            self.send_recv({peers[0]: [token]}, {peers[1]: [inbox]}, "warm up").wait()
        self.barrier()
        self.traffic.clear()


def _contiguous_for(place: Tensor, staged: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The place to receive into, or a contiguous tensor that is noted in `staged` with it."""
    if place.is_contiguous():
        return place
    staged.append((place, place.new_empty(place.shape)))
    return staged[-1][1]
