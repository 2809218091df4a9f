"""Dilated attention as rectangles of queries and keys: shared pairs once, and little above the diagonal.

A pair that several branches of a chain (`nesting`) give belongs to the sparsest of them. Of each branch remain the rows
that the next one leaves out, with all keys, and the rows that it keeps, with the keys that it leaves out: again rows at
constant strides. Blocks of a sequence are as large as they can be while the same segments hold all of their pairs, so
that a call counts as often as there are such segments: the logarithm of that number is added to its lse.

A causal mask goes block by block as well. A kernel's own computes whole tiles along the diagonal (torch's on a CPU half
again as many pairs as are visible at 2048 rows), so that only short diagonals are left to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm, log

from torch import Tensor

from dilabench.impls.union.branches import Branch, Place, Segments, branches_of, segments_of
from dilabench.impls.union.head_runs import Progression, fewest_runs
from dilabench.impls.union.nesting import Chain, chains
from dilabench.impls.union.strided_calls import StridedCall, at_most, regular_batches
from dilabench.impls.union.strided_rows import StridedRows
from dilabench.patterns.dilated import rows_kept
from dilabench.workload.spec import Workload

# On a CPU: smaller calls cost more than pairs that are computed twice, and than those that a causal mask wastes.
LEAST_ROWS = 256
DIAGONAL_ROWS = 256


@dataclass(frozen=True, slots=True)
class Rectangle:
    """`union.Rows` whose keys are other rows than the queries'. `parts`: of the branches that give its pairs."""

    rows: StridedRows
    seen: StridedRows
    parts: tuple[int, ...]
    diagonal: bool

    @property
    def log_count(self) -> float:
        """Logarithm of how often its pairs count."""
        return log(self.count)

    @property
    def rate(self) -> int:
        """Positions from one query to the next."""
        return self.rows.rate

    @property
    def part(self) -> int:
        """Which part of the pattern the rows belong to."""
        return self.rows.part

    @property
    def first(self) -> bool:
        """Whether no earlier call has written these rows of the output."""
        return self.rows.first

    @property
    def whole(self) -> bool:
        """Whether these are all rows of the output, in order."""
        return self.rows.whole

    def queries(self, x: Tensor) -> Tensor:
        """Rows [S·G, L, A, D] of x [B, N, H, D]."""
        return self.rows.queries(x)

    def keys(self, x: Tensor) -> Tensor:
        """Rows [S·G, L', A', D] of x [B, N, K, D]."""
        return self.seen.keys(x)

    def lse(self, lse: Tensor) -> Tensor:
        """Rows [S·G, A, L] of lse [B, H, N], as a softmax over these pairs alone has to see them."""
        rows = self.rows.lse(lse)
        return rows - self.log_count if self.log_count else rows

    def write(self, out: Tensor, lse: Tensor, branch_out: Tensor, branch_lse: Tensor) -> None:
        """Put results into rows that hold nothing yet."""
        self.rows.write(out, lse, branch_out, self._counted(branch_lse))

    def merge(self, out: Tensor, lse: Tensor, branch_out: Tensor, branch_lse: Tensor) -> None:
        """Merge results into rows that hold those of other calls."""
        self.rows.merge(out, lse, branch_out, self._counted(branch_lse))

    def add_queries(self, total: Tensor, part: Tensor) -> None:
        """Add rows to total [B, N, H, D]."""
        self.rows.add_queries(total, part)

    def add_keys(self, total: Tensor, part: Tensor) -> None:
        """Add rows to total [B, N, K, D]."""
        self.seen.add_keys(total, part)

    @property
    def count(self) -> int:
        """How many branches give its pairs."""
        return len(self.parts)

    def places(self, x: Tensor, lse: Tensor) -> tuple[Tensor, Tensor] | None:
        """Rows of x [B, N, H, D] and lse [B, H, N] as views, where they can be."""
        return self.rows.places(x, lse)

    def key_place(self, x: Tensor) -> Tensor | None:
        """Rows of x [B, N, K, D] as a view, where they can be."""
        return self.seen.key_place(x)

    def release(self, *rows: Tensor) -> None:
        """Do nothing: views own no memory."""

    def _counted(self, lse: Tensor) -> Tensor:
        return lse + self.log_count if self.log_count else lse


