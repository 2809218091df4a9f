"""`ring-allgather`, `fused-allgather`: one exchange of all keys that ranks need, during the local branches.

LongNet's own distributed algorithm. Each rank's K and V on the rows and heads that another rank sees, all branches
together and each vector once, go out in one collective; hidden rows (causal mask, window) are not sent. The received
rows are constant in N and kept for the backward pass, which returns dK and dV in one collective (the reduce-scatter),
summed by their owner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.distributed.sharding import contiguous
from dilabench.impls import strided
from dilabench.impls.null_mass import log_zero_keys
from dilabench.impls.ring.schedule.function import Algorithm, Local, LocalOnly, ShardedAttention
from dilabench.impls.ring.schedule.share import Share, share_of
from dilabench.impls.ring.schedule.sums import Softmax, Sum
from dilabench.kernels.lse import add_null_mass_
from dilabench.metadata import FUSED_BRANCHES, Note
from dilabench.workload.spec import Workload


@dataclass(frozen=True, slots=True)
class AllGather:
    """`function.Algorithm` with one collective per pass. zero_keys: of own rows (`null_mass.log_zero_keys`)."""

    share: Share
    zero_keys: Tensor | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """out, lse, and the gathered K and V."""
        share, results = self.share, Softmax(q)
        gathered, pending = share.exchange.fetch_all(k, v)
        share.attend_own(results, q, k, v)
        pending.wait()
        for owner, packed in share.exchange.of_owners(gathered, k):
            share.attend_remote(owner, results, q, packed)
        out, lse = results.finish()
        if self.zero_keys is not None:
            add_null_mass_(out, lse, self.zero_keys)
        return out, lse, (gathered,)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of this rank's shards; remote keys first, so that their gradients are sent meanwhile."""
        share, exchange = self.share, self.share.exchange
        dq, dk, dv = (Sum.like(x, onto_first=True) for x in (q, k, v))
        gradients: list[Tensor] = []
        for owner, packed in exchange.of_owners(kept[0], k):
            gradients += share.attend_remote_backward(owner, dq, dout, q, packed, out, lse)
        returned = exchange.give_all_back(gradients, k, share.gradient_dtype)
        share.attend_own_backward((dq, dk, dv), dout, q, k, v, out, lse)
        returned.add(dk, dv)
        return dq.finish(), dk.finish(), dv.finish()


def build(workload: Workload, context: BuildContext) -> ShardedAttention:
    """`ring-allgather`: rank r holds the r-th part of the sequence; local branches are strided calls of the backend."""
    return _built(workload, context, strided.padded)


def build_fused(workload: Workload, context: BuildContext) -> ShardedAttention:
    """`fused-allgather`: the same parts; branches whose segments all lie on a rank are one launch of `fused` there."""
    # Triton is not installed everywhere.
    from dilabench.impls import fused

    message = "branches whose segments lie on a rank are computed by fused, the others by the backend"
    return _built(workload, context, fused.build, FUSED_BRANCHES.note(message))


def _built(
    workload: Workload,
    context: BuildContext,
    single_device: Callable[[Workload, BuildContext], Local],
    *of_local: Note,
) -> ShardedAttention:
    """of_local: notes of a rank that has local branches."""
    share = share_of(workload, context, contiguous, single_device)
    notes = () if share.local is None else of_local
    silent = not any(share.world.share(bool(share.exchange.needs or share.exchange.gives)))
    rows = [torch.arange(span.start, span.stop, device="cpu") for span in share.shards.parts[share.world.rank]]
    zero_keys = log_zero_keys(workload, context.device, rows=torch.cat([torch.arange(0, device="cpu"), *rows]))
    algorithm: Algorithm
    if silent and share.local is not None and not share.own and zero_keys is None:
        # Without messages and merges, a call costs the same as without ranks.
        algorithm = LocalOnly(share.local)
    else:
        algorithm = AllGather(replace(share, exchange=replace(share.exchange, silent=silent)), zero_keys)
    return ShardedAttention(workload, share.shards, share.world, algorithm, notes)
