"""Merges partial results: out and lse as one softmax, gradients as sums; held in a wider dtype than the tensors.

On CUDA, parts on ranges of rows are kept until `finish`, where one kernel reads them all and writes the result: one
pass over memory instead of one per part. Other parts are added immediately.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dilabench.distributed.transport.strided_copy import copy_strided_
from dilabench.impls.ring.schedule.pieces import Piece
from dilabench.kernels.lse import MOST_PARTS, merge_rows_


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float32 for half precision, otherwise float64, so that merging costs no accuracy."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else torch.float64


def defers(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether parts wait for each other: where a kernel sums them, which it does in float32."""
    return device.type == "cuda" and wide(dtype) == torch.float32


class Softmax:
    """out and lse of one rank's queries, from results over disjoint sets of keys.

    Added results belong to it, and the first one may become the result.
    """

    def __init__(self, q: Tensor) -> None:
        self._q = q
        self._defers = defers(q.dtype, q.device)
        # Each with its first row; once there are totals, these come first.
        self._parts: list[tuple[Tensor, Tensor, int]] = []
        self._totals: tuple[Tensor, Tensor] | None = None

    def put(self, out: Tensor, lse: Tensor) -> None:
        """Results [B, N, H, D] and [B, H, N] for all queries; only as the first ones."""
        assert not self._parts
        self._parts.append((out, lse, 0))

    def place(self, _piece: Piece) -> Tensor | None:
        """None: no result has a place before it is merged."""
        return None

    def add(self, piece: Piece, out: Tensor, lse: Tensor) -> None:
        """Results of a piece, [B·G, L, A, D] and [B·G, A, L]."""
        first = piece.query_rows(self._q.shape[2])
        if first is not None and (self._defers or (not self._parts and out.shape[1] == self._q.shape[1])):
            if len(self._parts) == MOST_PARTS:
                self._folded()
            self._parts.append((out, lse, first))
            return
        total, total_lse = self._folded()
        part = piece.apart(out)
        if total.device.type == "cpu" or total.dtype == torch.float64:
            part = part.to(total.dtype)
        merge_rows_(piece.view_queries(total), piece.view_lse(total_lse), part, piece.apart(lse))

    def finish(self) -> tuple[Tensor, Tensor]:
        """out in q's dtype, and lse."""
        q = self._q
        lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        if not self._parts:
            self._folded()
        out, lse, _ = self._parts[0]
        if self._one_is_all:
            return out.to(q.dtype).contiguous(), lse.to(lse_dtype).contiguous()
        if _may_hold_all(out, self._q.shape, q.dtype) and lse.is_contiguous() and lse.dtype == lse_dtype:
            _softmax_onto_(out, lse, self._parts[1:])
            return out, lse
        out, lse = q.new_empty(q.shape), q.new_empty(self._lse_shape, dtype=lse_dtype)
        _softmax_(out, lse, self._parts)
        return out, lse

    def _folded(self) -> tuple[Tensor, Tensor]:
        """Wide totals of all that was added, to add to."""
        if self._totals is None:
            self._totals = self._first_totals()
        elif len(self._parts) > 1:
            _softmax_onto_(*self._totals, self._parts[1:])
        self._parts = [(*self._totals, 0)]
        return self._totals

    def _first_totals(self) -> tuple[Tensor, Tensor]:
        dtype, q = wide(self._q.dtype), self._q
        if self._one_is_all:
            out, lse, _ = self._parts[0]
            copied = out.to(dtype, memory_format=torch.contiguous_format, copy=True)
            return copied, lse.to(dtype, memory_format=torch.contiguous_format, copy=True)
        out = torch.zeros(q.shape, dtype=dtype, device=q.device)
        lse = q.new_full(self._lse_shape, float("-inf"), dtype=dtype)
        if self._parts:
            _softmax_(out, lse, self._parts)
        return out, lse

    @property
    def _one_is_all(self) -> bool:
        return len(self._parts) == 1 and self._parts[0][0].shape[1] == self._q.shape[1]

    @property
    def _lse_shape(self) -> tuple[int, int, int]:
        B, N, H, _ = self._q.shape
        return B, H, N