@dataclass(frozen=True, slots=True)
class Block:
    """Pairs of positions: of `queries` from `query` on with `keys` from `key` on, in each of a stack of segments.

    `count`: the segments of the stack, `step` positions apart. `start`, `length`: what the block lies in.
    """

    query: int
    queries: int
    key: int
    keys: int
    count: int
    step: int
    start: int
    length: int

    @property
    def diagonal(self) -> bool:
        """Whether queries and keys are the same positions."""
        return self.query == self.key


@dataclass(frozen=True, slots=True)
class Residue:
    """The rows of one head in a block: every `rate`-th position from `offset` on."""

    offset: int
    rate: int

    def rows(self, length: int) -> int:
        """How many of them lie in `length` positions."""
        return rows_kept(length, self.rate, self.offset)


def rectangles(
    workload: Workload, heads: range, least_rows: int = LEAST_ROWS, diagonal_rows: int = DIAGONAL_ROWS
) -> tuple[Rectangle, ...]:
    """The kernel calls of these query heads, in the order in which results are merged. Windows are not looked at.

    least_rows: of the rows of a branch in the shortest segments of its chain. diagonal_rows: those of a diagonal that
    is left to the kernel's own causal mask. A call gives at most half of the output of these heads.
    """
    branches = [
        replace(branch, places=tuple(place for place in branch.places if place.head in heads))
        for branch in branches_of(workload)
    ]
    most = max(1, workload.tokens * len(heads) // 2)
    alike: dict[tuple[tuple[int, ...], int, bool], list[Chain]] = {}
    for chain in chains(branches, workload.seq_len, least_rows):
        # Where the diagonal ends must be the same for all branches of a chain.
        chunk = lcm(diagonal_rows * chain[0].rate, chain[-1].rate) if workload.causal else 0
        for index in range(len(chain)):
            key = tuple(one.branch for one in chain[: index + 1]), chunk, index + 1 < len(chain)
            alike.setdefault(key, []).append(chain[index : index + 2])
    found: list[Rectangle] = []
    # Branch by branch: what a branch is the first to write, others merge into.
    for (indices, chunk, _), links in sorted(alike.items(), key=lambda item: (item[0][0][-1], item[0])):
        nested = [branches[index] for index in indices]
        for segments in segments_of(nested[-1], workload.seq_len):
            for block in _blocks(segments, [branch.segment_length for branch in nested], chunk):
                for call in _calls(workload, nested, segments, block, links):
                    found += _cut(call, most, workload.seq_len)
    return tuple(found)


def _blocks(segments: Segments, lengths: Sequence[int], chunk: int) -> Iterator[Block]:
    """Blocks that hold every pair of a segment once, or every one that a causal mask over chunks leaves."""

    def within(start: int, length: int, count: int, step: int) -> Iterator[Block]:
        spanned = [one for one in lengths if start // one != (start + length - 1) // one]
        unit = max(spanned, default=chunk or length)
        if length <= unit:
            yield Block(start, length, start, length, count, step, start, length)
            return
        front = unit << (-(-length // unit) - 1).bit_length() - 1
        back = length - front
        if front == back and (count == 1 or step == length):
            yield from within(start, front, 2 * count, front)
        else:
            yield from within(start, front, count, step)
            yield from within(start + front, back, count, step)
        around = count, step, start, length
        yield Block(start + front, back, start, front, *around)
        if not chunk:
            yield Block(start, front, start + front, back, *around)

    yield from within(0, segments.length, segments.count, segments.length)


def _calls(
    workload: Workload, nested: Sequence[Branch], segments: Segments, block: Block, links: Sequence[Chain]
) -> Iterator[Rectangle]:
    """The calls of a block of the last of these branches, for the heads of these links.

    A link has the next one of its chain beside it, if any; the branches before it hold the pairs of those blocks that
    lie in one of their segments, too.
    """
    branch = nested[-1]
    first = branch.first and block.diagonal
    plain = block.diagonal and workload.causal
    last = block.start + block.length - 1
    holding = (one.part for one in nested if block.start // one.segment_length == last // one.segment_length)
    parts = (branch.part,) if plain else tuple(holding)
    of_heads = [
        (link[0].place, [(Residue(link[0].place.position, branch.rate),) * 2] if plain else _residues(link))
        for link in links
    ]
    for at in range(len(of_heads[0][1])):
        # All but the first of the calls that give a row the keys which the next branch leaves out.
        later = of_heads[0][1][at][0] in {queries for queries, _ in of_heads[0][1][:at]}
        shapes: dict[tuple[int, int, int, int, int], list[Place]] = {}
        for place, residues in of_heads:
            queries, keys = residues[at]
            rows, key_rows = queries.rows(block.queries), keys.rows(block.keys)
            # Even without keys, the first call has to write its rows.
            if rows and (key_rows or (first and not later)):
                shape = rows, key_rows, queries.rate, keys.rate, keys.offset - queries.offset
                shapes.setdefault(shape, []).append(place._replace(position=queries.offset))
        for (rows, key_rows, rate, key_rate, ahead), places in shapes.items():
            one = block.count * workload.batch_size == 1
            for run, stacked in fewest_runs(places, workload.group_size, stackable=one):
                call = StridedCall(
                    first_batch=0,
                    batches=workload.batch_size,
                    start=run.start.after(Place(segments.start + block.query, 0, 0)),
                    stack=stacked if one else Progression(block.count, Place(block.step, 0, 0)),
                    rows=rows,
                    rate=rate,
                    part=branch.part,
                    heads=run.heads,
                    keys=run.keys,
                    first=first and not later,
                )
                ahead_of_queries = block.key - block.query + ahead
                for regular in regular_batches(call, workload.seq_len):
                    yield _rectangle(regular, ahead_of_queries, key_rows, key_rate, parts, plain)


def _residues(chain: Chain) -> list[tuple[Residue, Residue]]:
    """Rows and keys of the pairs of a branch that are not pairs of the next one, where there is one."""
    link, *following = chain
    every = Residue(link.place.position, link.rate)
    if not following:
        return [(every, every)]
    (finer,) = following
    kept = Residue(finer.place.position, finer.rate)
    left_out = [
        Residue((kept.offset + step) % finer.rate, finer.rate) for step in range(link.rate, finer.rate, link.rate)
    ]
    return [*((rows, every) for rows in left_out), *((kept, keys) for keys in left_out)]


def _rectangle(
    call: StridedCall, ahead: int, key_rows: int, key_rate: int, parts: tuple[int, ...], diagonal: bool
) -> Rectangle:
    """A call over keys that begin so many positions after the queries."""
    seen = replace(call, start=call.start.after(Place(ahead, 0, 0)), rows=key_rows, rate=key_rate)
    return Rectangle(StridedRows(call, whole=False), StridedRows(seen, whole=False), parts, diagonal)


def _cut(rectangle: Rectangle, query_rows: int, seq_len: int) -> Iterator[Rectangle]:
    """The rectangle in pieces of at most so many rows, whose batch items follow each other as segments do."""
    call, seen = rectangle.rows.call, rectangle.seen.call
    ahead = seen.start.position - call.start.position
    for small in at_most(call, query_rows):
        for piece in regular_batches(small, seq_len):
            yield _rectangle(piece, ahead, seen.rows, seen.rate, rectangle.parts, rectangle.diagonal)
