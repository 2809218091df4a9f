"""Lists of tiles from bounds of columns, made on the device: nothing is copied to the host, and nobody waits.

As for documents that are other ones in each batch. Memory: about 30 bytes for each pair of tiles while lists are made,
6 for what stays.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilabench.kernels.block_sparse.lists import HiddenTiles, TileLists, lists_with_room, visible_tiles
from dilabench.kernels.block_sparse.plan import Plan
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

    def hidden_tiles(self, block_n: int) -> HiddenTiles:
        """Of the limits, on their device."""
        return self.keep(("hidden tiles", block_n), lambda: HiddenTiles.of(self.limits, self.rows, block_n))

    def lists(self, block_m: int, block_n: int, by_key: bool) -> TileLists:
        """Of the tiles that may be visible."""

        def find() -> tuple[Tensor, Tensor]:
            queries = torch.arange(-(-self.rows // block_m), device=self.limits.device)
            return visible_tiles(self.visibility, queries, block_m, block_n, self.hidden_tiles(block_n))

        listed, full = self.keep(("visible tiles", block_m, block_n), find)
        return lists_with_room(listed.T, full.T) if by_key else lists_with_room(listed, full)
