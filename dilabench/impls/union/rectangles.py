"""Dilated attention as rectangles of queries and keys: shared pairs once, and little above the diagonal.

A pair that several branches of a chain (`branches.chains`) give belongs to the sparsest of them. A branch keeps two
parts: the rows that the next branch leaves out, with all keys, and the other rows with the keys that the next branch
leaves out. Both have rows at constant strides. Blocks of a sequence are as large as they can be while the same segments
hold all of their pairs, so that a call counts as often as there are such segments: the logarithm of that number is
added to its lse.

A causal mask goes block by block as well: shared pairs lie in other rows than keys, which no kernel masks. Only short
diagonals are left to its own mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm, log

from torch import Tensor

from dilabench.impls.union.branches import (
    LEAST_ROWS,
    Branch,
    Chain,
    Place,
    Progression,
    Segments,
    branches_of,
    chains,
    fewest_runs,
    segments_of,
)
from dilabench.impls.union.strided_rows import OblongRows, StridedRows, at_most, regular_batches
from dilabench.patterns.dilated import rows_kept
from dilabench.workload.spec import Workload

# On a CPU, smaller calls cost more than pairs that a causal mask wastes.
DIAGONAL_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle(OblongRows):
    """Strided rows of queries whose keys are other rows. `parts`: of the branches that give its pairs, `count` in
    number.
    """

    parts: tuple[int, ...]
    diagonal: bool

    def lse(self, lse: Tensor) -> Tensor:
        """Rows [S·G, A, L] of lse [B, H, N], as a softmax over these pairs alone has to see them."""
        rows = StridedRows.lse(self, lse)
        return rows - log(self.count) if self.count > 1 else rows

    def write(self, out: Tensor, lse: Tensor, branch_out: Tensor, branch_lse: Tensor) -> None:
        """Write results into empty rows."""
        StridedRows.write(self, out, lse, branch_out, self._counted(branch_lse))

    def merge(self, out: Tensor, lse: Tensor, branch_out: Tensor, branch_lse: Tensor) -> None:
        """Merge results into rows with results of other calls."""
        StridedRows.merge(self, out, lse, branch_out, self._counted(branch_lse))

    def _counted(self, lse: Tensor) -> Tensor:
        return lse + log(self.count) if self.count > 1 else lse


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
        """Their number in `length` positions."""
        return rows_kept(length, self.rate, self.offset)


def rectangles(
    workload: Workload, heads: range, least_rows: int = LEAST_ROWS, diagonal_rows: int = DIAGONAL_ROWS
) -> tuple[Rectangle, ...]:
    """The kernel calls of these query heads, in the order in which results are merged. Windows are not looked at.

    least_rows: of the rows of a branch in the shortest segments of its chain. diagonal_rows: rows of a diagonal that
    is left to the kernel's own causal mask. A call gives at most half of the output of these heads.
    """
    branches = [
        replace(branch, places=tuple(place for place in branch.places if place.head in heads))
        for branch in branches_of(workload)
    ]
    most = max(1, workload.tokens * len(heads) // 2)
    # The last of these branches and the next one of the chain, if any, for every head with the same nesting.
    pairs: dict[tuple[tuple[int, ...], int, bool], list[Chain]] = {}
    for chain in chains(branches, workload.seq_len, least_rows):
        # The diagonal must have the same end for all branches of a chain.
        chunk = lcm(diagonal_rows * chain[0].rate, chain[-1].rate) if workload.causal else 0
        for index in range(len(chain)):
            key = tuple(link.branch for link in chain[: index + 1]), chunk, index + 1 < len(chain)
            pairs.setdefault(key, []).append(chain[index : index + 2])
    found: list[Rectangle] = []
    # Branch by branch: what a branch is the first to write, others merge into.
    for (indices, chunk, _), links in sorted(pairs.items(), key=lambda item: (item[0][0][-1], item[0])):
        nested = [branches[index] for index in indices]
        for segments in segments_of(nested[-1], workload.seq_len):
            for block in _blocks(segments, [branch.segment_length for branch in nested], chunk):
                for rectangle in _rectangles_of(workload, nested, segments, block, links):
                    for piece in at_most(rectangle, most):
                        found += regular_batches(piece, workload.seq_len)
    return tuple(found)


def _blocks(segments: Segments, lengths: Sequence[int], chunk: int) -> Iterator[Block]:
    """Blocks that hold every pair of a segment once, or every one that a causal mask over chunks leaves."""

    def within(start: int, length: int, count: int, step: int) -> Iterator[Block]:
        cut = [unit for unit in lengths if start // unit != (start + length - 1) // unit]
        unit = max(cut, default=chunk or length)
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


def _rectangles_of(
    workload: Workload, nested: Sequence[Branch], segments: Segments, block: Block, links: Sequence[Chain]
) -> Iterator[Rectangle]:
    """The rectangles of a block of the last of these branches, for the heads of these links.

    A link comes with the next one of its chain, if any; the branches before it hold the pairs of those blocks that
    lie in one of their segments, too.
    """
    branch = nested[-1]
    first = branch.first and block.diagonal
    diagonal = block.diagonal and workload.causal
    last = block.start + block.length - 1
    holding = (outer.part for outer in nested if block.start // outer.segment_length == last // outer.segment_length)
    parts = (branch.part,) if diagonal else tuple(holding)
    of_heads = [
        (link[0].place, [(Residue(link[0].place.position, branch.rate),) * 2] if diagonal else _residues(link))
        for link in links
    ]
    one_segment = block.count * workload.batch_size == 1
    for index in range(len(of_heads[0][1])):
        # All calls but the first that give a row the keys outside the next branch.
        later = of_heads[0][1][index][0] in {queries for queries, _ in of_heads[0][1][:index]}
        shapes: dict[tuple[int, int, int, int, int], list[Place]] = {}
        for place, residues in of_heads:
            queries, keys = residues[index]
            length, key_length = queries.rows(block.queries), keys.rows(block.keys)
            # Even without keys, the first call has to write its rows.
            if length and (key_length or (first and not later)):
                shape = length, key_length, queries.rate, keys.rate, keys.offset - queries.offset
                shapes.setdefault(shape, []).append(place._replace(position=queries.offset))
        for (length, key_length, rate, key_rate, ahead), places in shapes.items():
            for run, residues_stacked in fewest_runs(tuple(places), workload.group_size, stackable=one_segment):
                rectangle = Rectangle(
                    rate=rate,
                    part=branch.part,
                    first=first and not later,
                    count=len(parts),
                    first_batch=0,
                    batches=workload.batch_size,
                    start=run.start.after(Place(segments.start + block.query, 0, 0)),
                    stack=residues_stacked if one_segment else Progression(block.count, Place(block.step, 0, 0)),
                    length=length,
                    heads=run.heads,
                    key_heads=run.keys,
                    ahead=block.key - block.query + ahead,
                    key_length=key_length,
                    key_rate=key_rate,
                    parts=parts,
                    diagonal=diagonal,
                )
                yield from regular_batches(rectangle, workload.seq_len)


def _residues(chain: Chain) -> list[tuple[Residue, Residue]]:
    """Rows and keys of the pairs of a branch that are not pairs of the next one, if any."""
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
