"""What one rank of `ring-varlen` computes and exchanges: every packed sequence is cut over all ranks.

By the arithmetic of `distributed.sharding` and `impls.ring.plan`; a test holds the two together. Only for dense
patterns without a window.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dilabench.predict.memory.over_ranks.shares import Parcel, Piece, Share, piece_of
from dilabench.predict.memory.sizes import INDEX_BYTES, Sizes
from dilabench.workload.spec import Workload


class Chunk(NamedTuple):
    """Positions [start, stop), which a rank holds in its rows from `row` on."""

    start: int
    stop: int
    row: int

    @property
    def length(self) -> int:
        """How many."""
        return self.stop - self.start

    def cut(self, start: int, stop: int) -> "Chunk":
        """What lies in [start, stop)."""
        first = max(self.start, start)
        return Chunk(first, min(self.stop, stop), self.row + first - self.start)


@dataclass(frozen=True, slots=True)
class Rectangle:
    """`queries` rows of the reader against `keys` rows of the holder, `count` times, `step` rows further each time.

    masked: a causal square; else every query sees every key.
    """

    query: int
    queries: int
    key: int
    keys: int
    masked: bool
    count: int
    step: int


def packed_share_of(workload: Workload, rank: int, size: int) -> Share:
    """The share of a rank."""
    rows = [sum(chunk.length for chunk in held(workload, other, size, zigzag=workload.causal)) for other in range(size)]
    others = [other for other in range(size) if other != rank]
    read = {other: rectangles_between(workload, rank, other, size) for other in range(size)}
    given = {other: rectangles_between(workload, other, rank, size) for other in others}
    pieces = {
        other: tuple(_piece(workload, one, (rows[rank], rows[other])) for one in found) for other, found in read.items()
    }
    return Share(
        workload=workload,
        rank=rank,
        size=size,
        sizes=Sizes.of(workload).part(rows[rank] / workload.seq_len),
        local=None,
        own=pieces[rank],
        reads={other: pieces[other] for other in others if pieces[other]},
        needs={other: _parcel(workload, read[other]) for other in others if read[other]},
        gives={other: _parcel(workload, given[other]) for other in others if given[other]},
    )


def rectangles_between(workload: Workload, reader: int, holder: int, size: int) -> tuple[Rectangle, ...]:
    """The kernel calls of a reader on a holder's keys, in their order.

    Sequences of equal length go as one call on a stack, whose rows are in no one range and join no neighbours.
    """
    readers, holders = (held(workload, rank, size, zigzag=workload.causal) for rank in (reader, holder))
    alike: dict[tuple[int, int, int | None], list[tuple[int, int]]] = {}
    for start, end in workload.sequences:
        for queries, keys in _pairs(readers, holders, start, end, workload.causal):
            # What is stacked has the same distance between queries and keys, under a mask.
            shift = queries.start - keys.start if workload.causal else None
            alike.setdefault((queries.length, keys.length, shift), []).append((queries.row, keys.row))
    found = [
        Rectangle(query, queries, key, keys, shift == 0 and keys > 1, count, step)
        for (queries, keys, shift), places in alike.items()
        for query, key, count, step in _stacks(places)
    ]
    return tuple(_joined(_joined(found, by_keys=True), by_keys=False))


def held(workload: Workload, rank: int, size: int, *, zigzag: bool) -> list[Chunk]:
    """A rank's positions, zigzag or in order; neighbours are one, over sequences, too."""
    chunks = 2 * size if zigzag else size
    mine = sorted({rank, chunks - 1 - rank}) if zigzag else [rank]
    found: list[Chunk] = []
    for start, end in workload.sequences:
        for chunk in mine:
            first, stop = (start + (end - start) * edge // chunks for edge in (chunk, chunk + 1))
            if first == stop:
                continue
            if found and found[-1].stop == first:
                found[-1] = found[-1]._replace(stop=stop)
            else:
                found.append(Chunk(first, stop, found[-1].row + found[-1].length if found else 0))
    return found


def _pairs(
    readers: Sequence[Chunk], holders: Sequence[Chunk], start: int, end: int, causal: bool
) -> Iterator[tuple[Chunk, Chunk]]:
    """Queries and keys in the sequence [start, end) of which the ones see the others."""
    mine, theirs = ([one for one in held if one.start < end and one.stop > start] for held in (readers, holders))
    inside = all(start <= one.start and one.stop <= end for one in mine)
    if readers == holders and len(mine) > 1 and inside:
        # A rank's own rows of a sequence are under one mask, although they lie apart. The first rank's are not inside:
        # the last chunk of one sequence is the neighbour of the next one's first.
        whole = Chunk(0, sum(one.length for one in mine), mine[0].row)
        yield whole, whole
        return
    for queries in (one.cut(start, end) for one in mine):
        for keys in (one.cut(start, end) for one in theirs):
            if not causal or keys.start <= queries.start:
                yield queries, keys


def _stacks(places: list[tuple[int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """First query row, first key row, how many and how far apart: equal calls at one distance on both sides."""
    while places:
        (query, key), count, step = places[0], 1, 0
        if len(places) > 1 and places[1][0] - query == places[1][1] - key > 0:
            step = places[1][0] - query
        while step and count < len(places) and places[count] == (query + count * step, key + count * step):
            count += 1
        yield query, key, count, step if count > 1 else 0
        places = places[count:]


def _joined(found: Sequence[Rectangle], *, by_keys: bool) -> list[Rectangle]:
    """Those that share an edge made one: side by side along the keys, or on top along the queries."""
    result: list[Rectangle] = []
    order = sorted(found, key=lambda r: (r.query, r.queries, r.key) if by_keys else (r.key, r.keys, r.query))
    for one in order:
        before = result[-1] if result else None
        if before is None or before.masked or one.masked or before.count + one.count > 2:
            result.append(one)
        elif by_keys and (before.query, before.queries, before.key + before.keys) == (one.query, one.queries, one.key):
            result[-1] = replace(before, keys=before.keys + one.keys)
        elif not by_keys and (before.key, before.keys, before.query + before.queries) == (one.key, one.keys, one.query):
            result[-1] = replace(before, queries=before.queries + one.queries)
        else:
            result.append(one)
    return result


def _piece(workload: Workload, one: Rectangle, whole: tuple[int, int]) -> Piece:
    return piece_of(workload, 1, whole, one.queries, one.keys, times=1, segments=one.count, masked=one.masked)


def _parcel(workload: Workload, read: Sequence[Rectangle]) -> Parcel:
    """The rows of K and V that are read: sent as they are where they are in one range, else as single vectors."""
    ranges = sorted(
        {(one.key + turn * one.step, one.key + turn * one.step + one.keys) for one in read for turn in range(one.count)}
    )
    first, reach, rows = ranges[0][0], ranges[0][0], 0
    for start, stop in ranges:
        rows += max(0, stop - max(start, reach))
        reach = max(reach, stop)
    pair = 2 * Sizes.of(workload).kv / workload.seq_len
    whole = rows == reach - first
    index = 0.0 if whole else float(rows * workload.num_kv_heads * INDEX_BYTES)
    return Parcel(packed=rows * pair, rows=(reach - first) * pair, whole=whole, index=index, copied=not whole)
