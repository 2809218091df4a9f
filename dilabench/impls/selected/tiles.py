"""Attention over selected blocks on a GPU, by our Triton kernels; packed sequences in one launch."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dilabench.impls.selected.selection import SelectedAttention, Selection, check
from dilabench.kernels.lse import has_kernel
from dilabench.kernels.streams import stream_number

if TYPE_CHECKING:
    from dilabench.kernels.selected.lists import KeptLists

# The kernels read rows of at most this width.
LARGEST_HEAD_DIM = 256


class _Kept(NamedTuple):
    """Data for all passes over a selection on one stream: int32 indices [B, N, K, S], or [T, K, S] and bounds of packed
    sequences, and lists.
    """

    indices: Tensor
    bounds: Tensor | None
    lists: KeptLists


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Tiled(SelectedAttention):
    """Attention over one padded sequence, or over packed ones with `bounds`. The first pass that needs lists makes
    them, and they are kept.
    """

    selection: Selection
    scale: float
    bounds: tuple[int, ...] = ()
    _kept: dict[Hashable, _Kept] = field(default_factory=dict, init=False, repr=False)

    takes_bounds: ClassVar[bool] = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out and lse, summed in float32."""
        # Triton is not installed everywhere, and only GPUs need it.
        from dilabench.kernels.selected.attention import selected_forward

        indices, bounds, kept = self._kept_for(q, k, v)
        options, window = (self.selection.block, self.selection.causal, self.scale), self.selection.window
        if bounds is None:
            return selected_forward(q, k, v, indices, *options, window=window, kept=kept)
        rows = self.bounds[-1]
        q, k, v = (x[0, :rows] for x in (q, k, v))
        out, lse = selected_forward(q, k, v, indices, *options, window=window, cu_seqlens=bounds, kept=kept)
        missing = self.selection.length - rows
        return pad(out, (0, 0, 0, 0, 0, missing))[None], pad(lse, (0, missing), value=-torch.inf)[None]

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv, summed in float32."""
        from dilabench.kernels.selected.attention import selected_backward

        indices, bounds, kept = self._kept_for(q, k, v)
        options, window = (self.selection.block, self.selection.causal, self.scale), self.selection.window
        if bounds is None:
            return selected_backward(dout, q, k, v, out, lse, indices, *options, window=window, kept=kept)
        rows = self.bounds[-1]
        dout, q, k, v, out = (x[0, :rows] for x in (dout, q, k, v, out))
        lse = lse[0, :, :rows]
        gradients = selected_backward(
            dout, q, k, v, out, lse, indices, *options, window=window, cu_seqlens=bounds, kept=kept
        )
        missing = self.selection.length - rows
        dq, dk, dv = (pad(x, (0, 0, 0, 0, 0, missing))[None] for x in gradients)
        return dq, dk, dv

    def _kept_for(self, q: Tensor, k: Tensor, v: Tensor) -> _Kept:
        """The data for passes over such tensors on the current stream. Raises ValueError if tensors do not fit."""
        key = q.shape, k.shape, v.shape, type(q), stream_number(q)
        if key not in self._kept:
            from dilabench.kernels.selected.lists import KeptLists

            check(self.selection, q, k, v)
            indices = self.selection.indices
            indices = indices.to(torch.int32).expand(q.shape[0], *indices.shape[1:]).contiguous()
            bounds = None
            if self.bounds:
                indices = indices[0, : self.bounds[-1]]
                bounds = torch.tensor(self.bounds, dtype=torch.int32, device=q.device)
            self._kept[key] = _Kept(indices, bounds, KeptLists())
        return self._kept[key]


def serves(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if the kernels run there, and take such tensors."""
    return head_dim <= LARGEST_HEAD_DIM and has_kernel(device, dtype)
