"""Lists of tiles from the indices of selected key blocks, made on the device without a copy to the host.

The shape alone decides the size of every tensor, so the host need not wait for a count. A model pays for planning in
every call, unlike with a mask that is known in advance.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilabench.kernels.block_sparse.lists import QueryLists, Selection, TileLists
from dilabench.kernels.block_sparse.plan import Plan
from dilabench.kernels.tuning import TileConfig
from dilabench.patterns.answers import HiddenRows


@dataclass(frozen=True, eq=False)
class SelectedPlan(Plan):
    """The key blocks of each block of queries: ``indices`` int [heads, n, k] on the device, n blocks of ``block_size``.

    In any order; a repeated index counts once, and one outside of 0..n-1 means no block. Successive query heads share a
    head of the indices. Queries and keys are the same ``rows``.
    """

    indices: Tensor
    block_size: int
    rows: int
    causal: bool
    window: tuple[int, int] = (-1, -1)
    key_rows: None = field(default=None, init=False)
    hidden: HiddenRows | None = field(default=None, init=False)
    _kept: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def mask_heads(self) -> int:
        """Heads of the indices."""
        return self.indices.shape[0]

    def seen_blocks(self, mask_head: int, block: int) -> npt.NDArray[np.int64]:
        """A row of the indices, each once."""
        rows = self.keep("on the host", lambda: self._distinct().cpu().numpy())[mask_head, block]
        return np.asarray(rows[rows < self.indices.shape[1]], dtype=np.int64)

    def lists(self, block_m: int, block_n: int, by_key: bool) -> TileLists:
        """By key; `query_lists` has the others."""
        from dilabench.kernels.block_sparse.selected_lists import lists_by_key

        assert by_key
        return lists_by_key(self._selection(), block_m, block_n)

    def query_lists(self, tiles: TileConfig, device: torch.device) -> QueryLists:
        """In one launch, on the device of the indices."""
        # Triton is not installed everywhere, and only lists of tiles need it.
        from dilabench.kernels.block_sparse.selected_lists import lists_by_query

        assert device.type == self.indices.device.type
        key = ("by query", tiles.block_m, tiles.block_n)
        return self.keep(key, lambda: lists_by_query(self._selection(), tiles.block_m, tiles.block_n))

    def _selection(self) -> Selection:
        return Selection(self.indices, self.block_size, self.visibility)

    def _distinct(self) -> Tensor:
        """int64 [heads, n, k]: each index once, ascending, then n as padding."""
        blocks = self.indices.shape[1]
        known = (self.indices >= 0) & (self.indices < blocks)
        rising = self.indices.long().where(known, blocks).sort(-1).values
        again = torch.zeros_like(rising, dtype=torch.bool)
        again[..., 1:] = rising[..., 1:] == rising[..., :-1]
        return rising.masked_fill(again, blocks).sort(-1).values


def select_blocks(
    q: Tensor, k: Tensor, block_size: int, top_k: int, *, causal: bool, own_block: bool = False
) -> Tensor:
    """int32 [K, n, min(top_k, n)]: the best key blocks of each block of queries for each key/value head, -1 for none.

    q [N, H, D], k [N, K, D]; n blocks of ``block_size`` rows. The score is mean query, summed over the heads that share
    the keys, times mean key, in float32 (VSA; ``own_block`` always as MoBA). ``causal``: no block ahead. At equal
    scores the earlier block is better. No gradient, and no copy to the host.
    """
    with torch.no_grad():
        queries = _block_means(q, block_size).unflatten(1, (k.shape[1], -1)).sum(2)
        keys = _block_means(k, block_size)
        scores = torch.einsum("ihd,jhd->hij", queries, keys)
        blocks = torch.arange(scores.shape[-1], device=q.device)
        if own_block:
            scores = scores.masked_fill(blocks == blocks[:, None], torch.inf)
        if causal:
            scores = scores.masked_fill(blocks > blocks[:, None], -torch.inf)
        # As integers of the same order, so that the block itself can decide between equal scores. -0.0 is 0.0 here.
        bits = (scores + 0.0).view(torch.int32).long()
        rank = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) * len(blocks) - blocks
        best = rank.topk(min(top_k, len(blocks)), dim=-1, sorted=False).indices
        return best.masked_fill(scores.gather(-1, best) == -torch.inf, -1).int()


def _block_means(x: Tensor, block_size: int) -> Tensor:
    """[n, heads, D] in float32: means of successive blocks of x [N, heads, D], the last of which may be short."""
    rows = x.shape[0]
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -rows % block_size))
    total = padded.unflatten(0, (-1, block_size)).sum(1, dtype=torch.float32)
    sizes = (rows - torch.arange(len(total), device=x.device) * block_size).clamp_max(block_size)
    return total / sizes[:, None, None]