class Sum:
    """The sum of partial gradients of a tensor [B, N, K, D].

    Added parts are read until `finish`: they must not be overwritten. onto_first: nothing else reads the first one, so
    that it may become the sum.
    """

    def __init__(
        self,
        shape: torch.Size | tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *,
        onto_first: bool = False,
    ) -> None:
        self._shape, self._dtype, self._device, self._onto_first = shape, dtype, device, onto_first
        self._defers = defers(dtype, device)
        # Each with its first row; once there is a total, it comes first.
        self._parts: list[tuple[Tensor, int]] = []
        self._total: Tensor | None = None

    @classmethod
    def like(cls, x: Tensor, *, onto_first: bool = False) -> Sum:
        """For the gradient of x."""
        return cls(x.shape, x.dtype, x.device, onto_first=onto_first)

    def put(self, part: Tensor, first: int = 0) -> None:
        """Add [B, R, K, D] to the rows from `first` on; a first part that covers all rows is free."""
        if not self._defers and (self._parts or part.shape[1] != self._shape[1]):
            self.total()[:, first : first + part.shape[1]].add_(part)
            return
        if len(self._parts) == MOST_PARTS:
            self.total()
        self._parts.append((part, first))

    def place(self, _piece: Piece) -> Tensor | None:
        """None: no part has a place before it is added."""
        return None

    def add_queries(self, piece: Piece, part: Tensor) -> None:
        """Add a piece's [B·G, L, A, D] to the rows of its queries."""
        first = piece.query_rows(self._shape[2])
        if first is None:
            piece.add_queries(self.total(), part)
        else:
            self.put(part, first)

    def add_keys(self, piece: Piece, part: Tensor, first_row: int = 0) -> None:
        """Add a piece's [B·G, L, A', D] to the rows of its keys; row 0 is the owner's `first_row`."""
        first = piece.key_rows(self._shape[2], first_row)
        if first is None:
            piece.add_keys(self.total(), part, first_row)
        else:
            self.put(part, first)

    def add_rows(self, other: Sum, source: int, rows: int, first: int) -> None:
        """Add rows [source, source + rows) of another sum to those from `first` on, before they are rounded there."""
        for part, at in other._parts:
            start, stop = max(source, at), min(source + rows, at + part.shape[1])
            if start < stop:
                self.put(part[:, start - at : stop - at], first + start - source)

    def total(self) -> Tensor:
        """The sum so far, to add to."""
        if self._total is None:
            self._total = self._first_total()
        elif len(self._parts) > 1:
            _sum_onto_(self._total, self._parts[1:])
        self._parts = [(self._total, 0)]
        return self._total

    def finish(self, dtype: torch.dtype | None = None) -> Tensor:
        """The sum in a dtype (by default the tensor's own); a single part without a copy."""
        if not self._parts:
            self.total()
        first, dtype = self._parts[0][0], dtype or self._dtype
        if self._one_is_all:
            return first.to(dtype)
        if self._onto_first and _may_hold_all(first, self._shape, dtype):
            _sum_onto_(first, self._parts[1:])
            return first
        result = torch.empty(self._shape, dtype=dtype, device=self._device)
        _sum_(result, self._parts)
        return result

    def _first_total(self) -> Tensor:
        if self._one_is_all:
            return self._parts[0][0].to(wide(self._dtype), memory_format=torch.contiguous_format, copy=True)
        total = torch.zeros(self._shape, dtype=wide(self._dtype), device=self._device)
        if self._parts:
            _sum_(total, self._parts)
        return total

    @property
    def _one_is_all(self) -> bool:
        return len(self._parts) == 1 and self._parts[0][0].shape[1] == self._shape[1]


