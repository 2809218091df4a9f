"""`ring-allgather`: one fused exchange of everything that ranks need of each other, while local branches are computed.

LongNet's own distributed algorithm. Each rank's K and V on the rows and heads that another rank sees, all branches
together and each vector once, go out in one collective; behind a causal mask or beyond a window nothing is sent. What
arrives is constant in N and kept for the backward pass, which returns dK and dV in one collective (the reduce-scatter),
summed by their owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.distributed.sharding import contiguous
from dilabench.distributed.world import Pending
from dilabench.impls.null_mass import log_zero_keys
from dilabench.impls.ring.schedule.function import Apart, ShardedAttention
from dilabench.impls.ring.schedule.parcels import Parcel
from dilabench.impls.ring.schedule.share import Share, share_of
from dilabench.impls.ring.schedule.sums import Softmax, Sum
from dilabench.kernels.lse import add_null_mass_
from dilabench.workload.spec import Workload


@dataclass(frozen=True, slots=True)
class AllGather:
    """`function.Algorithm` with one collective per pass. `silent`: no rank needs anything of another.

    `zero_keys`: those of this rank's rows (`null_mass.log_zero_keys`).
    """

    share: Share
    silent: bool
    zero_keys: Tensor | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """out, lse, and the gathered K and V."""
        share, results = self.share, Softmax(q)
        packed = [parcel.pack(x) for _, parcel in self._ordered(share.gives) for x in (k, v)]
        gathered, pending = self._exchange(packed, k.dtype, k, share.gives, share.needs, "keys")
        share.attend_own(results, q, k, v)
        pending.wait()
        for holder, keys, values in self._arrived(gathered, k):
            first_row = share.needs[holder].first
            share.attend(share.reads[holder], results, q, keys, values, first_row)
        out, lse = results.finish()
        if self.zero_keys is not None:
            add_null_mass_(out, lse, self.zero_keys)
        return out, lse, (gathered,)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of this rank's shards; remote keys first, so that their gradients travel meanwhile."""
        share = self.share
        dq, dk, dv = Sum.like(q), Sum.like(k), Sum.like(v)
        packed: list[Tensor] = []
        for holder, keys, values in self._arrived(kept[0], k):
            packed += share.remote_backward(holder, dq, dout, q, keys, values, out, lse)
        dtype = share.gradient_dtype
        returned, pending = self._exchange(packed, dtype, k, share.needs, share.gives, "gradients")
        share.attend_own_backward((dq, dk, dv), dout, q, k, v, out, lse)
        pending.wait()
        for reader, packed_dk, packed_dv in self._split(returned, share.gives, k):
            dk.add_parcel(share.gives[reader], packed_dk)
            dv.add_parcel(share.gives[reader], packed_dv)
        return dq.finish(), dk.finish(), dv.finish()

    def _exchange(
        self,
        packed: Sequence[Tensor],
        dtype: torch.dtype,
        like: Tensor,
        give: Mapping[int, Parcel],
        take: Mapping[int, Parcel],
        kind: str,
    ) -> tuple[Tensor, Pending]:
        """Send what is packed for the ranks of `give`, in their order, and receive what `take` says."""
        flat = torch.cat([x.flatten() for x in packed]) if packed else like.new_empty(0, dtype=dtype)
        if self.silent:
            return flat, Pending(())
        given, taken = (
            [2 * prod(parcels[rank].shape(like)) if rank in parcels else 0 for rank in range(self.share.world.size)]
            for parcels in (give, take)
        )
        return self.share.world.all_to_all(flat, given, taken, kind)

    def _arrived(self, gathered: Tensor, k: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Holder, K and V of each part of the gathered buffer."""
        for holder, *packed in self._split(gathered, self.share.needs, k):
            keys, values = (self.share.needs[holder].unpack(x, k.shape[2]) for x in packed)
            yield holder, keys, values

    def _split(self, flat: Tensor, parcels: Mapping[int, Parcel], k: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Rank and both tensors of each parcel in a flat buffer."""
        start = 0
        for rank, parcel in self._ordered(parcels):
            shape = parcel.shape(k)
            size = prod(shape)
            yield rank, flat[start : start + size].view(shape), flat[start + size : start + 2 * size].view(shape)
            start += 2 * size

    @staticmethod
    def _ordered(parcels: Mapping[int, Parcel]) -> list[tuple[int, Parcel]]:
        return sorted(parcels.items())


def build(workload: Workload, context: BuildContext) -> ShardedAttention:
    """Rank r holds the r-th part of the sequence."""
    share = share_of(workload, context, contiguous)
    silent = not any(share.world.share(bool(share.needs or share.gives)))
    rows = [torch.arange(span.start, span.stop) for span in share.shards.parts[share.world.rank]]
    zero_keys = log_zero_keys(workload, context.device, rows=torch.cat([torch.arange(0), *rows]))
    if silent and share.local is not None and not share.own and zero_keys is None:
        # There is nothing to send or to merge, so that a call costs what it costs without ranks.
        return ShardedAttention(workload, share.shards, share.world, Apart(share.local))
    return ShardedAttention(workload, share.shards, share.world, AllGather(share, silent, zero_keys))
