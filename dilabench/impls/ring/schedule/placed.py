"""Results of pieces that share no query row: each is written to its rows of the whole, and nothing is summed.

Backends with `places_results` write them there directly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dilabench.distributed.transport.strided_copy import copy_strided_
from dilabench.impls.ring.schedule.pieces import Piece


class PlacedSum:
    """A tensor [B, N, H, D] like q from the rows of pieces. A piece of all rows is the tensor."""

    def __init__(self, q: Tensor) -> None:
        self._q = q
        self._whole: Tensor | None = None

    def place(self, piece: Piece) -> Tensor | None:
        """Where a kernel may write a piece's result; None for a piece of all rows."""
        if piece.queries == self._q.shape[1]:
            return None
        if self._whole is None:
            self._whole = torch.empty_like(self._q)
        return piece.take_queries(self._whole)

    def add_queries(self, piece: Piece, part: Tensor) -> None:
        """Copy a piece's result [B, L, H, D] to its rows, unless the kernel wrote it there."""
        place = self.place(piece)
        if place is None:
            self._whole = part
        elif place.data_ptr() != part.data_ptr():
            copy_strided_(place, part)

    def finish(self) -> Tensor:
        """The whole tensor [B, N, H, D]; zeros if there was no piece."""
        return torch.zeros_like(self._q) if self._whole is None else self._whole


class PlacedSoftmax:
    """out [B, N, H, D] and lse [B, H, N] of the queries, written piece by piece."""

    def __init__(self, q: Tensor) -> None:
        B, N, H, _ = q.shape
        self._out = PlacedSum(q)
        lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self._lse = q.new_full((B, H, N), float("-inf"), dtype=lse_dtype)

    def place(self, piece: Piece) -> Tensor | None:
        """Where a kernel may write a piece's out [B, L, H, D]; None for a piece of all rows."""
        return self._out.place(piece)

    def add(self, piece: Piece, out: Tensor, lse: Tensor) -> None:
        """Results of a piece, [B, L, H, D] and [B, H, L]."""
        self._out.add_queries(piece, out)
        piece.take_lse(self._lse).copy_(lse)

    def finish(self) -> tuple[Tensor, Tensor]:
        """out and lse."""
        return self._out.finish(), self._lse
