"""Packed sequences for the block-sparse kernels: every query sees one stretch of keys, so that lists need no mask."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dilabench.kernels.block_sparse.lists import TileLists
from dilabench.kernels.block_sparse.plan import ListedPlan
from dilabench.kernels.packed_reach import Reach, keys_seen, tiles_seen
from dilabench.patterns.hidden_rows import HiddenRows

BLOCK = 128


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
        first, stop, full_first, full_stop = (x.numpy() for x in tiles_seen(*own))
        listed, full = stop - first, full_stop - full_first
        starts = listed.cumsum() - listed
        tile = np.arange(len(listed)).repeat(listed)
        place = np.arange(len(tile)) - starts[tile]
        partly = place - full[tile]
        before = (full_first - first)[tile]
        entries = np.where(
            partly < 0, full_first[tile] + place, first[tile] + partly + np.where(partly < before, 0, full[tile])
        )
        return TileLists(
            spans=np.stack((starts, full, listed - full), axis=-1).astype(np.int32)[None],
            entries=entries.astype(np.int32) if len(entries) else np.zeros(1, np.int32),
            order=(-listed).argsort(kind="stable").astype(np.int32)[None],
        )


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
