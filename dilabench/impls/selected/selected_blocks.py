"""`selected-blocks`: attention over key blocks that are selected per token. Two more plan, or select, in every call.

The differences between the three are the times of planning and of selecting. The selecting one reads the stand-ins of
the pattern's selector (`patterns.token_selectors`), so that the oracle knows which blocks are right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.impls.one_operator import eager
from dilabench.impls.operator_rules import outside_compilers
from dilabench.impls.selected import tiles
from dilabench.impls.selected.gather import Gathered
from dilabench.impls.selected.lists import Listed
from dilabench.impls.selected.selection import SelectedAttention, Selection, over_sequences
from dilabench.impls.selected.stand_ins import selecting_all, selection_of
from dilabench.kernels.cpu import flash
from dilabench.workload.spec import Workload


def computation_for(
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    selection: Selection,
    scale: float,
    bounds: Sequence[int] = (),
) -> SelectedAttention:
    """The computation for a head dim, dtype and device: our own kernel if it takes them, else torch's by gathering."""
    kernel: type[SelectedAttention] = Gathered
    if tiles.serves(head_dim, dtype, device):
        kernel = tiles.Tiled
    elif device.type == "cpu" and flash.serves(dtype):
        kernel = Listed
    return over_sequences(kernel, selection, scale, bounds)


def build(workload: Workload, context: BuildContext) -> SelectedAttention:
    """Indices are made here, and plans at the first call. Raises ConfigError when a file of indices does not fit."""
    return _computation(workload, context, selection_of(workload, context.device))


def build_planned(workload: Workload, context: BuildContext) -> Planning:
    """The indices are on the device when a call begins."""
    selection = selection_of(workload, context.device)
    return Planning(lambda: _computation(workload, context, selection))


def build_selected(workload: Workload, context: BuildContext) -> Planning:
    """The stand-ins are on the device when a call begins. Raises ValueError for a selector that reads no queries."""
    select = selecting_all(workload, context.device)
    return Planning(lambda: _computation(workload, context, select()))


def _computation(workload: Workload, context: BuildContext, selection: Selection) -> SelectedAttention:
    kind = workload.head_dim, getattr(torch, workload.dtype), context.device
    return computation_for(*kind, selection, workload.softmax_scale, workload.cu_seqlens or ())


@dataclass(frozen=True, slots=True)
class Planning:
    """Attention that is planned in each forward pass; its backward pass has the plan of its forward."""

    make: Callable[[], SelectedAttention]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out [B, N, H, D] of q [B, N, H, D] and k, v [B, N, K, D]; packed [T, H, D]; differentiable."""
        return self.with_lse(q, k, v)[0]

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out, and lse [B, H, N], packed [H, T] (natural log)."""
        return outside_compilers(self._planned, q, k, v)

    def _planned(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if q.ndim == 4:
            return eager(self.make(), q, k, v)
        out, lse = eager(self.make(), q[None], k[None], v[None])
        return out.squeeze(0), lse.squeeze(0)
