"""The kernel calls of one rank's queries on another rank's keys, as few as possible (no tensors).

Every pattern is a set of segments, rows at a rate on each head's residue, and a band (causal, window) between rows. The
rows on a rank are a range of those rows; between two ranges the band is shifted, and `bands.cuts` cuts it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from dilabench.distributed.sharding import Shards, Span
from dilabench.impls.ring.schedule.bands import cuts
from dilabench.impls.ring.schedule.pieces import Piece
from dilabench.impls.union.branches import ORIGIN, Branch, Place, Progression, Run, fewest_runs
from dilabench.workload.spec import UNBOUNDED, Workload


class Tile(NamedTuple):
    """Rows of a segment on both ranks, and their band. `query`, `key`: local rows for residue 0, as in `Piece`."""

    query: int
    key: int
    shape: TileShape


class TileShape(NamedTuple):
    """The shared properties of equal tiles. `residues`: of the heads that it applies to; `step`: local rows between
    rows.
    """

    queries: int
    keys: int
    low: int | None
    high: int | None
    step: int
    residues: tuple[int, ...]


def pieces_between(
    workload: Workload,
    shards: Shards,
    reader: int,
    owner: int,
    branches: Sequence[Branch],
    *,
    aligned: bool = False,
) -> tuple[Piece, ...]:
    """The kernel calls of rank `reader` on the keys of rank `owner`; empty if no key is visible.

    aligned: the backend takes a causal mask over fewer queries than keys.
    """
    pieces: list[Piece] = []
    for branch in branches:
        tiles = list(_tiles(workload, shards, reader, owner, branch))
        # Most tiles of many documents are for the same heads.
        runs_of: dict[tuple[tuple[int, ...], bool], Sequence[tuple[Run, Progression]]] = {}
        for query, key, stack, shape in _stacks(tiles):
            stackable = stack.count == 1 and workload.batch_size == 1
            runs = runs_of.get((shape.residues, stackable))
            if runs is None:
                places = tuple(place for place in branch.places if place.position in shape.residues)
                runs = runs_of[shape.residues, stackable] = fewest_runs(places, workload.group_size, stackable)
            for cut in cuts(shape.queries, shape.keys, shape.low, shape.high, aligned=aligned):
                for run, residues in runs:
                    piece = Piece(
                        query + cut.query * shape.step,
                        cut.queries,
                        key + cut.key * shape.step,
                        cut.keys,
                        shape.step,
                        run,
                        stack if stack.count > 1 else residues,
                        cut.causal,
                        cut.window,
                    )
                    pieces.append(piece)
    return tuple(_joined(_joined(pieces, by_keys=True), by_keys=False))


def _tiles(workload: Workload, shards: Shards, reader: int, owner: int, branch: Branch) -> Iterator[Tile]:
    every_row = branch.rate == 1 and branch.segment_length >= workload.seq_len
    # A rank's local dense part is one unshifted mask per sequence, although its spans are not adjacent.
    collapse = reader == owner and every_row and workload.window == UNBOUNDED
    for start, end in workload.sequences:
        readers = within(shards.parts[reader], start, end)
        owners = within(shards.parts[owner], start, end)
        inside = all(start <= span.start and span.stop <= end for span in readers)
        if collapse and len(readers) > 1 and inside:
            rows = sum(span.length for span in readers)
            residues = tuple(sorted({place.position for place in branch.places}))
            high = 0 if workload.causal else None
            yield Tile(readers[0].row, readers[0].row, TileShape(rows, rows, None, high, 1, residues))
            continue
        for queries in readers:
            for keys in owners:
                yield from _span_tiles(workload, branch, queries, keys, start, end)


def within(spans: Sequence[Span], start: int, end: int) -> Sequence[Span]:
    """The ascending spans that overlap [start, end), without a scan of all."""
    first = bisect_right(spans, start, key=lambda span: span.stop)
    return spans[first : bisect_left(spans, end, lo=first, key=lambda span: span.start)]


def _span_tiles(workload: Workload, branch: Branch, queries: Span, keys: Span, start: int, end: int) -> Iterator[Tile]:
    """Tiles of one span's queries and one span's keys in the sequence [start, end), segment by segment."""
    rate, length = branch.rate, branch.segment_length
    first = (max(queries.start, keys.start, start) - start) // length
    last = (min(queries.stop, keys.stop, end) - 1 - start) // length
    left, right = workload.window
    ahead: int | None = 0 if workload.causal else (right if right >= 0 else None)
    residues = sorted({place.position for place in branch.places})
    for segment in range(first, last + 1):
        lower = start + segment * length
        upper = min(end, lower + length)
        alike: dict[tuple[int, int, int, int], list[int]] = {}
        for residue in residues:
            q_first, q_rows = _rows(queries, lower, upper, rate, residue)
            k_first, k_rows = _rows(keys, lower, upper, rate, residue)
            if q_rows and k_rows:
                alike.setdefault((q_first - residue, q_rows, k_first - residue, k_rows), []).append(residue)
        for (q_first, q_rows, k_first, k_rows), members in alike.items():
            shift = q_first - k_first
            high = None if ahead is None else (shift + ahead) // rate
            low = None if left < 0 else -((left - shift) // rate)
            shape = TileShape(q_rows, k_rows, low, high, rate, tuple(members))
            yield Tile(queries.row + q_first - queries.start, keys.row + k_first - keys.start, shape)


def _rows(span: Span, lower: int, upper: int, rate: int, residue: int) -> tuple[int, int]:
    """(first position, count) of a span's rows on a residue of the segment [lower, upper)."""
    origin = lower + residue
    first = origin + rate * max(0, -(-(max(span.start, lower) - origin) // rate))
    return first, max(0, -(-(min(span.stop, upper) - first) // rate))


def _stacks(tiles: Sequence[Tile]) -> Iterator[tuple[int, int, Progression, TileShape]]:
    """Equal tiles at a constant distance, the same for queries and keys, put on top of each other."""
    by_shape: dict[TileShape, list[Tile]] = {}
    for tile in tiles:
        by_shape.setdefault(tile.shape, []).append(tile)
    for shape, equal in by_shape.items():
        while equal:
            count, step = 1, 0
            if len(equal) > 1 and equal[1].query - equal[0].query == equal[1].key - equal[0].key > 0:
                step = equal[1].query - equal[0].query
            while step and count < len(equal) and _follows(equal[count - 1], equal[count], step):
                count += 1
            stack = Progression(count, Place(step, 0, 0) if count > 1 else ORIGIN)
            yield equal[0].query, equal[0].key, stack, shape
            equal = equal[count:]


def _follows(before: Tile, after: Tile, step: int) -> bool:
    return after.query - before.query == after.key - before.key == step


def _joined(pieces: Sequence[Piece], *, by_keys: bool) -> list[Piece]:
    """Full rectangles that share an edge made one: side by side along the keys, or on top along the queries."""
    result: list[Piece] = []
    order = sorted(pieces, key=lambda p: (p.query, p.queries, p.key) if by_keys else (p.key, p.keys, p.query))
    for piece in order:
        before = result[-1] if result else None
        if before is None or not _joinable(before, piece):
            result.append(piece)
        elif by_keys and (before.query, before.queries, before.key + before.keys) == (
            piece.query,
            piece.queries,
            piece.key,
        ):
            result[-1] = replace(before, keys=before.keys + piece.keys)
        elif not by_keys and (before.key, before.keys, before.query + before.queries) == (
            piece.key,
            piece.keys,
            piece.query,
        ):
            result[-1] = replace(before, queries=before.queries + piece.queries)
        else:
            result.append(piece)
    return result


def _joinable(before: Piece, after: Piece) -> bool:
    full = not (before.causal or after.causal) and before.window == after.window == UNBOUNDED
    return (
        full
        and before.step == after.step == 1
        and before.stack.count == after.stack.count == 1
        and before.run == after.run
    )
