"""Partial results become one: out and lse as one softmax, gradients as sums; held wider than the tensors themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from dilabench.impls.merging import merge_rows_
from dilabench.impls.ring.pieces import Piece


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are held in: float32 for half precision, otherwise float64, so that merging costs no accuracy."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else torch.float64


class Softmax:
    """out and lse of one rank's queries, from results over disjoint sets of keys."""

    def __init__(self, q: Tensor) -> None:
        self._q = q
        self._alone: tuple[Tensor, Tensor] | None = None
        self._merged: tuple[Tensor, Tensor] | None = None

    def put(self, out: Tensor, lse: Tensor) -> None:
        """Results [B, N, H, D] and [B, H, N] for all queries; only as the first ones."""
        assert self._alone is None
        assert self._merged is None
        self._alone = out, lse

    def add(self, piece: Piece, out: Tensor, lse: Tensor) -> None:
        """Results of a piece, [B·G, L, A, D] and [B·G, A, L]."""
        if self._alone is None and self._merged is None and piece.is_whole(self._q):
            self.put(out, lse)
            return
        total, total_lse = self._totals()
        part = piece.apart(out)
        if total.device.type == "cpu" or total.dtype == torch.float64:
            part = part.to(total.dtype)
        merge_rows_(piece.view_queries(total), piece.view_lse(total_lse), part, piece.apart(lse))

    def finish(self) -> tuple[Tensor, Tensor]:
        """out in q's dtype, and lse."""
        if self._alone is not None:
            return self._alone[0].contiguous(), self._alone[1].contiguous()
        out, lse = self._totals()
        lse_dtype = torch.float64 if self._q.dtype == torch.float64 else torch.float32
        return out.to(self._q.dtype), lse.to(lse_dtype)

    def _totals(self) -> tuple[Tensor, Tensor]:
        if self._merged is None:
            B, N, H, _ = self._q.shape
            dtype = wide(self._q.dtype)
            if self._alone is not None:
                out, lse = self._alone
                copied = out.to(dtype, memory_format=torch.contiguous_format, copy=True)
                self._merged = copied, lse.to(dtype, memory_format=torch.contiguous_format, copy=True)
            else:
                zeros = torch.zeros(self._q.shape, dtype=dtype, device=self._q.device)
                self._merged = zeros, self._q.new_full((B, H, N), float("-inf"), dtype=dtype)
            self._alone = None
        return self._merged


class Sum:
    """The sum of partial gradients of a tensor."""

    def __init__(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._alone: Tensor | None = None
        self._total: Tensor | None = None

    @classmethod
    def like(cls, x: Tensor) -> Sum:
        """For the gradient of x."""
        return cls(x.shape, x.dtype, x.device)

    def put(self, part: Tensor) -> None:
        """Add a part that covers everything; the first one costs nothing."""
        if self._alone is None and self._total is None:
            self._alone = part
        else:
            self.total().add_(part)

    def total(self) -> Tensor:
        """The sum so far, to add to."""
        if self._total is None:
            dtype = wide(self._dtype)
            if self._alone is None:
                self._total = torch.zeros(self._shape, dtype=dtype, device=self._device)
            else:
                self._total = self._alone.to(dtype, memory_format=torch.contiguous_format, copy=True)
            self._alone = None
        return self._total

    def finish(self, dtype: torch.dtype | None = None) -> Tensor:
        """The sum in a dtype (by default the tensor's own), contiguous."""
        result = self._alone if self._alone is not None else self.total()
        return result.to(dtype or self._dtype).contiguous()
