"""`neighborhood`: behind a causal mask, each residue of the tokens is dense attention under a sliding window.

Residues are strided views, and where the dilation divides the length all of them are one call of the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dilabench.contracts import BuildContext, LoadedBackend
from dilabench.impls.one_operator import differentiable, new_number, register
from dilabench.patterns.neighborhood import NeighborhoodPattern
from dilabench.workload.spec import Workload


def build(workload: Workload, context: BuildContext) -> Neighborhoods:
    """Raises ValueError without a causal mask: windows then change their place at both ends of a residue."""
    pattern = NeighborhoodPattern.of(workload)
    if not workload.causal:
        raise ValueError("neighborhood computes causal windows only; use natten or reference")
    return Neighborhoods(Residues(context.require_backend(), pattern, workload.softmax_scale))


class Neighborhoods:
    """out [B, N, H, D] of q [B, N, H, D] and k, v [B, N, K, D]."""

    def __init__(self, residues: Residues) -> None:
        self._residues, self._number = residues, new_number()
        register(self._number, residues)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Differentiable."""
        return self.with_lse(q, k, v)[0]

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out, and lse [B, H, N], which carries no gradient."""
        return differentiable(self._residues, self._number, q, k, v)


@dataclass(frozen=True, eq=False)
class Residues:
    """The computation outside autograd."""

    backend: LoadedBackend
    pattern: NeighborhoodPattern
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out and lse."""
        B, N, H, _ = q.shape
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        out, lse = torch.empty_like(q), q.new_empty((B, N, H), dtype=wide)
        attend = self._under_window(self.backend.attend)
        for into_out, into_lse, *given in zip(*map(self._views, (out, lse, q, k, v)), strict=True):
            found, found_lse = attend(*(x.flatten(0, 1) for x in given))
            into_out.copy_(found.unflatten(0, (B, -1)))
            into_lse.copy_(found_lse.transpose(1, 2).unflatten(0, (B, -1)))
        return out, lse.transpose(1, 2)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv."""
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        backward = self._under_window(self.backend.require_backward())
        views = [list(self._views(x)) for x in (*gradients, lse.transpose(1, 2), dout, q, k, v, out)]
        for dq, dk, dv, rows_lse, *given in zip(*views, strict=True):
            lse_of_rows = rows_lse.flatten(0, 1).transpose(1, 2).contiguous()
            found = backward(*(x.flatten(0, 1) for x in given), lse_of_rows)
            for into, part in zip((dq, dk, dv), found, strict=True):
                into.copy_(part.unflatten(0, (q.shape[0], -1)))
        return gradients

    def _under_window(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return partial(function, causal=True, window=(self.pattern.kernel_size - 1, 0), scale=self.scale)

    def _views(self, x: Tensor) -> Iterator[Tensor]:
        """[B, N, ...] as views [B, residues, places, ...]: all residues together where they are equally long."""
        dilation = self.pattern.dilation
        if x.shape[1] % dilation == 0:
            yield x.unflatten(1, (-1, dilation)).transpose(1, 2)
        else:
            yield from (x[:, residue::dilation].unsqueeze(1) for residue in range(min(dilation, x.shape[1])))
