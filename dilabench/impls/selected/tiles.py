"""Attention over selected blocks on a GPU, by our Triton kernels; packed sequences in one launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from dilabench.impls.selected.selection import SelectedAttention, Selection, check
from dilabench.kernels.lse import has_kernel

if TYPE_CHECKING:
    from dilabench.kernels.selected.lists import KeptLists

# The kernels read rows of at most this width.
LARGEST_HEAD_DIM = 256


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Tiled(SelectedAttention):
    """Over one sequence, padded, or over packed ones with `bounds`. Lists are made by the first pass that needs them,
    and kept.
    """

    selection: Selection
    scale: float
    bounds: tuple[int, ...] = ()
    _kept: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)
    _lists: dict[int, KeptLists] = field(default_factory=dict, init=False, repr=False)

    takes_bounds: ClassVar[bool] = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out and lse, summed in float32."""
        # Triton is not installed everywhere, and only GPUs need it.
        from dilabench.kernels.selected.attention import selected_forward

        check(self.selection, q, k, v)
        indices, options = self._indices(q), (self.selection.block, self.selection.causal, self.scale)
        window = self.selection.window
        kept = self._lists_of(len(q))
        if not self.bounds:
            return selected_forward(q, k, v, indices, *options, window=window, kept=kept)
        rows, bounds = self.bounds[-1], self._bounds(q)
        q, k, v, indices = (x[0, :rows] for x in (q, k, v, indices))
        out, lse = selected_forward(q, k, v, indices, *options, window=window, cu_seqlens=bounds, kept=kept)
        missing = self.selection.length - rows
        return pad(out, (0, 0, 0, 0, 0, missing))[None], pad(lse, (0, missing), value=-torch.inf)[None]

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv, summed in float32."""
        from dilabench.kernels.selected.attention import selected_backward

        check(self.selection, q, k, v)
        indices, options = self._indices(q), (self.selection.block, self.selection.causal, self.scale)
        window = self.selection.window
        kept = self._lists_of(len(q))
        if not self.bounds:
            return selected_backward(dout, q, k, v, out, lse, indices, *options, window=window, kept=kept)
        rows, bounds = self.bounds[-1], self._bounds(q)
        dout, q, k, v, out, indices = (x[0, :rows] for x in (dout, q, k, v, out, indices))
        lse = lse[0, :, :rows]
        gradients = selected_backward(
            dout, q, k, v, out, lse, indices, *options, window=window, cu_seqlens=bounds, kept=kept
        )
        missing = self.selection.length - rows
        dq, dk, dv = (pad(x, (0, 0, 0, 0, 0, missing))[None] for x in gradients)
        return dq, dk, dv

    def _indices(self, q: Tensor) -> Tensor:
        """int32 [B, N, K, S], one for each batch item."""
        indices = self.selection.indices
        return indices.to(torch.int32).expand(q.shape[0], *indices.shape[1:]).contiguous()

    def _lists_of(self, batch: int) -> KeptLists:
        """The lists of a batch of this size: items that share indices have lists of their keys."""
        from dilabench.kernels.selected.lists import KeptLists

        return self._lists.setdefault(batch, KeptLists())

    def _bounds(self, q: Tensor) -> Tensor:
        if q.device not in self._kept:
            self._kept[q.device] = torch.tensor(self.bounds, dtype=torch.int32, device=q.device)
        return self._kept[q.device]


def serves(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if the kernels run there, and take such tensors."""
    return head_dim <= LARGEST_HEAD_DIM and has_kernel(device, dtype)
