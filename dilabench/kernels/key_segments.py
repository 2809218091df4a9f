"""How keys are cut for few queries that are their last rows: the strided segments of each head, tiles and parts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from dilabench.patterns.answers import StridedSegments


class SplitTile(NamedTuple):
    """Rows of queries and keys of a tile, warps and pipeline stages of its programs.

    resident: programs that a multiprocessor runs at once.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    resident: int = 2


class Split(NamedTuple):
    """How the work of a call is cut: its tile, the parts that keys are split into, and programs of the same keys."""

    tile: SplitTile
    splits: int
    items: int


class Processors(NamedTuple):
    """Multiprocessors of a GPU, and the bytes of shared memory that a program can have."""

    number: int
    memory: int


# Tiles in whose time a program begins and ends.
_BEGIN_AND_END = 3
# Bytes of shared memory of a program that large tiles need: Hopper's 227 KiB are more, Ada's 99 and Ampere's 163 less.
_MUCH_MEMORY = 220 * 1024
# Parts are no more than a merge reads in a few steps.
_MOST_SPLITS = 256


def columns_for(head_dim: int, value_dim: int) -> tuple[int, int, int]:
    """Columns of a tile of keys, of a second one (0: none) that has the remaining channels, and of a tile of values.

    Tiles have powers of two of columns, 16 or more.
    """
    columns, value_columns = (max(16, triton.next_power_of_2(dim)) for dim in (head_dim, value_dim))
    rest = max(16, triton.next_power_of_2(head_dim - columns // 2))
    if head_dim == value_dim or columns // 2 + rest >= columns:
        return columns, 0, value_columns
    return columns // 2, rest, value_columns


def tile_for(rows: int, dims: tuple[int, int], itemsize: int, memory: int) -> SplitTile:
    """The tile for this many rows of the same keys. dims: channels of keys and of values. memory: of `Processors`.

    Microseconds on one H200 with the best number of parts, keys of a tile, warps and stages: 1x131072, H32/8, D128:
    64, 4, 3 128; 32, 4, 4 130; 128, 4, 2 131; 128, 8, 3 131; 64, 4, 2 136; 64, 8, 3 145. 1x1048576, H16, D64: 128, 4, 3
    933; 64, 2, 3 933; 64, 4, 3 938; 32, 4, 4 940; 128, 4, 2 1035. 8x32768, H128/1, D576/512, with rows before them: 64,
    32, 8, 2 515; 64, 32, 8, 1 572; 64, 64, 8, 1 658; 16, 32, 4, 2 710; 64, 16, 8, 2 746; 32, 64, 8, 1 837; 32, 32, 8, 2
    882; 16, 16, 4, 3 974. 8x32768, H8/1, D512: 16, 16, 4, 3 137; 16, 32, 4, 2 138; 16, 32, 8, 2 197.
    """
    rows = max(16, triton.next_power_of_2(rows))
    # As many rows as do not spill registers.
    widest = max(dims)
    if itemsize > 2:
        if widest > 256:
            return SplitTile(16, 16, 8, 2 if memory >= _MUCH_MEMORY else 1, 1)
        return SplitTile(16, 32 if widest <= 128 else 16, 4, 2)
    if widest > 256:
        few = rows <= 32 or memory < _MUCH_MEMORY
        return SplitTile(16, 32, 4, 2) if few else SplitTile(64, 32, 8, 2, 1)
    if widest > 128:
        return SplitTile(min(32, rows), 32, 4, 3)
    if rows >= 64:
        return SplitTile(64, 64, 4, 3 if widest <= 64 else 2)
    return SplitTile(rows, 64 if widest > 64 else 128, 4, 3)


def split_for(
    programs: int, rows: int, keys: int, dims: tuple[int, int], itemsize: int, processors: Processors
) -> Split:
    """For this many programs that each read up to ``keys`` keys for ``rows`` rows, if neither is split: the parts with
    which a GPU is done first, if programs run in waves. More parts than a few waves only add to the merge.
    """
    tile = tile_for(rows, dims, itemsize, processors.memory)
    items = triton.cdiv(rows, tile.rows)
    programs *= items
    at_once, tiles = tile.resident * processors.number, triton.cdiv(keys, tile.keys)

    def time(splits: int) -> int:
        return triton.cdiv(programs * splits, at_once) * (triton.cdiv(tiles, splits) + _BEGIN_AND_END)

    most = min(tiles, _MOST_SPLITS, max(1, 4 * at_once // programs))
    return Split(tile, min(range(1, most + 1), key=time), items)


def processors(device: torch.device) -> Processors:
    """The multiprocessors of a GPU, given with its index; elsewhere kernels are interpreted."""
    if device.type != "cuda":
        return Processors(8, _MUCH_MEMORY)
    properties = driver.active.utils.get_device_properties(device.index)
    return Processors(properties["multiprocessor_count"], properties["max_shared_mem"])


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
