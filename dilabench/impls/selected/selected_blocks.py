"""`selected-blocks`: attention over key blocks that are selected per token. Two more plan, or select, in every call.

The differences between the three are what planning and selecting take. What selects reads the stand-ins of the
pattern's selector (`patterns.token_selectors`), so that the oracle knows which blocks are right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.impls.one_operator import eager, outside_compilers
from dilabench.impls.selected.gather import Gathered
from dilabench.impls.selected.lists import Listed
from dilabench.impls.selected.selection import Make, SelectedAttention, over_sequences
from dilabench.impls.selected.stand_ins import selecting_all, selection_of
from dilabench.impls.selected.tiled import serves, tiled
from dilabench.kernels.cpu import flash
from dilabench.workload.spec import Workload


def kernel_for(device: torch.device, dtype: torch.dtype) -> Make:
    """The computation for a kind of device and a dtype: our own kernel if it can run, else torch's by gathering."""
    if serves(device, dtype):
        return tiled
    return Listed if device.type == "cpu" and flash.serves(dtype) else Gathered


def build(workload: Workload, context: BuildContext) -> SelectedAttention:
    """Indices are made here, and plans at the first call. Raises ConfigError when a file of indices does not fit."""
    return _make(workload, context)(selection_of(workload, context.device))


def build_planned(workload: Workload, context: BuildContext) -> Planning:
    """The indices are on the device when a call begins."""
    selection, make = selection_of(workload, context.device), _make(workload, context)
    return Planning(lambda: make(selection))


def build_selected(workload: Workload, context: BuildContext) -> Planning:
    """The stand-ins are on the device when a call begins. Raises ValueError for a selector that reads no queries."""
    select, make = selecting_all(workload, context.device), _make(workload, context)
    return Planning(lambda: make(select()))


def _make(workload: Workload, context: BuildContext) -> Callable[..., SelectedAttention]:
    kernel = kernel_for(context.device, getattr(torch, workload.dtype))
    bounds = workload.cu_seqlens or ()
    return lambda selection: over_sequences(kernel, selection, workload.softmax_scale, bounds)


@dataclass(frozen=True, slots=True)
class Planning:
    """Attention that is planned anew in each forward pass; its backward pass has the plan of its forward."""

    make: Callable[[], SelectedAttention]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out [B, N, H, D] of q [B, N, H, D] and k, v [B, N, K, D]; packed [T, H, D]; differentiable."""
        return self.with_lse(q, k, v)[0]

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out, and lse [B, H, N], packed [H, T] (natural log), which carries no gradient."""
        return outside_compilers(self._planned, q, k, v)

    def _planned(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if q.ndim == 4:
            return eager(self.make(), q, k, v)
        out, lse = eager(self.make(), q[None], k[None], v[None])
        return out[0], lse[0]
