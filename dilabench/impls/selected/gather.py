"""`selected-gather`: attention over selected blocks with keys and values copied by index, for some rows at a time.

The plain method in torch, for any device and dtype. Keys that a row does not see never change it, whatever they hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.impls.operator_rules import contiguous_like, empty_results
from dilabench.impls.selected.selection import SelectedAttention, Selection, check, over_sequences
from dilabench.impls.selected.stand_ins import selection_of
from dilabench.workload.spec import Workload

# The most numbers of gathered keys in memory at a time: 64 MiB in float32.
GATHERED_AT_ONCE = 2**24


def build(workload: Workload, context: BuildContext) -> SelectedAttention:
    """Indices are made here. Raises ConfigError when a file of indices does not fit."""
    selection = selection_of(workload, context.device)
    return over_sequences(Gathered, selection, workload.softmax_scale, workload.cu_seqlens or ())


class Piece(NamedTuple):
    """Some rows with the keys of their blocks. `place` int64 [B, R, K, M]: rows of k, v [B · N · K, D]; `seen`: which
    of them the row sees, the others standing for any row."""

    rows: slice
    place: Tensor
    seen: Tensor


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Gathered(SelectedAttention):
    """Over one sequence, padded."""

    selection: Selection
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out and lse, in at least float32."""
        check(self.selection, q, k, v)
        out, lse = empty_results(q, v)
        for piece in self._pieces(q, k):
            keys, values = (_gathered(x, piece) for x in (k, v))
            scores = self._scores(q, keys, piece)
            piece_lse = scores.logsumexp(-1)
            shares = scores.sub_(_finite(piece_lse)).exp_()
            out[:, piece.rows] = (shares @ values).flatten(2, 3).to(out.dtype)
            lse[:, :, piece.rows] = piece_lse.flatten(2, 3).transpose(1, 2)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv, summed in at least float32."""
        check(self.selection, q, k, v)
        batch, rows, kv_heads, dim = k.shape
        wide = torch.promote_types(q.dtype, torch.float32)
        dq = contiguous_like(q)
        dk, dv = (k.new_zeros((batch * rows * kv_heads + 1, dim), dtype=wide) for _ in range(2))
        for piece in self._pieces(q, k):
            keys, values = (_gathered(x, piece) for x in (k, v))
            queries, gradients, outs = (_by_group(x, piece, kv_heads) for x in (q, dout, out))
            of_rows = lse[:, :, piece.rows].transpose(1, 2).unflatten(2, (kv_heads, -1)).to(wide)
            shares = self._scores(q, keys, piece).sub_(_finite(of_rows)).exp_()
            slopes = gradients @ values.mT
            slopes.sub_((gradients * outs).sum(-1, keepdim=True)).mul_(shares).mul_(self.scale)
            dq[:, piece.rows] = (slopes @ keys).flatten(2, 3).to(dq.dtype)
            # Hidden keys are added to a last row, which is dropped: they would spread a NaN of dout.
            place = piece.place.where(piece.seen, len(dk) - 1).flatten()
            dk.index_add_(0, place, (slopes.mT @ queries).flatten(0, 3))
            dv.index_add_(0, place, (shares.mT @ gradients).flatten(0, 3))
        dk, dv = (x[:-1].view(k.shape).to(k.dtype) for x in (dk, dv))
        return dq, dk, dv

    def _scores(self, q: Tensor, keys: Tensor, piece: Piece) -> Tensor:
        """[B, R, K, G, M]: scale · q · k, -inf for keys that are not seen."""
        queries = _by_group(q, piece, keys.shape[2])
        scores = (queries @ keys.mT).mul_(self.scale)
        return scores.masked_fill_(~piece.seen[..., None, :], -torch.inf)

    def _pieces(self, q: Tensor, k: Tensor) -> Iterator[Piece]:
        """All rows, as many at a time as memory is meant for."""
        selection, (batch, length, kv_heads, dim) = self.selection, k.shape
        width = selection.block * min(selection.indices.shape[-1], selection.blocks)
        at_once = max(1, GATHERED_AT_ONCE // max(1, batch * kv_heads * width * dim))
        within = torch.arange(selection.block, device=q.device)
        heads = torch.arange(kv_heads, device=q.device)[:, None]
        items = torch.arange(batch, device=q.device)[:, None, None, None]
        left, right = selection.reach
        for first in range(0, length, at_once):
            last = min(first + at_once, length)
            # Blocks that are none lie behind the last token.
            token = (selection.distinct(first, last)[..., None] * selection.block + within).flatten(-2)
            row = torch.arange(first, last, device=q.device)[:, None, None]
            seen = token < length
            if left is not None:
                seen &= token >= row - left
            if right is not None:
                seen &= token <= row + right
            place = (items * length + token.where(seen, 0)) * kv_heads + heads
            yield Piece(slice(first, last), place, seen.expand(place.shape))


def _gathered(x: Tensor, piece: Piece) -> Tensor:
    """[B, R, K, M, D] in at least float32: rows of k or v, zeros for those that are not seen."""
    rows = x.reshape(-1, x.shape[-1]).index_select(0, piece.place.flatten()).view(*piece.place.shape, -1)
    wide = torch.promote_types(x.dtype, torch.float32)
    return rows.to(wide).masked_fill_(~piece.seen[..., None], 0.0)


def _by_group(x: Tensor, piece: Piece, kv_heads: int) -> Tensor:
    """[B, R, K, G, D] of x [B, N, H, D], in at least float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x[:, piece.rows].unflatten(2, (kv_heads, -1)).to(wide)


def _finite(lse: Tensor) -> Tensor:
    """lse as a column to subtract; 0 for a row without keys, whose shares are then exp(-inf) = 0."""
    return lse.masked_fill(lse == -torch.inf, 0.0)[..., None]