class PlacedSum:
    """A tensor [B, N, H, D] like q from the rows of pieces that share no query row, so without sums.

    A piece of all rows is the tensor. Backends with `places_results` write each result to its rows directly.
    """

    def __init__(self, q: Tensor) -> None:
        self._q = q
        self._whole: Tensor | None = None

    def place(self, piece: Piece) -> Tensor | None:
        """The memory for a piece's result; None for a piece of all rows."""
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
        """The memory for a piece's out [B, L, H, D]; None for a piece of all rows."""
        return self._out.place(piece)

    def add(self, piece: Piece, out: Tensor, lse: Tensor) -> None:
        """Results of a piece, [B, L, H, D] and [B, H, L]."""
        self._out.add_queries(piece, out)
        piece.take_lse(self._lse).copy_(lse)

    def finish(self) -> tuple[Tensor, Tensor]:
        """out and lse."""
        return self._out.finish(), self._lse


class SoftmaxOnto:
    """out [B, N, H, D] and lse [B, H, N] of all queries, onto which pieces that share no query row are merged in place:
    one pass over their rows alone.
    """

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self._out, self._lse = out, lse
        self._defers = defers(out.dtype, out.device)

    def place(self, _piece: Piece) -> Tensor | None:
        """None: no result has a place before it is merged."""
        return None

    def add(self, piece: Piece, out: Tensor, lse: Tensor) -> None:
        """Results of a piece, [B, L, H, D] and [B, H, L]."""
        rows, rows_lse = piece.take_queries(self._out), piece.take_lse(self._lse)
        if self._defers:
            _softmax_(rows, rows_lse, [(rows, rows_lse, 0), (out, lse, 0)])
        else:
            merge_rows_(rows, rows_lse, out, lse)

    def finish(self) -> tuple[Tensor, Tensor]:
        """out and lse."""
        return self._out, self._lse


class SumOnto:
    """A gradient `total` of all queries, set before `finish`, which adds pieces without a common query row to it."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self._parts: list[tuple[Piece, Tensor]] = []

    def place(self, _piece: Piece) -> Tensor | None:
        """None: no part has a place before it is added."""
        return None

    def add_queries(self, piece: Piece, part: Tensor) -> None:
        """Add a piece's [B, L, H, D], which must not be overwritten before `finish`."""
        self._parts.append((piece, part))

    def finish(self) -> Tensor:
        """The whole gradient [B, N, H, D]."""
        assert self.total is not None
        for piece, part in self._parts:
            rows = piece.take_queries(self.total)
            if defers(rows.dtype, rows.device):
                _sum_(rows, [(rows, 0), (part, 0)])
            else:
                rows.add_(part)
        return self.total


def _range(parts: list[tuple[Tensor, int]]) -> tuple[int, int]:
    """The rows of parts, first and stop: folding many short parts must not pass over all rows each time."""
    if len(parts) == 1:
        part, first = parts[0]
        return first, first + part.shape[1]
    return min(first for _, first in parts), max(first + part.shape[1] for part, first in parts)


def _may_hold_all(part: Tensor, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether the first part may become the result: only rows that others cover are then read and written again."""
    return part.shape == shape and part.dtype == dtype and part.is_contiguous()


def _sum_onto_(total: Tensor, parts: list[tuple[Tensor, int]]) -> None:
    """Add parts to a total."""
    start, stop = _range(parts)
    rows = total if stop - start == total.shape[1] else total.narrow(1, start, stop - start)
    _sum_(rows, [(rows, 0), *((part, first - start) for part, first in parts)])


def _softmax_onto_(out: Tensor, lse: Tensor, parts: list[tuple[Tensor, Tensor, int]]) -> None:
    """Merge parts into a result."""
    start, stop = _range([(part, first) for part, _, first in parts])
    if stop - start < out.shape[1]:
        out, lse = out.narrow(1, start, stop - start), lse.narrow(2, start, stop - start)
    _softmax_(out, lse, [(out, lse, 0), *((part, part_lse, first - start) for part, part_lse, first in parts)])


def _sum_(total: Tensor, parts: list[tuple[Tensor, int]]) -> None:
    # Triton is not installed everywhere, and only CUDA needs it.
    from dilabench.kernels.combine import sum_parts_

    sum_parts_(total, parts)


def _softmax_(out: Tensor, lse: Tensor, parts: list[tuple[Tensor, Tensor, int]]) -> None:
    from dilabench.kernels.combine import combine_

    combine_(out, lse, parts)
