"""What one rank of several computes and exchanges: kernel calls on its own rows and on those of other ranks.

In rows of the sequence, by the arithmetic of `distributed.sharding` and `impls.ring.plan`. Windows are left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dilabench.patterns.dilated import DilatedPattern
from dilabench.predict.memory.calls import Call, heads_in_branch, readers_of
from dilabench.predict.memory.sizes import INDEX_BYTES, Sizes, branches_under
from dilabench.workload.spec import Workload


class Span(NamedTuple):
    """Positions [start, stop)."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """How many, at least none."""
        return max(0, self.stop - self.start)

    def cut(self, other: "Span") -> "Span":
        """The positions of both."""
        return Span(max(self.start, other.start), min(self.stop, other.stop))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Kernel calls of a branch on a pair of ranks, `times` alike.

    in_order: it takes successive rows and all heads in their order. whole: all query, or all key rows of them.
    """

    call: Call
    times: int
    in_order: bool
    whole_queries: bool
    whole_keys: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Bytes of K and V together that one rank needs of another.

    packed: what travels. rows: the rows from the first to the last that is needed. whole: these are the same; else
    single vectors travel, found by `index` bytes of places. copied: the giver cannot send a view.
    """

    packed: float
    rows: float
    whole: bool
    index: float
    copied: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A rank's part. local: the branches whose segments all lie on it, as a workload of its own rows."""

    workload: Workload
    rank: int
    size: int
    sizes: Sizes
    local: Workload | None
    own: tuple[Piece, ...]
    reads: dict[int, tuple[Piece, ...]]
    needs: dict[int, Parcel]
    gives: dict[int, Parcel]

    @property
    def wide(self) -> float:
        """Size of a sum in parts of the tensor: float32 for half precision, float64 for float32."""
        return 1.0 if self.workload.dtype == "float64" else 2.0

    @property
    def wide_lse(self) -> float:
        """Size of a merged lse in parts of lse."""
        return 2.0 if self.workload.dtype == "float32" else 1.0

    @property
    def gradient(self) -> float:
        """Size of a travelling gradient in parts of the tensor: sums over branches go in float32."""
        return 2.0 if branches_under(self.workload) and self.workload.dtype in {"float16", "bfloat16"} else 1.0

    @property
    def index_bytes(self) -> float:
        """Index tensors that stay on the device."""
        return sum(parcel.index for parcel in (*self.needs.values(), *self.gives.values()))


def share_of(workload: Workload, rank: int, size: int, *, zigzag: bool = False, union: bool = True) -> Share:
    """The share of a rank; zigzag shards only under a dense pattern. union: what lies inside goes as one union."""
    rows = _span(workload, rank, size).length
    inside = [one for one in _branches(workload) if _lies_inside(workload, one, rank, size)]
    local_branches = inside if union and not zigzag else []
    crossing = [one for one in _branches(workload) if one not in local_branches]
    others = [other for other in range(size) if other != rank]
    reads = {other: tuple(_pieces(workload, rank, other, size, _branches(workload), zigzag)) for other in others}
    needs = {other: _parcel(workload, rank, other, size, zigzag) for other in others if reads[other]}
    given = {other: _parcel(workload, other, rank, size, zigzag) for other in others}
    return Share(
        workload=workload,
        rank=rank,
        size=size,
        sizes=Sizes.of(workload).part(rows / workload.seq_len),
        local=_local(workload, local_branches, rows),
        own=tuple(_pieces(workload, rank, rank, size, crossing, zigzag)),
        reads={other: pieces for other, pieces in reads.items() if pieces},
        needs={other: parcel for other, parcel in needs.items() if parcel},
        gives={other: parcel for other, parcel in given.items() if parcel},
    )


