"""Whole documents of a packing assigned to ranks, for patterns with cuts: no rank needs keys of another.

The segments of dilated attention begin again in every document, so a rank that holds whole documents sends nothing. A
document longer than the least common multiple of the segment lengths is cut at its multiples, where no segment crosses.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import gcd

import numpy as np
from numpy.typing import NDArray

from dilabench.distributed.assignment import Runs
from dilabench.distributed.balance import Interval
from dilabench.distributed.row_assignment import repeated
from dilabench.patterns.answers import SequenceShape
from dilabench.patterns.pattern import Pattern
from dilabench.workload.spec import UNBOUNDED

# (segment length, dilation rate, number of heads), and the length after which a document may be cut.
Segments = tuple[tuple[tuple[int, int, int], ...], int]


def segments_of(pattern: Pattern, tokens: int, num_heads: int = 1, num_kv_heads: int = 1) -> Segments | None:
    """The segments of a pattern in documents of at most `tokens` tokens; None for one without segments or cuts.

    Head counts have no common divisor, so that heads with equal branches count as one.
    """
    shape = SequenceShape(tokens, num_heads, num_kv_heads, True, UNBOUNDED)
    of_heads = [pattern.strided_segments(shape, head) for head in range(num_heads)]
    if pattern.cut_length is None or None in of_heads:
        return None
    counts = Counter((segment, rate) for branches in of_heads for segment, rate, _ in branches or ())
    common = gcd(*counts.values())
    return (
        tuple((segment, rate, heads // common) for (segment, rate), heads in sorted(counts.items())),
        min(pattern.cut_length, tokens),
    )


@lru_cache(maxsize=64)
def assigned_documents(
    bounds: tuple[Interval, ...], segments: Segments, ranks: int
) -> tuple[tuple[Interval, ...], ...]:
    """By rank the (start, stop) of its documents, or parts of cut ones, in ascending order.

    Balanced are tokens and pairs: the largest goes first, to the rank whose larger share of the two stays smallest. The
    mask does not matter. A rank gets nothing if there are fewer parts than ranks.
    """
    parts = _parts(np.array(bounds), segments[1])
    lengths = parts[:, 1] - parts[:, 0]
    work = pairs_of(lengths, segments)
    shares = np.stack([lengths / lengths.sum(), work / max(1.0, float(work.sum()))], axis=1)
    loads = [(0.0, 0.0)] * ranks
    owned: list[list[int]] = [[] for _ in range(ranks)]
    of_parts = shares.tolist()
    for at in np.argsort(-shares.max(1), kind="stable").tolist():
        tokens, pairs = of_parts[at]
        added = [(load[0] + tokens, load[1] + pairs) for load in loads]
        rank = min(range(ranks), key=lambda rank: max(added[rank]))
        loads[rank] = added[rank]
        owned[rank].append(at)
    ends = parts.tolist()
    in_order = sorted((sorted(of_rank) for of_rank in owned), key=lambda of_rank: of_rank or [len(ends)])
    return tuple(tuple((ends[at][0], ends[at][1]) for at in of_rank) for of_rank in in_order)


def runs_of(documents: tuple[tuple[Interval, ...], ...]) -> tuple[Runs, ...]:
    """The rows of each rank."""
    return tuple(tuple(range(*ends) for ends in of_rank) for of_rank in documents)


def pairs_of(lengths: NDArray[np.int64], segments: Segments) -> NDArray[np.float64]:
    """Pairs in documents of these lengths without a mask, as if each head kept residue 0."""
    total = np.zeros(len(lengths))
    for segment, rate, heads in segments[0]:
        full, rest = np.divmod(lengths, segment)
        total += heads * (full * float(-(-segment // rate)) ** 2 + (-(-rest // rate)).astype(np.float64) ** 2)
    return total


def _parts(documents: NDArray[np.int64], cut: int) -> NDArray[np.int64]:
    """Documents (start, stop), the longer ones cut at multiples of `cut`."""
    at, nth = repeated(-(-(documents[:, 1] - documents[:, 0]) // cut))
    starts = documents[at, 0] + nth * cut
    return np.stack([starts, np.minimum(starts + cut, documents[at, 1])], axis=1)
