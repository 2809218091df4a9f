"""The ring: at hop t every rank has the K and V of the rank t before it, and gives its dK and dV straight back.

Each hop is sent by the owner instead of being passed on, which moves the same bytes and lets what nobody sees stay at
home: whole hops out of a window's reach, chunks behind a causal mask. Partial dK and dV return to their owner as the
kernel gave them and are summed there in float32, so they cross the wire once, not P times.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dilabench.distributed.world import Pending
from dilabench.impls.ring.share import Share
from dilabench.impls.ring.sums import Softmax, Sum


@dataclass(slots=True)
class Arrival:
    """K and V of one holder on their way here. `holder` None: this hop brings this rank nothing."""

    holder: int | None
    pending: Pending
    packed: list[Tensor]

    def wait(self) -> None:
        """Until they are here."""
        self.pending.wait()


@dataclass(frozen=True, slots=True)
class Ring:
    """`function.Algorithm` with point-to-point hops.

    overlap: the next hop is under way while this one is computed (two buffers); without it they take turns.
    """

    share: Share
    overlap: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """out, lse; nothing else is kept."""
        results = Softmax(q)
        coming = self._request(1, k, v) if self.overlap else None
        self.share.attend_own(results, q, k, v)
        for distance in self._distances:
            arrival, coming = self._take(distance, coming, k, v)
            if arrival.holder is not None:
                keys, values, first_row = self._unpacked(arrival, k.shape[2])
                self.share.attend(self.share.reads[arrival.holder], results, q, keys, values, first_row)
        return *results.finish(), ()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, _kept: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of this rank's shards."""
        dq, dk, dv = Sum.like(q), Sum.like(k), Sum.like(v)
        coming = self._request(1, k, v) if self.overlap else None
        self.share.attend_own_backward((dq, dk, dv), dout, q, k, v, out, lse)
        returns: list[tuple[int, Pending, list[Tensor]]] = []
        for distance in self._distances:
            arrival, coming = self._take(distance, coming, k, v)
            gradients: list[Tensor] = []
            if arrival.holder is not None:
                keys, values, _ = self._unpacked(arrival, k.shape[2])
                gradients = self.share.remote_backward(arrival.holder, dq, dout, q, keys, values, out, lse)
            returns.append(self._give_back(distance, arrival.holder, gradients, k))
            if not self.overlap:
                self._add(returns, dk, dv)
                returns.clear()
            elif len(returns) > 1:
                self._add([returns.pop(0)], dk, dv)
        self._add(returns, dk, dv)
        return dq.finish(), dk.finish(), dv.finish()

    @property
    def _distances(self) -> range:
        return range(1, self.share.world.size)

    def _take(self, distance: int, coming: Arrival | None, k: Tensor, v: Tensor) -> tuple[Arrival, Arrival | None]:
        """This hop's arrival, waited for, and the next one, requested where hops overlap."""
        arrival = coming or self._request(distance, k, v)
        following = None
        if self.overlap and distance + 1 < self.share.world.size:
            following = self._request(distance + 1, k, v)
        arrival.wait()
        return arrival, following

    def _request(self, distance: int, k: Tensor, v: Tensor) -> Arrival:
        """Send what the rank `distance` after this one needs, receive from the one `distance` before."""
        world = self.share.world
        if distance >= world.size:
            return Arrival(None, Pending(()), [])
        reader, holder = (world.rank + distance) % world.size, (world.rank - distance) % world.size
        sends, receives = {}, {}
        if reader in self.share.gives:
            sends[reader] = [self.share.gives[reader].pack(x) for x in (k, v)]
        if holder in self.share.needs:
            parcel = self.share.needs[holder]
            receives[holder] = [x.new_empty(parcel.shape(x)) for x in (k, v)]
        pending = world.swap(sends, receives, "keys")
        return Arrival(holder if receives else None, pending, receives.get(holder, []))

    def _unpacked(self, arrival: Arrival, num_kv_heads: int) -> tuple[Tensor, Tensor, int]:
        assert arrival.holder is not None
        parcel = self.share.needs[arrival.holder]
        keys, values = (parcel.unpack(packed, num_kv_heads) for packed in arrival.packed)
        return keys, values, parcel.first

    def _give_back(
        self, distance: int, holder: int | None, gradients: list[Tensor], k: Tensor
    ) -> tuple[int, Pending, list[Tensor]]:
        """Send dK and dV to their holder, receive those that the reader of this rank's keys has made."""
        world = self.share.world
        reader = (world.rank + distance) % world.size
        sends = {holder: gradients} if holder is not None else {}
        receives = {}
        if reader in self.share.gives:
            shape = self.share.gives[reader].shape(k)
            empty = [torch.empty(shape, dtype=self.share.gradient_dtype, device=k.device) for _ in range(2)]
            receives[reader] = empty
        return reader, world.swap(sends, receives, "gradients"), receives.get(reader, [])

    def _add(self, returns: list[tuple[int, Pending, list[Tensor]]], dk: Sum, dv: Sum) -> None:
        for reader, pending, packed in returns:
            pending.wait()
            if packed:
                parcel = self.share.gives[reader]
                dk.add_parcel(parcel, packed[0])
                dv.add_parcel(parcel, packed[1])
