"""What of a rank's K and V another rank needs, and how that is packed for the wire and unpacked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilabench.impls.ring.schedule.pieces import Piece


@dataclass(frozen=True, slots=True)
class Parcel:
    """Rows [first, stop) of the holder's K and V: all of them (`index` None), or single (row, head) vectors.

    index: int64 places in the flattened [rows, K] of the holder's rows from `first` on. A key that several branches
    need is in it once.
    """

    first: int
    stop: int
    vectors: int
    index: Tensor | None = None

    def shape(self, x: Tensor) -> tuple[int, ...]:
        """Shape of the packed form of x [B, N, K, D]."""
        if self.index is None:
            return x.shape[0], self.stop - self.first, x.shape[2], x.shape[3]
        return x.shape[0], self.vectors, x.shape[3]

    def pack(self, x: Tensor) -> Tensor:
        """The needed part of x [B, N, K, D]; a view of it where whole rows are needed."""
        rows = x[:, self.first : self.stop]
        if self.index is None:
            return rows
        return rows.flatten(1, 2).index_select(1, self.index)

    def unpack(self, packed: Tensor, num_heads: int) -> Tensor:
        """[B, stop - first, K, D]. Vectors that were not sent are uninitialised, and no piece reads them."""
        if self.index is None:
            return packed
        B, _, D = packed.shape
        rows = packed.new_empty(B, (self.stop - self.first) * num_heads, D)
        rows.index_copy_(1, self.index, packed)
        return rows.unflatten(1, (-1, num_heads))

    def pack_rows(self, rows: Tensor) -> Tensor:
        """The packed form of [B, stop - first, K, D]."""
        return rows if self.index is None else rows.flatten(1, 2).index_select(1, self.index)

    def add_vectors(self, total: Tensor, packed: Tensor) -> None:
        """Add packed single vectors to their places in total [B, N, K, D]."""
        assert self.index is not None
        # Two steps, for the rows of several batch items are no flat view of the total.
        for item, vectors in zip(total[:, self.first : self.stop], packed, strict=True):
            item.flatten(0, 1).index_add_(0, self.index, vectors.to(total.dtype))


def parcel_for(pieces: Sequence[Piece], rows: int, num_kv_heads: int, device: torch.device) -> Parcel | None:
    """What the pieces read of a holder with `rows` rows; None when they read nothing."""
    if not pieces:
        return None
    needed = torch.zeros(rows, num_kv_heads, dtype=torch.bool)
    for piece in pieces:
        piece.mark_keys(needed)
    touched = needed.any(1).nonzero()
    first, stop = int(touched[0]), int(touched[-1]) + 1
    inside = needed[first:stop]
    if bool(inside.all()):
        return Parcel(first, stop, inside.numel())
    index = inside.flatten().nonzero().flatten()
    return Parcel(first, stop, len(index), index.to(device))
