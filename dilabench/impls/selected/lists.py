"""Attention over selected blocks on CPUs, by our own flash kernel over lists of seen keys.

A tile's rows are the query heads of one token that share their keys, so that each token's lists are its own.
"""

from __future__ import annotations

from collections.abc import Hashable
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
    _mask: Mask = field(init=False, repr=False)
    _kept: dict[Hashable, list[tuple[slice, Blocks]]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        SelectedAttention.__post_init__(self)
        # Lists hold what a causal mask and a window let each token see.
        object.__setattr__(self, "_mask", Mask(-1, -1, self.scale))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out and lse, summed in float32."""
        lists, (queries,), k, v = self._by_group(q, k, v, q)
        results = []
        for items, blocks in lists:
            results.append(flash.attend(queries[items], k[items], v[items], self._mask, blocks=blocks))
        out, lse = results[0] if len(results) == 1 else map(torch.cat, zip(*results, strict=True))
        B, N, H, _ = q.shape
        by_token = out.unflatten(1, (N, -1)).transpose(2, 3).reshape(q.shape).to(q.dtype)
        return by_token, lse.unflatten(2, (N, -1)).transpose(2, 3).reshape(B, H, N)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv, summed in float32."""
        kv_heads = k.shape[2]
        lists, of_queries, keys, values = self._by_group(q, k, v, dout, q, out)
        by_group = lse.unflatten(1, (kv_heads, -1)).transpose(2, 3).flatten(2).contiguous()
        gradients = []
        for items, blocks in lists:
            dout_rows, queries, out_rows = of_queries
            given = dout_rows[items], queries[items], keys[items], values[items], out_rows[items], by_group[items]
            gradients.append(flash.attend_backward(*given, self._mask, blocks=blocks))
        dq, dk, dv = gradients[0] if len(gradients) == 1 else map(torch.cat, zip(*gradients, strict=True))
        by_token = dq.unflatten(1, (q.shape[1], -1)).transpose(2, 3).reshape(q.shape)
        return by_token.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _by_group(
        self, q: Tensor, k: Tensor, v: Tensor, *of_queries: Tensor
    ) -> tuple[list[tuple[slice, Blocks]], list[Tensor], Tensor, Tensor]:
        """Batch items that share lists with these, [B, N · G, K, D] of each [B, N, K · G, D], and k and v."""
        kv_heads = k.shape[2]
        key = q.shape, k.shape, v.shape
        if key not in self._kept:
            check(self.selection, q, k, v)
            items = self.selection.indices.shape[0]
            spans = [slice(None)] if items == 1 else [slice(at, at + 1) for at in range(items)]
            lists = [lists_of(self.selection, q.shape[2] // kv_heads, item) for item in range(items)]
            self._kept[key] = [*zip(spans, lists, strict=True)]
        grouped = []
        for x in of_queries:
            grouped.append(x.unflatten(2, (kv_heads, -1)).transpose(2, 3).flatten(1, 2).contiguous())
        if not k.stride(-1) == v.stride(-1) == 1:
            k, v = k.contiguous(), v.contiguous()
        return self._kept[key], grouped, k, v


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
    hidden = torch.zeros(0, 2, length, dtype=torch.int32, device="cpu")
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
