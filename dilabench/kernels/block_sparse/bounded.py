"""Lists of tiles from bounds of columns, made on the device: nothing is copied to the host, and nobody waits.

What `lists.visible_tiles` makes of bounds that are known before is made here in every call, as for documents that are
other ones in each batch. Memory: about 30 bytes for each pair of tiles while lists are made, 6 for what stays.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilabench.kernels.block_sparse.plan import Plan
from dilabench.kernels.tuning import TileConfig
from dilabench.patterns.hidden_rows import HiddenRows


@dataclass(frozen=True, eq=False)
class BoundedPlan(Plan):
    """Bounds of columns on the device: key j is hidden from the rows limits[r, 0, j] <= i < limits[r, 1, j].

    ``limits`` int32 [ranges, 2, rows]: of one key the ranges rise and do not overlap (`HiddenRows`, whose form for the
    host is ``hidden``). ``block_size`` rows at most in a tile.
    """

    limits: Tensor
    block_size: int
    rows: int
    causal: bool
    hidden: HiddenRows
    window: tuple[int, int] = (-1, -1)
    key_rows: None = field(default=None, init=False)
    _kept: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def mask_heads(self) -> int:
        """All heads are alike."""
        return 1

    def seen_blocks(self, mask_head: int, block: int) -> npt.NDArray[np.int64]:  # noqa: ARG002
        """All: bounds hide inside blocks."""
        return np.arange(-(-self.rows // self.block_size))

    def bounds(self, device: torch.device) -> Tensor:
        """As given."""
        assert device.type == self.limits.device.type
        return self.limits

    def tables(self, config: TileConfig, by_key: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """(spans, entries, order) of `TileLists` on the device, which has to be that of the limits."""
        assert device.type == self.limits.device.type
        m, n = config.block_m, config.block_n
        listed, full = self.keep(("visible tiles", m, n), lambda: self._visible_tiles(m, n))
        return self.keep(("tables", m, n, by_key), lambda: _lists(*((listed.T, full.T) if by_key else (listed, full))))

    def _visible_tiles(self, block_m: int, block_n: int) -> tuple[Tensor, Tensor]:
        """bool [query tiles, key tiles]: whether some pair of a tile may be visible, and whether all are."""
        rows, limits = self.rows, self.limits
        device = limits.device
        q_low = torch.arange(0, rows, block_m, dtype=torch.int32, device=device)[:, None]
        k_low = torch.arange(0, rows, block_n, dtype=torch.int32, device=device)
        q_high, k_high = (q_low + block_m).clamp_max(rows) - 1, (k_low + block_n).clamp_max(rows) - 1
        some = torch.ones(len(q_low), len(k_low), dtype=torch.bool, device=device)
        full = (k_low + block_n <= rows).expand_as(some)
        if self.right >= 0:
            some = some & (k_low <= q_high + self.right)
            full = full & (k_high <= q_low + self.right)
        if self.left >= 0:
            some = some & (k_high >= q_low - self.left)
            full = full & (k_low >= q_high - self.left)
        # Rows outside of these see none of a tile's keys, whichever range it is that hides each of them.
        first, end = torch.zeros_like(limits[0, 0]), torch.full_like(limits[0, 0], rows)
        for starts, stops in limits:
            first = torch.where(starts <= first, torch.maximum(first, stops), first)
        for starts, stops in limits.flip(0):
            end = torch.where(stops >= end, torch.minimum(end, starts), end)
        some = some & (q_high >= _least(first, block_n, rows)) & (q_low < _most(end, block_n))
        for starts, stops in limits:
            some = some & ((q_low < _most(starts, block_n)) | (q_high >= _least(stops, block_n, rows)))
            hides = starts < stops
            some_from = _least(torch.where(hides, starts, rows), block_n, rows)
            full = full & ((q_high < some_from) | (q_low >= _most(torch.where(hides, stops, 0), block_n)))
        return some, some & full


def _least(x: Tensor, tile: int, largest: int) -> Tensor:
    """[tiles]: the least of each tile of x [keys], whose numbers are at most `largest`."""
    return torch.nn.functional.pad(x, (0, -len(x) % tile), value=largest).view(-1, tile).amin(1)


def _most(x: Tensor, tile: int) -> Tensor:
    """[tiles]: the greatest of each tile of x [keys], whose numbers are at least 0."""
    return torch.nn.functional.pad(x, (0, -len(x) % tile)).view(-1, tile).amax(1)


def _lists(listed: Tensor, full: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(spans, entries, order) of bool [own tiles, partner tiles]; each list has room for all partners and one more."""
    own, partners = listed.shape
    n_full, n_listed = full.sum(1, dtype=torch.int32), listed.sum(1, dtype=torch.int32)
    partly = listed & ~full
    place = torch.where(full, full.cumsum(1, dtype=torch.int32), partly.cumsum(1, dtype=torch.int32) + n_full[:, None])
    # What is not listed goes to the room behind all lists.
    place = torch.where(listed, place - 1, partners)
    numbers = torch.arange(partners, dtype=torch.int32, device=listed.device).expand(own, partners)
    entries = numbers.new_empty(own, partners + 1).scatter_(1, place.long(), numbers)
    starts = torch.arange(own, dtype=torch.int32, device=listed.device) * (partners + 1)
    spans = torch.stack((starts, n_full, n_listed - n_full), dim=-1)[None]
    order = n_listed.argsort(descending=True, stable=True).int()[None]
    return spans, entries.flatten(), order
