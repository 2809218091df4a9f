"""A rank's attention as a differentiable function of its shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dilabench.distributed.calls import Request, disagreement
from dilabench.distributed.failures import RanksDisagreeError
from dilabench.distributed.sharding import Shards
from dilabench.distributed.world import World
from dilabench.impls.one_operator import eager
from dilabench.impls.operator_rules import outside_compilers
from dilabench.kernels.lse import add_null_mass_
from dilabench.metadata import Note
from dilabench.workload.spec import Workload


class Algorithm(Protocol):
    """Forward and backward on local shards [B, N_local, ·, D], all ranks together.

    `forward` gives out, lse and the tensors that the backward pass needs, each in separate memory. How many tensors
    these are, and their shapes and dtypes, are the same for all q, k and v of the same shapes and dtypes.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]: ...
    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]: ...


@runtime_checkable
class AddsSinks(Protocol):
    """An algorithm that keeps results of its own for the backward pass: it adds sinks [H] to these, too."""

    def forward_with_sink(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]: ...


class Local(Protocol):
    """Attention on one device, outside autograd; `forward` gives out and lse first, and `backward` needs only these."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]: ...
    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class LocalOnly:
    """`Algorithm` without communication: each rank runs `local` on its shards."""

    local: Local

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """out and lse, the only kept tensors."""
        out, lse, *_ = self.local.forward(q, k, v)
        return out, lse, ()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, _kept: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv."""
        return self.local.backward(dout, q, k, v, out, lse)


class ShardedAttention:
    """An AttentionFn of local shards, with lse. `shards` gives their positions.

    The first call compares the shapes of all ranks; later ones check only their own.
    """

    # All ranks exchange gradients, also ranks whose loss does not depend on out.
    exchanges = True

    def __init__(
        self, workload: Workload, shards: Shards, world: World, algorithm: Algorithm, notes: tuple[Note, ...] = ()
    ) -> None:
        self.workload, self.shards, self.world, self.notes = workload, shards, world, notes
        self._algorithm = algorithm
        self._compared = False
        lead = () if workload.layout == "packed" else (workload.batch_size,)
        # [q, k, v] of this rank.
        self._shapes = [
            (*lead, shards.rows[world.rank], heads, workload.head_dim)
            for heads in (workload.num_heads, workload.num_kv_heads, workload.num_kv_heads)
        ]
        # By pass; made at the first call unless they are given.
        self._requests: dict[str, Request] = {}
        # Shapes and dtypes of what the forward pass keeps, for an operator that hands it on as bytes.
        self.kept: tuple[tuple[torch.Size, torch.dtype], ...] = ()

    def ask_for(self, request: Request) -> None:
        """Let each pass ask for this on all ranks, and for itself."""
        passes = "forward", "forward with a sink", "backward", "sum of the sink's gradient"
        self._requests = {name: request.with_fields({"pass": name}) for name in passes}

    def _ask(self) -> None:
        self.ask_for(request_for(self.workload, self.shards))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out of q, both [B, N_local, H, D] (packed: [T_local, H, D]), and k, v [B, N_local, K, D]."""
        return self.with_lse(q, k, v)[0]

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out, and lse [B, H, N_local] (packed: [H, T_local]), which carries no gradient.

        Raises ValueError for tensors that are no shards of this rank, RanksDisagreeError when ranks were built for
        different workloads, RuntimeError when a rank is gone.
        """
        return eager(self, q.contiguous(), k.contiguous(), v.contiguous())

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """out and lse as `with_lse` gives and refuses them, outside autograd, and what `backward` wants kept.

        sink: [H], the logits of a key of value 0, the same on all ranks.
        """
        if not self._requests:
            outside_compilers(self._ask)
        with self.world.numbered(self._requests["forward" if sink is None else "forward with a sink"]):
            self._check(q, k, v)
            if q.ndim == 4:
                return self._forward(q.contiguous(), k.contiguous(), v.contiguous(), sink)
            out, lse, kept = self._forward(q[None].contiguous(), k[None].contiguous(), v[None].contiguous(), sink)
            return out[0], lse[0], kept

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        if sink is None:
            return self._algorithm.forward(q, k, v)
        if isinstance(self._algorithm, AddsSinks):
            return self._algorithm.forward_with_sink(q, k, v, sink)
        out, lse, kept = self._algorithm.forward(q, k, v)
        add_null_mass_(out, lse, sink[:, None].to(lse.dtype))
        return out, lse, kept

    def summed(self, x: Tensor) -> Tensor:
        """The sum of a tensor over the ranks, with the same bits on all of them."""
        with self.world.numbered(self._requests["sum of the sink's gradient"]):
            return self.world.summed(x)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of contiguous q, k, v and what `forward` gave for them."""
        dout, kept = dout.contiguous(), tuple(kept)
        with self.world.numbered(self._requests["backward"]):
            if q.ndim == 4:
                return self._algorithm.backward(dout, q, k, v, out, lse, kept)
            dq, dk, dv = self._algorithm.backward(dout[None], q[None], k[None], v[None], out[None], lse[None], kept)
            return dq[0], dk[0], dv[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedAttention:
        """Itself: ranks and their connections cannot be copied, and the object has no other mutable state."""
        return self

    def _check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        right = [q.shape, k.shape, v.shape] == self._shapes
        if right and self._compared:
            return
        w, given = self.workload, [tuple(x.shape) for x in (q, k, v)]
        if not self._compared:
            calls = self.world.calls
            asked = self._requests["forward"].text
            facts = self.world.share((asked, None if right else str(given), None if calls is None else calls.fact))
            self._compared = True
            differ = calls is not None and calls.met([fact for _, _, fact in facts])
            wrong = {rank: shapes for rank, (_, shapes, _) in enumerate(facts) if shapes}
            if wrong and right:
                shapes_of_ranks = "; ".join(f"rank {rank} got q, k, v of {shapes}" for rank, shapes in wrong.items())
                raise ValueError(f"{shapes_of_ranks}: no shards of {w.label()}")
            if text := disagreement({rank: request for rank, (request, _, _) in enumerate(facts)}):
                raise RanksDisagreeError(text)
            if calls is not None and differ:
                raise RanksDisagreeError(calls.differ(self.world))
        if not right:
            raise ValueError(
                f"rank {self.world.rank} got q, k, v of {given}, but its shards of {w.label()} on {self.world.size} "
                f"ranks are {self._shapes}; cut whole tensors with `shards.take(x, rank)`"
            )


def request_for(workload: Workload, shards: Shards) -> Request:
    """The request that must be equal on all ranks, in every pass by any algorithm."""
    # With the number of rows, these are the spans.
    starts = [[span.start for span in part] for part in shards.parts]
    return Request.of({**workload.model_dump(mode="json"), "rows": shards.rows, "starts": starts})
