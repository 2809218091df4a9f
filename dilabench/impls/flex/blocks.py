"""A pattern's counts C, cut into blocks of 128 queries x 128 keys: which are visible, in full or in part, and what they
hold. Made on the host from `Pattern.counts` alone, so that any pattern can be read by FlexAttention.

Blocks with the same counts share one tile. Memory: 4 bytes for each pair of blocks and kind of head, 16 KiB a tile.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from dilabench.patterns.pattern import KeyGroup, Pattern, SequenceShape
from dilabench.workload.spec import Workload

BLOCK = 128
MOST_COUNTED = 255

Blocks = NDArray[np.bool_]
Counts = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class CountedBlocks:
    """kind_of_head [H]: heads of one kind have the same counts. partly, full [kinds, n, n]: blocks of queries x keys
    that are visible under causal mask and window, which touch `in_band` blocks. tile_of [kinds, n, n]: the tile of each
    visible block, 0 for others. tiles [T, BLOCK, BLOCK]: C before causal mask and window, 0 beyond the sequence; the
    first holds zeros.
    """

    kind_of_head: tuple[int, ...]
    partly: Blocks
    full: Blocks
    tile_of: NDArray[np.int32]
    tiles: Counts
    in_band: int

    @property
    def has_holes(self) -> bool:
        """Whether the pattern hides pairs that causal mask and window let see."""
        hidden = (self.partly | self.full).sum((1, 2)).min() < self.in_band
        return bool(hidden or (self.tiles.min((1, 2)) == 0)[self.tile_of[self.partly]].any())

    @property
    def counts_twice(self) -> bool:
        """Whether a key counts more than once."""
        return bool((self.tiles > 1).any())


class _Sequences:
    """A pattern over packed sequences: their counts one after another, of positions among all tokens."""

    def __init__(self, workload: Workload) -> None:
        self._pattern = workload.pattern
        self._parts = [
            (start, stop, shape) for (start, stop), shape in zip(workload.sequences, workload.shapes, strict=True)
        ]
        self._starts = np.array([start for start, _, _ in self._parts])

    def head_key(self, _shape: SequenceShape, head: int) -> Hashable:
        return tuple(self._pattern.head_key(shape, head) for _, _, shape in self._parts)

    def counts(self, _shape: SequenceShape, head: int, rows: NDArray[np.int64]) -> Iterator[KeyGroup]:
        of_row = self._starts.searchsorted(rows, side="right") - 1
        for index in np.unique(of_row):
            start, _, shape = self._parts[index]
            for group in self._pattern.counts(shape, head, rows[of_row == index] - start):
                parts = (
                    range(part.start + start, part.stop + start, part.step) if isinstance(part, range) else part + start
                    for part in group.parts
                )
                yield KeyGroup(group.rows + start, tuple(parts))


def counted_blocks(workload: Workload) -> CountedBlocks:
    """The blocks of a workload, packed sequences in one. Raises ValueError for a count above 255."""
    shape: SequenceShape = workload.shapes[0]
    pattern: Pattern | _Sequences = workload.pattern
    if workload.layout == "packed":
        shape, pattern = replace(shape, length=workload.seq_len), _Sequences(workload)
    keys = [pattern.head_key(shape, head) for head in range(shape.num_heads)]
    heads = [keys.index(key) for key in dict.fromkeys(keys)]
    blocks = -(-shape.length // BLOCK)
    partly, full = np.zeros((2, len(heads), blocks, blocks), dtype=bool)
    tile_of = np.zeros((len(heads), blocks, blocks), dtype=np.int32)
    tiles = _Tiles()
    for kind, head in enumerate(heads):
        for index in range(blocks):
            row = _block_row(pattern, shape, head, index)
            if row is not None:
                some, every = row.visible(shape)
                partly[kind, index, row.columns] = some & ~every
                full[kind, index, row.columns] = every
                tile_of[kind, index, row.columns] = tiles.numbers(row, some)
    kind_of_head = tuple(heads.index(keys.index(key)) for key in keys)
    in_band = sum(len(_columns_in_band(shape, index)) for index in range(blocks))
    return CountedBlocks(kind_of_head, partly, full, tile_of, np.stack(tiles.found), in_band)


@dataclass(frozen=True, slots=True)
class _BlockRow:
    """One block of queries over the blocks of keys `columns` [m].

    counts [groups, m, BLOCK]: C of the rows of each group; group_of_row [BLOCK]: -1 for rows without a key.
    """

    index: int
    columns: NDArray[np.int64]
    counts: Counts
    group_of_row: NDArray[np.int16]

    def visible(self, shape: SequenceShape) -> tuple[Blocks, Blocks]:
        """[m]: blocks with a pair that causal mask and window let see, and blocks of such pairs alone."""
        some: Blocks = np.any(self.counts, axis=(0, 2))
        every: Blocks = np.all(self.counts, axis=(0, 2)) & (self.group_of_row >= 0).all()
        rows = self.index * BLOCK + np.arange(BLOCK)
        first, stop = shape.bounds(np.minimum(rows, shape.length - 1))
        left, right = self.columns * BLOCK, (self.columns + 1) * BLOCK
        for place in np.flatnonzero((left < first.max()) | (right > stop.min())):
            positions = left[place] + np.arange(BLOCK)
            seen = (positions >= first[:, None]) & (positions < stop[:, None]) & (self.tile(place) > 0)
            some[place], every[place] = seen.any(), seen.all()
        return some, every

    def tile(self, place: int) -> Counts:
        """C [BLOCK, BLOCK] of one block."""
        found: Counts = self.counts[self.group_of_row, place]
        found[self.group_of_row < 0] = 0
        return found


def _block_row(pattern: Pattern | _Sequences, shape: SequenceShape, head: int, index: int) -> _BlockRow | None:
    """The counts of a block of queries; None if none of its rows sees a key."""
    start, end = index * BLOCK, min((index + 1) * BLOCK, shape.length)
    reach = _columns_in_band(shape, index)
    found = (group for group in pattern.counts(shape, head, np.arange(start, end)) if len(group.rows))
    groups = sorted(found, key=lambda group: int(group.rows[0]))
    parts = [[_inside(part, reach.start * BLOCK, reach.stop * BLOCK) for part in group.parts] for group in groups]
    touched = np.zeros(-(-shape.length // BLOCK), dtype=bool)
    for part in itertools.chain.from_iterable(parts):
        if isinstance(part, range):
            touched[part.start // BLOCK : part[-1] // BLOCK + 1 if part else 0] = True
        else:
            touched[part // BLOCK] = True
    columns = np.flatnonzero(touched)
    if not len(columns):
        return None
    # From a key to its place in the columns.
    shift = (np.cumsum(touched) - 1 - np.arange(len(touched))) * BLOCK
    counts = np.zeros((len(groups), len(columns) * BLOCK), dtype=np.uint8)
    group_of_row = np.full(BLOCK, -1, dtype=np.int16)
    for number, (group, of_group) in enumerate(zip(groups, parts, strict=True)):
        if len(group.parts) > MOST_COUNTED:
            raise ValueError(f"a key may count {len(group.parts)} times here, more than the {MOST_COUNTED} of a byte")
        group_of_row[group.rows - start] = number
        for part in of_group:
            if isinstance(part, range):
                # All columns from the first to the last key of a range are touched, so that all keys move alike.
                moved = int(shift[part.start // BLOCK]) if part else 0
                counts[number, part.start + moved : part.stop + moved : part.step] += 1
            else:
                counts[number, part + shift[part // BLOCK]] += 1
    return _BlockRow(index, columns, counts.reshape(len(groups), len(columns), BLOCK), group_of_row)


def _columns_in_band(shape: SequenceShape, index: int) -> range:
    """The blocks of keys that causal mask and window let some row of a block of queries see."""
    first, stop = shape.bounds(np.arange(index * BLOCK, min((index + 1) * BLOCK, shape.length)))
    return range(int(first.min()) // BLOCK, -(-int(stop.max()) // BLOCK))


def _inside(part: range | NDArray[np.int64], start: int, stop: int) -> range | NDArray[np.int64]:
    """The keys of a part from `start` on and below `stop`, the blocks that any row sees."""
    if isinstance(part, range):
        return part[bisect_left(part, start) : bisect_left(part, stop)]
    return part[slice(*part.searchsorted((start, stop)))]


@dataclass(slots=True)
class _Tiles:
    """Tiles by what they hold, each once."""

    found: list[Counts] = field(default_factory=lambda: [np.zeros((BLOCK, BLOCK), dtype=np.uint8)])
    number_of: dict[object, int] = field(default_factory=dict)

    def numbers(self, row: _BlockRow, some: Blocks) -> NDArray[np.int32]:
        """[m]: the number of the tile of each visible block, 0 for others."""
        least, most = row.counts.min((0, 2)), row.counts.max((0, 2))
        least = np.where((row.group_of_row >= 0).all(), least, 0)
        numbers = np.zeros(len(row.columns), dtype=np.int32)
        alike = some & (least == most)
        for count in np.unique(least[alike]):
            places = np.flatnonzero(alike & (least == count))
            numbers[places] = self._number(int(count), row, places[0])
        rows = row.group_of_row.tobytes()
        for place in np.flatnonzero(some & ~alike):
            numbers[place] = self._number((rows, row.counts[:, place].tobytes()), row, place)
        return numbers

    def _number(self, key: object, row: _BlockRow, place: int) -> int:
        """The number of a tile by its distinguishing properties; a new one is kept."""
        number = self.number_of.setdefault(key, len(self.found))
        if number == len(self.found):
            self.found.append(row.tile(place))
        return number
