"""How keys are cut for few queries that are their last rows: the strided segments of each head, tiles and parts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from dilabench.patterns.answers import StridedSegments


class SplitTile(NamedTuple):
    """Rows of queries and keys of a tile, warps and pipeline stages of its programs."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


class Split(NamedTuple):
    """How the work of a call is cut: its tile, the parts that keys are split into, and programs of the same keys."""

    tile: SplitTile
    splits: int
    items: int


# Programs that a multiprocessor runs at once, and the tiles in whose time one begins and ends.
_RESIDENT, _BEGIN_AND_END = 2, 3
# Parts are no more than a merge reads in a few steps.
_MOST_SPLITS = 256


def tile_for(rows: int, head_dim: int, itemsize: int) -> SplitTile:
    """The tile for this many rows of the same keys.

    Microseconds on one H200 with the best number of parts, keys of a tile, warps and stages: 1x131072, H32/8, D128:
    64, 4, 3 128; 32, 4, 4 130; 128, 4, 2 131; 128, 8, 3 131; 64, 4, 2 136; 64, 8, 3 145. 1x1048576, H16, D64: 128, 4, 3
    933; 64, 2, 3 933; 64, 4, 3 938; 32, 4, 4 940; 128, 4, 2 1035.
    """
    rows = max(16, triton.next_power_of_2(rows))
    # As many rows as do not spill registers.
    if itemsize > 2:
        return SplitTile(16, 32 if head_dim <= 128 else 16, 4, 2)
    if head_dim > 128:
        return SplitTile(min(32, rows), 32, 4, 3)
    if rows >= 64:
        return SplitTile(64, 64, 4, 3 if head_dim <= 64 else 2)
    return SplitTile(rows, 64 if head_dim > 64 else 128, 4, 3)


def split_for(programs: int, rows: int, keys: int, head_dim: int, itemsize: int, processors: int) -> Split:
    """For this many programs that each read up to ``keys`` keys for ``rows`` rows, if neither is split: the parts with
    which a GPU is done first, if programs run in waves. More parts than a few waves only add to the merge.
    """
    tile = tile_for(rows, head_dim, itemsize)
    items = triton.cdiv(rows, tile.rows)
    at_once, tiles = _RESIDENT * processors, triton.cdiv(keys, tile.keys)

    def time(splits: int) -> int:
        return triton.cdiv(programs * items * splits, at_once) * (triton.cdiv(tiles, splits) + _BEGIN_AND_END)

    most = min(tiles, _MOST_SPLITS, max(1, 4 * at_once // (programs * items)))
    return Split(tile, min(range(1, most + 1), key=time), items)


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; elsewhere kernels are interpreted."""
    if device.type != "cuda":
        return 8
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@dataclass(frozen=True, slots=True, eq=False)
class KeyBranches:
    """The strided segments of each head's keys, and what `split_keys` makes for them once.

    segments: length and rate of each branch. table: int32 [branches, 2 + H], these and each head's residue, -1 if it
    has no part. heads: successive heads that share a key/value head and all residues. every: a single branch, of every
    key.
    """

    segments: tuple[tuple[int, int], ...]
    table: Tensor
    heads: int
    every: bool
    plans: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, segments: Sequence[Sequence[StridedSegments]], heads_per_kv: int, device: torch.device) -> KeyBranches:
        """Of those of each head."""
        places: dict[tuple[int, int, int], dict[int, int]] = {}
        for head, of_head in enumerate(segments):
            for number, (length, rate, offset) in enumerate(of_head):
                places.setdefault((number, length, rate), {})[head] = offset
        table = [
            [min(length, 2**31 - 1), rate, *(residues.get(head, -1) for head in range(len(segments)))]
            for (_, length, rate), residues in places.items()
        ]
        groups = (
            row[2 + first : 2 + first + heads_per_kv]
            for row in table
            for first in range(0, len(segments), heads_per_kv)
        )
        heads = heads_per_kv if all(len({*group}) == 1 for group in groups) else 1
        every = len(table) == 1 and table[0][1:] == [1, *[0] * len(segments)]
        there = torch.tensor(table, dtype=torch.int32, device=device)
        return cls(tuple((length, rate) for _, length, rate in places), there, heads, every)

    def most_keys(self, keys: int, reach: int | None) -> int:
        """The most keys that a row of the fullest branch has among this many, `reach` positions if that is known."""
        lengths = (
            (min(length, keys) if reach is None else min(length, keys, reach), rate) for length, rate in self.segments
        )
        return max(triton.cdiv(length, rate) for length, rate in lengths)