def _span(workload: Workload, rank: int, size: int) -> Span:
    return Span(workload.seq_len * rank // size, workload.seq_len * (rank + 1) // size)


def _branches(workload: Workload) -> list[tuple[int, int]]:
    """(w, r) by rising rate."""
    pattern = branches_under(workload)
    if pattern is None:
        return [(workload.seq_len, 1)]
    cut = ((min(segment, workload.seq_len), rate) for segment, rate in pattern.branches)
    return sorted(cut, key=lambda branch: branch[1])


def _lies_inside(workload: Workload, branch: tuple[int, int], rank: int, size: int) -> bool:
    span, (segment, _) = _span(workload, rank, size), branch
    if branches_under(workload) is None or workload.pattern.has_grouped_heads:
        return False
    return span.start % segment == 0 and (span.stop % segment == 0 or span.stop == workload.seq_len)


def _local(workload: Workload, branches: Sequence[tuple[int, int]], rows: int) -> Workload | None:
    pattern = DilatedPattern.match(workload.pattern)
    if pattern is None or not (branches and rows):
        return None
    lengths, rates = zip(*branches, strict=True)
    part = pattern.model_copy(update={"segment_lengths": lengths, "dilation_rates": rates})
    return workload.model_copy(update={"seq_len": rows, "pattern": part})


def _pieces(
    workload: Workload, reader: int, holder: int, size: int, branches: Sequence[tuple[int, int]], zigzag: bool
) -> Iterator[Piece]:
    queries, keys = _span(workload, reader, size), _span(workload, holder, size)
    if not (queries.length and keys.length):
        return
    if zigzag and workload.causal and reader != holder:
        # Of an earlier rank all queries see the first half of the keys; of a later one the second half sees all keys.
        halves = (queries.length, keys.length // 2) if holder < reader else (queries.length // 2, keys.length)
        yield piece_of(workload, 1, (queries.length, keys.length), *halves, times=1, segments=1, masked=False)
        return
    if workload.causal and holder > reader:
        return
    for segment, rate in branches:
        first, last = max(queries.start, keys.start) // segment, (min(queries.stop, keys.stop) - 1) // segment
        tiles = [Span(index * segment, (index + 1) * segment) for index in range(first, last + 1)]
        if reader != holder:
            tiles = [tile for tile in tiles if tile.cut(queries).length and tile.cut(keys).length]
        if not tiles:
            continue
        full = sum(tile.cut(queries).length == segment for tile in tiles)
        segments = max(1, full)
        rows = max(tile.cut(queries).length for tile in tiles)
        columns = max(tile.cut(keys).length for tile in tiles)
        stackable = segments == 1 and workload.batch_size == 1
        apart = 1 if stackable else max(1, min(rate, -(-workload.num_heads // rate)))
        whole = (queries.length, keys.length)
        yield piece_of(workload, rate, whole, rows, columns, times=apart, segments=segments, masked=reader == holder)


def piece_of(
    workload: Workload,
    rate: int,
    whole: tuple[int, int],
    rows: int,
    columns: int,
    *,
    times: int,
    segments: int,
    masked: bool,
) -> Piece:
    """Calls of `rows` x `columns` positions at a rate in so many segments, on ranks that hold `whole` positions."""
    all_of_it, heads = Sizes.of(workload), heads_in_branch(workload)
    of_queries = segments * rows / workload.seq_len / rate / times * heads / workload.num_heads
    of_keys = segments * columns / workload.seq_len / rate / times * heads / workload.num_heads
    readers = readers_of(workload, rate)
    # Residues share keys only within a K/V head's group.
    of_keys *= workload.group_size / readers
    own_heads = max(1, round(heads / times))
    call = Call(
        share=of_queries,
        sizes=replace(all_of_it.part(of_queries), kv=min(of_keys, 1.0) * all_of_it.kv),
        batch=workload.batch_size * segments,
        rows=max(1, rows // rate),
        key_rows=max(1, columns // rate),
        heads=own_heads,
        kv_heads=max(1, own_heads // readers),
        rate=rate,
        masked=masked,
        whole=False,
        views=rate > 1 or segments > 1,
        readers=readers,
        one_key=workload.num_kv_heads == 1,
    )
    in_order = rate == segments == times == 1 and heads == workload.num_heads
    return Piece(
        call=call,
        times=times,
        in_order=in_order,
        whole_queries=in_order and rows == whole[0],
        whole_keys=in_order and columns == whole[1],
    )


def _parcel(workload: Workload, reader: int, holder: int, size: int, zigzag: bool) -> Parcel | None:
    """What a reader needs of a holder; None when it reads nothing."""
    queries, keys = _span(workload, reader, size), _span(workload, holder, size)
    pair = 2 * Sizes.of(workload).kv / workload.seq_len
    if not (queries.length and keys.length):
        return None
    if zigzag and workload.causal:
        rows = keys.length // 2 if holder < reader else keys.length
        part = rows < keys.length
        return Parcel(
            packed=rows * pair, rows=rows * pair, whole=True, index=0.0, copied=part and workload.batch_size > 1
        )
    if workload.causal and holder > reader:
        return None
    vectors = reach = 0.0
    for segment, rate in _branches(workload):
        # At most one segment reaches from one rank to another; what it sees there ends where the rank does.
        near = min(queries.start, keys.stop - 1) if holder < reader else max(queries.start, keys.start)
        tile = Span(near // segment * segment, (near // segment + 1) * segment)
        if not tile.cut(queries).length or not tile.cut(keys).length:
            continue
        seen = tile.cut(keys).length
        residues = min(rate, workload.group_size // readers_of(workload, rate))
        vectors += max(0.0, seen - reach) * residues / rate * heads_in_branch(workload) / workload.num_heads
        reach = max(reach, seen)
    if not reach:
        return None
    whole = vectors >= reach
    index = 0.0 if whole else vectors * workload.num_kv_heads * INDEX_BYTES
    copied = not whole or (workload.batch_size > 1 and reach < keys.length)
    return Parcel(packed=vectors * pair, rows=reach * pair, whole=whole, index=index, copied=copied)
