"""Attention over selected blocks on a GPU by the Triton kernels of `kernels.selected`; packed sequences at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dilabench.impls.one_operator import new_number, register
from dilabench.impls.selected.gather import Gathered
from dilabench.impls.selected.selection import SelectedAttention, Selection, check
from dilabench.kernels.lse import has_kernel

if TYPE_CHECKING:
    from dilabench.kernels.selected.lists import KeptLists


def tiled(selection: Selection, scale: float) -> SelectedAttention:
    """By the kernels, which have no window; by gathering over one."""
    left, right = selection.window
    whole = left < 0 and (right < 0 or selection.causal)
    return Tiled(selection, scale) if whole else Gathered(selection, scale)


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if the kernels run for the dtype on the device: CUDA, sm_80 and Triton 3.6 or later, no float64."""
    return has_kernel(device, dtype)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Tiled(SelectedAttention):
    """Over one sequence, padded, or packed ones from each of the `bounds` to before the next. Lists are made at the
    first pass that needs them and kept."""

    selection: Selection
    scale: float
    bounds: Tensor | None = None
    number: int = field(default_factory=new_number, init=False, repr=False)
    _lists: list[KeptLists] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        register(self.number, self)

    def over(self, bounds: Sequence[int]) -> Tiled:
        """In one launch; tokens behind the last bound are a sequence that selects nothing."""
        selection, last = self.selection, bounds[-1]
        if last < selection.length:
            indices = selection.indices.clone()
            indices[:, last:] = -1
            selection, bounds = replace(selection, indices=indices), (*bounds, selection.length)
        return Tiled(selection, self.scale, torch.tensor(bounds, dtype=torch.int32, device=selection.indices.device))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out and lse, summed in float32."""
        # Triton is not installed everywhere, and only CUDA needs it.
        from dilabench.kernels.selected.attention import selected_forward

        check(self.selection, q, k, v)
        indices, options = self._indices(len(q)), self._options
        if self.bounds is None:
            return selected_forward(q, k, v, indices, *options, kept=self._kept())
        out, lse = selected_forward(q[0], k[0], v[0], indices[0], *options, cu_seqlens=self.bounds, kept=self._kept())
        return out[None], lse[None]

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv, summed in float32."""
        from dilabench.kernels.selected.attention import selected_backward

        check(self.selection, q, k, v)
        indices, options = self._indices(len(q)), self._options
        if self.bounds is None:
            return selected_backward(dout, q, k, v, out, lse, indices, *options, kept=self._kept())
        dq, dk, dv = selected_backward(
            dout[0], q[0], k[0], v[0], out[0], lse[0], indices[0], *options, cu_seqlens=self.bounds, kept=self._kept()
        )
        return dq[None], dk[None], dv[None]

    @property
    def _options(self) -> tuple[int, bool, float]:
        return self.selection.block, self.selection.causal, self.scale

    def _indices(self, batch: int) -> Tensor:
        """int32 [B, N, K, S]."""
        indices = self.selection.indices
        if indices.dtype != torch.int32:
            # A number beyond 32 bits would become the index of a block.
            indices = indices.clamp(-1, self.selection.blocks).int()
        return indices.expand(batch, -1, -1, -1)

    def _kept(self) -> KeptLists:
        from dilabench.kernels.selected.lists import KeptLists

        if not self._lists:
            self._lists.append(KeptLists())
        return self._lists[0]
