"""Attention over selected blocks on CPUs, by our own flash kernel over lists of seen keys.

A tile's rows are the query heads of one token that share their keys, so that each token's lists are its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dilabench.impls.selected.selection import SelectedAttention, Selection, check
from dilabench.kernels.cpu import flash
from dilabench.kernels.cpu.flash import Blocks, Mask

# Indices that are sorted together.
SORTED_AT_ONCE = 2**20


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Listed(SelectedAttention):
    """Over one sequence, padded, of types that `flash.serves`. Lists are made at the first pass and kept."""

    selection: Selection
    scale: float
    _kept: dict[int, list[Blocks]] = field(default_factory=dict, init=False, repr=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out and lse, summed in float32."""
        check(self.selection, q, k, v)
        results = [
            flash.attend(queries, keys, values, self._mask, blocks=blocks)
            for (queries, keys, values), blocks in self._items(q, (k, v))
        ]
        out, lse = (torch.cat(parts) for parts in zip(*results, strict=True))
        return _by_token(out, q.shape).to(q.dtype), _lse_by_token(lse, q.shape)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv, summed in float32."""
        check(self.selection, q, k, v)
        kv_heads = k.shape[2]
        by_group = lse.unflatten(1, (kv_heads, -1)).transpose(2, 3).flatten(2)
        douts, outs = (_by_group(x, kv_heads) for x in (dout, out))
        gradients, first = [], 0
        for (queries, keys, values), blocks in self._items(q, (k, v)):
            items = slice(first, first + len(queries))
            results = outs[items], by_group[items].contiguous()
            gradients.append(
                flash.attend_backward(douts[items], queries, keys, values, *results, self._mask, blocks=blocks)
            )
            first = items.stop
        dq, dk, dv = (torch.cat(parts) for parts in zip(*gradients, strict=True))
        return _by_token(dq, q.shape).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    @property
    def _mask(self) -> Mask:
        # Lists hold what a causal mask and a window let each token see.
        return Mask(-1, -1, self.scale)

    def _items(self, q: Tensor, of_keys: tuple[Tensor, Tensor]) -> list[tuple[tuple[Tensor, Tensor, Tensor], Blocks]]:
        """Batch items that share lists, q as [B, N · G, K, D]."""
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in of_keys)
        queries, lists = _by_group(q, k.shape[2]), self._lists(q.shape[2] // k.shape[2])
        if len(lists) == 1:
            return [((queries, k, v), lists[0])]
        return [((queries[at : at + 1], k[at : at + 1], v[at : at + 1]), blocks) for at, blocks in enumerate(lists)]

    def _lists(self, group: int) -> list[Blocks]:
        if group not in self._kept:
            items = self.selection.indices.shape[0]
            self._kept[group] = [lists_of(self.selection, group, item) for item in range(items)]
        return self._kept[group]


def lists_of(selection: Selection, group: int, item: int = 0) -> Blocks:
    """For each key/value head and token the ranges of keys that it sees, `group` query heads having the same."""
    length, kv_heads = selection.length, selection.indices.shape[2]
    at_once = max(1, SORTED_AT_ONCE // max(1, kv_heads * selection.indices.shape[3]))
    parts = [_ranges(selection, item, first, min(first + at_once, length)) for first in range(0, length, at_once)]
    counts = np.concatenate([counts for counts, _ in parts], axis=1)
    # Lists follow each other head by head.
    by_head = [np.concatenate([ranges[head] for _, ranges in parts]) for head in range(kv_heads)]
    ranges = np.concatenate(by_head)
    spans = np.concatenate([[0], counts.ravel().cumsum()])
    pairs = group * int((ranges[:, 1] - ranges[:, 0]).sum())
    hidden = torch.zeros(0, 2, length, dtype=torch.int32)
    return Blocks(group, kv_heads, torch.from_numpy(spans), torch.from_numpy(ranges), hidden, pairs)


def _ranges(selection: Selection, item: int, first: int, last: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """How many ranges each head and row has, [K, R], and the ranges of each head, int64 [·, 2]; neighbours as one."""
    one = Selection(selection.indices[item : item + 1], selection.block, selection.causal, selection.window)
    if isinstance(selection.indices, FakeTensor):
        # Memory is traced, without numbers: as many ranges as there can be, of which no two are neighbours.
        _, _, kv_heads, slots = selection.indices.shape
        apart = np.arange(0, selection.blocks, 2)[:slots]
        blocks = np.broadcast_to(apart, (kv_heads, last - first, len(apart)))
    else:
        blocks = one.distinct(first, last)[0].transpose(0, 1).cpu().numpy()
    rows = np.arange(first, last)[:, None]
    left, right = selection.reach
    low = np.zeros_like(rows) if left is None else np.maximum(rows - left, 0)
    high = np.full_like(rows, selection.length) if right is None else np.minimum(rows + right + 1, selection.length)
    begins = np.maximum(blocks * selection.block, low)
    ends = np.minimum((blocks + 1) * selection.block, high)
    seen = begins < ends
    # A range goes on where the next one begins at its end; ranges that are not seen are last, or before the window.
    goes_on = np.zeros_like(seen)
    goes_on[..., 1:] = seen[..., 1:] & seen[..., :-1] & (begins[..., 1:] == ends[..., :-1])
    is_first = seen & ~goes_on
    is_last = seen.copy()
    is_last[..., :-1] &= ~goes_on[..., 1:]
    ranges = [np.stack((begins[head][is_first[head]], ends[head][is_last[head]]), 1) for head in range(len(blocks))]
    return is_first.sum(-1), ranges


def _by_group(x: Tensor, kv_heads: int) -> Tensor:
    """[B, N · G, K, D] of x [B, N, K · G, D]."""
    return x.unflatten(2, (kv_heads, -1)).transpose(2, 3).flatten(1, 2).contiguous()


def _by_token(x: Tensor, shape: torch.Size) -> Tensor:
    """The reverse of `_by_group`."""
    return x.unflatten(1, (shape[1], -1)).transpose(2, 3).reshape(shape)


def _lse_by_token(lse: Tensor, shape: torch.Size) -> Tensor:
    """[B, H, N] of lse [B, K, N · G]."""
    return lse.unflatten(2, (shape[1], -1)).transpose(2, 3).flatten(1, 2).contiguous()
