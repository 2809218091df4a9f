"""Packed sequences: every row sees one range of others, whose tiles need no mask except the first and last ones.

Both ends of a range ascend from row to row, so the first and last row of a tile determine its range.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Reach(NamedTuple):
    """Row i sees the others from first[i] to before stop[i]; none if the two are equal. int64 [rows] each."""

    first: Tensor
    stop: Tensor


def keys_seen(cu_seqlens: Tensor, cu_seqlens_k: Tensor, rows: int, left: int, right: int) -> Reach:
    """The keys of each query, on the device of the bounds (int [S + 1]); the host does not wait.

    The last query of a sequence is at the position of its last key; a query sees `left` keys behind it and `right`
    ahead of it, -1 for all. Swapped (bounds, and left with right) it gives the queries that see each key.
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
    """Ranges of other tiles for each tile of rows, int64 [tiles] each: it may see rows of tiles in [first, stop), and
    all its rows see tiles in [full_first, full_stop) completely.
    """

    first: Tensor
    stop: Tensor
    full_first: Tensor
    full_stop: Tensor


def tiles_seen(reach: Reach, tile: int, other_tile: int) -> TileReach:
    """What tiles of ``tile`` rows see, in tiles of ``other_tile``. A truncated tile is full by its existing rows."""
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
