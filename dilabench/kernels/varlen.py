"""Packed sequences: every row sees one stretch of others, whose lists of tiles need no mask.

Both ends of a stretch rise from row to row, so that a tile of rows is known by its first and its last one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilabench.kernels.block_sparse.lists import TileLists
from dilabench.kernels.block_sparse.plan import ListedPlan
from dilabench.patterns.answers import HiddenRows

BLOCK = 128


class Reach(NamedTuple):
    """Row i sees the others from first[i] to before stop[i]; none where the two are equal. int64 [rows] each."""

    first: Tensor
    stop: Tensor


def keys_seen(cu_seqlens: Tensor, cu_seqlens_k: Tensor, rows: int, left: int, right: int) -> Reach:
    """The keys of each of so many queries, on the device of the bounds (int [S + 1]); the host waits for nothing.

    The last query of a sequence stands at its last key; a query sees `left` keys behind it and `right` ahead of it, -1
    for all. Swapped (bounds, and left with right) it gives the queries that see each key.
    """
    row = torch.arange(rows, device=cu_seqlens.device)
    bounds, others = cu_seqlens.long(), cu_seqlens_k.long()
    own = torch.bucketize(row, bounds[1:], right=True)
    begin, end = others[own], others[own + 1]
    at = row - bounds[own + 1] + end
    first = begin if left < 0 else torch.maximum(begin, at - left)
    stop = end if right < 0 else torch.minimum(end, at + right + 1)
    return Reach(first, torch.maximum(first, stop))


class TileReach(NamedTuple):
    """Of each tile of rows the other tiles from `first` to before `stop` that it may see a row of, and those from
    `full_first` to before `full_stop` of which every row of it sees every row. int64 [tiles] each."""

    first: Tensor
    stop: Tensor
    full_first: Tensor
    full_stop: Tensor


def tiles_seen(reach: Reach, tile: int, other_tile: int) -> TileReach:
    """By tiles of so many rows. A tile that is cut short counts as full by those it has."""
    rows = len(reach.first)
    starts = torch.arange(0, rows, tile, device=reach.first.device)
    lasts = (starts + tile).clamp(max=rows) - 1
    some = reach.stop[lasts] > reach.first[starts]
    first = reach.first[starts] // other_tile
    stop = torch.where(some, -(-reach.stop[lasts] // other_tile), first)
    full_first = -(-reach.first[lasts] // other_tile)
    full_stop = torch.maximum(full_first, reach.stop[starts] // other_tile)
    none = full_stop == full_first
    return TileReach(first, stop, torch.where(none, first, full_first), torch.where(none, first, full_stop))


@dataclass(frozen=True, eq=False)
class SequencePlan(ListedPlan):
    """Sequences that follow each other; causal edge and window are bounds of the keys like those of the sequences.

    ``seen``: the keys that each query sees, ``seeing``: the queries that see each key, on the CPU. Make it with
    `sequence_plan`. Time and memory are linear in rows and in the tiles that are listed.
    """

    seen: Reach
    seeing: Reach
    rows: int
    key_rows: int
    hidden: HiddenRows
    block_size: int = BLOCK
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    _kept: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @property
    def mask_heads(self) -> int:
        """All heads see the same."""
        return 1

    def seen_blocks(self, mask_head: int, block: int) -> npt.NDArray[np.int64]:  # noqa: ARG002
        """Those between the first and the last."""
        tiles = tiles_seen(self.seen, self.block_size, self.block_size)
        return np.arange(int(tiles.first[block]), int(tiles.stop[block]))

    def make_lists(self, block_m: int, block_n: int, by_key: bool) -> TileLists:
        """From the stretch of partners of each tile, those in the midst of it being wholly visible."""
        own = (self.seeing, block_n, block_m) if by_key else (self.seen, block_m, block_n)
        first, stop, full_first, full_stop = tiles_seen(*own)
        listed, full = stop - first, full_stop - full_first
        starts = listed.cumsum(0) - listed
        tile = torch.arange(len(listed)).repeat_interleave(listed)
        place = torch.arange(len(tile)) - starts[tile]
        partly = place - full[tile]
        before = (full_first - first)[tile]
        masked = first[tile] + partly + torch.where(partly < before, 0, full[tile])
        partners = torch.where(partly < 0, full_first[tile] + place, masked)
        return TileLists.of(partners, starts[None], full[None], (listed - full)[None])


def sequence_plan(
    bounds: Sequence[int],
    causal: bool,
    window: tuple[int, int] = (-1, -1),
    key_bounds: Sequence[int] | None = None,
) -> SequencePlan:
    """The plan of packed sequences from ``bounds[i]`` to ``bounds[i + 1]``, and of their keys where these differ.

    The last query of a sequence stands at its last key.
    """
    queries, keys = torch.tensor(bounds), torch.tensor(bounds if key_bounds is None else key_bounds)
    left, right = window[0], 0 if causal else window[1]
    rows, key_rows = int(queries[-1]), int(keys[-1])
    seen, seeing = keys_seen(queries, keys, rows, left, right), keys_seen(keys, queries, key_rows, right, left)
    first, stop = (x.numpy() for x in seeing)
    hidden = HiddenRows.of(rows, (np.zeros_like(first), first), (stop, np.full_like(stop, rows)))
    return SequencePlan(seen, seeing, rows, key_rows, hidden)


def varlen_forward(q: Tensor, k: Tensor, v: Tensor, plan: SequencePlan, *, scale: float) -> tuple[Tensor, Tensor]:
    """out [1, T, H, D] and lse [1, H, T] of q [1, T, H, D] and k, v [1, T', K, D], all sequences in one launch."""
    # Triton is not installed everywhere, and only CUDA needs it.
    from dilabench.kernels.block_sparse.forward import block_sparse_forward

    return block_sparse_forward(q, k, v, plan, scale=scale)


def varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: SequencePlan, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from the results of `varlen_forward`."""
    from dilabench.kernels.block_sparse.backward import block_sparse_backward

    return block_sparse_backward(dout, q, k, v, out, lse, plan, scale=scale)
