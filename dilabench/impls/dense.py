"""`dense`: full attention by one call of a dense backend, without branches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dilabench.contracts import BuildContext, LoadedBackend
from dilabench.impls.last_rows import aligned
from dilabench.impls.one_operator import AttentionComputation
from dilabench.workload.spec import Workload

if TYPE_CHECKING:
    from dilabench.impls.packed import InTiles, OneLaunch, Packed


def build(workload: Workload, context: BuildContext) -> Dense | OneLaunch | InTiles | Packed:
    """Packed sequences are one launch if the backend, or dilabench's tiles, can."""
    if workload.layout == "padded":
        return padded(workload, context)
    from dilabench.impls.packed import build_packed, in_one_launch, in_tiles

    return in_one_launch(workload, context) or in_tiles(workload, context) or build_packed(padded, workload, context)


def padded(workload: Workload, context: BuildContext) -> Dense:
    """The computation for sequences of one length, or of queries that are the last rows of their keys."""
    backend = context.require_backend()
    if workload.query_len is not None:
        backend = aligned(backend)
    return Dense(backend, mask_options(workload))


def mask_options(workload: Workload) -> dict[str, Any]:
    """The options of `contracts.Attend` for a whole workload; a softcap only if there is one."""
    options = {"causal": workload.causal, "window": workload.window, "scale": workload.softmax_scale}
    return options if workload.softcap is None else {**options, "softcap": workload.softcap}


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Dense(AttentionComputation):
    """A backend's own out, lse and gradients. Raises ValueError in the backward pass over a backend that has none."""

    backend: LoadedBackend
    options: Mapping[str, Any]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = self.backend.attend(q, k, v, **self.options)
        return out.contiguous(), lse.contiguous()

    def differentiable(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """out and lse by operators that torch differentiates itself, without Python; None if the backend has none for
        these tensors.
        """
        attend = getattr(self.backend.attend, "differentiable", None)
        if attend is None:
            return None
        found: tuple[Tensor, Tensor] | None = attend(q, k, v, **self.options)
        return found

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        attend_backward = self.backend.attend_backward or self.backend.require_backward()
        dq, dk, dv = attend_backward(dout.contiguous(), q, k, v, out, lse, **self.options)
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
