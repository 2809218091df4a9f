"""The ring: at hop t every rank has the K and V of the rank t before it, and gives its dK and dV straight back.

Each hop is sent by the owner instead of being passed on, which moves the same bytes and leaves out what
nobody sees: whole hops out of a window's reach, chunks behind a causal mask. Partial dK and dV return to their owner as
the kernel gave them and are summed there in float32, so they cross the wire once, not P times.

Where hops overlap, the last hop's K and V stay until the backward pass, which begins with them, goes on with the other
hops and ends with the rank's own part. One hop less is moved then, and every dK and dV travels while something is
computed; the price is the memory of one shard's K and V between the passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dilabench.distributed.world import Pending
from dilabench.impls.ring.schedule.share import Share
from dilabench.impls.ring.schedule.sums import Softmax, Sum

# The rank whose work it is, the messages, and packed dK and dV on their way from it; none where it needed nothing.
Return = tuple[int, Pending, list[Tensor]]


@dataclass(slots=True)
class Arrival:
    """K and V of one holder on their way here. `holder` None: this hop brings this rank nothing."""

    holder: int | None
    pending: Pending
    packed: list[Tensor]

    def wait(self) -> None:
        """Wait until K and V have arrived."""
        self.pending.wait()


@dataclass(frozen=True, slots=True)
class Ring:
    """`function.Algorithm` with point-to-point hops; at distance 0 is the rank's own part, for which nothing moves.

    overlap: the next hop is under way while this one is computed (two buffers), and the last hop's K and V are kept for
    the backward pass; without it hops and computation take turns.
    """

    share: Share
    overlap: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """out, lse, and what is kept: K and V of the last hop, as they arrived."""
        results, coming = Softmax(q), None
        for distance, following in pairwise((*range(self.share.world.size), 0)):
            arrival, coming = self._take(distance, following, coming, k, v)
            if distance == 0:
                self.share.attend_own(results, q, k, v)
            elif arrival.holder is not None:
                keys, values, first_row = self._unpacked(arrival, k.shape[2])
                self.share.attend(self.share.reads[arrival.holder], results, q, keys, values, first_row)
        return *results.finish(), tuple(arrival.packed) if self.overlap else ()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of this rank's shards."""
        dq, dk, dv = Sum.like(q), Sum.like(k), Sum.like(v)
        returns: list[Return] = []
        coming = self._kept(kept) if self.overlap else None
        for distance, following in pairwise((*self._backward_order, 0)):
            arrival, coming = self._take(distance, following, coming, k, v)
            if distance == 0:
                self.share.attend_own_backward((dq, dk, dv), dout, q, k, v, out, lse)
                continue
            gradients = self._gradients(arrival, dq, dout, q, k.shape[2], out, lse)
            returns.append(self._give_back(distance, arrival.holder, gradients, k))
            # Pending messages hold what they still send; all else makes room for the next step.
            del arrival, gradients
            if not self.overlap or len(returns) > 1:
                self._add([returns.pop(0)], dk, dv)
        self._add(returns, dk, dv)
        return dq.finish(), dk.finish(), dv.finish()

    @property
    def _backward_order(self) -> tuple[int, ...]:
        """Distances in the order of the backward pass, the same on all ranks, so that messages match."""
        size = self.share.world.size
        if not self.overlap or size == 1:
            return tuple(range(size))
        return size - 1, *range(1, size - 1), 0

    def _kept(self, packed: tuple[Tensor, ...]) -> Arrival:
        """The last hop's arrival as the forward pass kept it: from the rank after this one, round the ring."""
        world = self.share.world
        return Arrival((world.rank + 1) % world.size if packed else None, Pending(()), list(packed))

    def _take(
        self, distance: int, following: int, coming: Arrival | None, k: Tensor, v: Tensor
    ) -> tuple[Arrival, Arrival | None]:
        """The arrival at a distance, waited for; where hops overlap, the following one has been requested."""
        arrival = coming or self._request(distance, k, v)
        ahead = self._request(following, k, v) if self.overlap else None
        arrival.wait()
        return arrival, ahead

    def _request(self, distance: int, k: Tensor, v: Tensor) -> Arrival:
        """Send what the rank `distance` after this one needs, receive from the one `distance` before."""
        world = self.share.world
        reader, holder = (world.rank + distance) % world.size, (world.rank - distance) % world.size
        sends, receives = {}, {}
        if reader in self.share.gives:
            sends[reader] = [self.share.gives[reader].pack(x) for x in (k, v)]
        if holder in self.share.needs:
            parcel = self.share.needs[holder]
            receives[holder] = [x.new_empty(parcel.shape(x)) for x in (k, v)]
        pending = world.swap(sends, receives, "keys")
        return Arrival(holder if receives else None, pending, receives.get(holder, []))

    def _gradients(
        self, arrival: Arrival, dq: Sum, dout: Tensor, q: Tensor, num_kv_heads: int, out: Tensor, lse: Tensor
    ) -> list[Tensor]:
        """Packed dK and dV of what arrived, if anything did; dq is added to."""
        if arrival.holder is None:
            return []
        keys, values, _ = self._unpacked(arrival, num_kv_heads)
        return self.share.remote_backward(arrival.holder, dq, dout, q, keys, values, out, lse)

    def _unpacked(self, arrival: Arrival, num_kv_heads: int) -> tuple[Tensor, Tensor, int]:
        assert arrival.holder is not None
        parcel = self.share.needs[arrival.holder]
        keys, values = (parcel.unpack(packed, num_kv_heads) for packed in arrival.packed)
        return keys, values, parcel.first

    def _give_back(self, distance: int, holder: int | None, gradients: list[Tensor], k: Tensor) -> Return:
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

    def _add(self, returns: list[Return], dk: Sum, dv: Sum) -> None:
        for reader, pending, packed in returns:
            pending.wait()
            if packed:
                parcel = self.share.gives[reader]
                dk.add_parcel(parcel, packed[0])
                dv.add_parcel(parcel, packed[1])
