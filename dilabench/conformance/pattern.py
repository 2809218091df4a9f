"""Check that the methods of a pattern agree with its definition, `counts`."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dilabench.conformance.implementation import check_implementation
from dilabench.conformance.scorecard import Findings
from dilabench.machine import Machine
from dilabench.patterns.pattern import Pattern, SequenceShape
from dilabench.patterns.registry import PatternKind, pattern_type, read_pattern
from dilabench.plugins.catalogue import Catalogue
from dilabench.units import counted

# A prime, 3·2^k, grouped heads, windows, a single token.
SHAPES = (
    SequenceShape(61, 4, 2, causal=True, window=(-1, -1)),
    SequenceShape(97, 6, 3, causal=False, window=(-1, -1)),
    SequenceShape(53, 5, 5, causal=False, window=(9, 4)),
    SequenceShape(48, 4, 4, causal=True, window=(11, 0)),
    SequenceShape(1, 2, 1, causal=True, window=(-1, -1)),
)
LONGEST_CUT = 1024
Matrix = NDArray[np.int64]


def check_pattern(kind: PatternKind, catalogue: Catalogue, machine: Machine, findings: Findings) -> None:
    """Check every method over every odd shape, then the oracle's results for the pattern."""
    examples = pattern_type(kind.name).examples()
    over = [(example, shape) for example in examples for shape in SHAPES if example.why_not_over(shape) is None]
    for title, question in QUESTIONS.items():
        with findings.tried(title):
            problems = (
                f"{example.label()} over {shape}: {why}" for example, shape in over for why in question(example, shape)
            )
            findings.hold(title, next(problems, None), counted(len(over), "shape"))
    with findings.tried("reads what it writes"):
        lost = [example.label() for example in examples if read_pattern(example.model_dump(mode="json")) != example]
        findings.hold("reads what it writes", f"{lost[0]} comes back as another" if lost else None)
    oracle = next(implementation for implementation in catalogue.implementations if implementation.role == "oracle")
    check_implementation(oracle, catalogue, machine, findings, kinds=[kind.name])


def matrix(pattern: Pattern, shape: SequenceShape, head: int, masked: bool = True) -> Matrix:
    """C[head] by the definition, [length, length], under causal mask and window or without.

    Raises ValueError for parts that do not rise, or reach beyond the sequence.
    """
    counts = np.zeros((shape.length, shape.length), np.int64)
    for group in pattern.counts(shape, head, np.arange(shape.length)):
        for part in group.parts:
            keys = np.asarray(part, np.int64)
            if (np.diff(keys) <= 0).any() or (len(keys) and not 0 <= keys[0] <= keys[-1] < shape.length):
                raise ValueError(f"counts gave the keys {keys.tolist()!r:.80}; they must rise inside the sequence")
            counts[group.rows[:, None], keys] += 1
    if masked:
        i, j = np.indices(counts.shape)
        left, right = shape.reach
        counts *= (left is None or j >= i - left) & (right is None or j <= i + right)
    return counts


def _pairs(pattern: Pattern, shape: SequenceShape) -> Iterator[str]:
    seen = [matrix(pattern, shape, head) for head in range(shape.num_heads)]
    pairs, attended = pattern.pairs(shape), sum(int(c.sum()) for c in seen)
    distinct = sum(int((c > 0).sum()) for c in seen)
    if pairs.attended != attended:
        yield f"pairs says {pairs.attended} are attended, counts {attended}"
    if not 0 <= pairs.least <= distinct:
        yield f"pairs says at least {pairs.least} differ, counts has {distinct}"


def _rows(pattern: Pattern, shape: SequenceShape) -> Iterator[str]:
    for head in range(shape.num_heads):
        seen, anywhere = matrix(pattern, shape, head), matrix(pattern, shape, head, masked=False)
        if pattern.covered(shape, head).tolist() != (seen.sum(1) > 0).tolist():
            yield f"covered of head {head} is not the rows that counts gives a key"
        for key in range(0, shape.length, 7):
            if pattern.rows_seeing(shape, head, key).tolist() != np.flatnonzero(anywhere[:, key]).tolist():
                yield f"rows_seeing of head {head}, key {key} is not the rows to which counts gives it"
        if int(anywhere.sum(1).max()) > pattern.parts * pattern.keys_per_row(shape.length):
            yield f"a row of head {head} has more keys than parts · keys_per_row"


def _some_rows(pattern: Pattern, shape: SequenceShape) -> Iterator[str]:
    rows = np.unique(np.linspace(0, shape.length - 1, 5).astype(np.int64))
    head = shape.num_heads - 1
    counted_pairs = np.zeros((len(rows), shape.length), np.int64)
    for group in pattern.counts(shape, head, rows):
        for part in group.parts:
            counted_pairs[np.searchsorted(rows, group.rows)[:, None], np.asarray(part, np.int64)] += 1
    if not np.array_equal(counted_pairs, matrix(pattern, shape, head, masked=False)[rows]):
        yield f"counts of rows {rows.tolist()} alone differs from counts of all rows"


def _heads(pattern: Pattern, shape: SequenceShape) -> Iterator[str]:
    alike: dict[object, tuple[int, Matrix]] = {}
    for head in range(shape.num_heads):
        seen = matrix(pattern, shape, head)
        first, of_first = alike.setdefault(pattern.head_key(shape, head), (head, seen))
        if not np.array_equal(of_first, seen):
            yield f"head_key calls heads {first} and {head} alike, counts does not"


def _reach(pattern: Pattern, shape: SequenceShape) -> Iterator[str]:
    seen = [matrix(pattern, shape, head) for head in range(shape.num_heads)]
    group = shape.num_heads // shape.num_kv_heads
    queries, keys = pattern.reached_rows(shape)
    by_kv_head = [sum(seen[at : at + group]) for at in range(0, shape.num_heads, group)]
    of_counts = sum(int((c.sum(1) > 0).sum()) for c in seen), sum(int((np.sum(c, 0) > 0).sum()) for c in by_kv_head)
    if queries > of_counts[0] or keys > of_counts[1]:
        yield f"reached_rows says {(queries, keys)} must be read, counts has {of_counts}"


def _last_rows(pattern: Pattern, shape: SequenceShape) -> Iterator[str]:
    seen = [matrix(pattern, shape, head) for head in range(shape.num_heads)]
    group = shape.num_heads // shape.num_kv_heads
    for rows in {1, shape.length // 3, shape.length} - {0}:
        last = [c[-rows:] for c in seen]
        by_kv_head = [sum(last[at : at + group]) for at in range(0, shape.num_heads, group)]
        attended, distinct = sum(int(c.sum()) for c in last), sum(int((c > 0).sum()) for c in last)
        queries = sum(int((c.sum(1) > 0).sum()) for c in last)
        keys = sum(int((np.sum(c, 0) > 0).sum()) for c in by_kv_head)
        answer = pattern.last_rows(shape, rows)
        if answer.pairs.attended != attended:
            yield f"last_rows says the last {rows} rows attend {answer.pairs.attended} pairs, counts {attended}"
        if answer.pairs.least > distinct or answer.queries > queries or answer.keys > keys:
            yield f"last_rows says {answer} at least of the last {rows} rows, counts has {distinct, queries, keys}"


def _segments(pattern: Pattern, shape: SequenceShape) -> Iterator[str]:
    i = np.arange(shape.length)
    for head in range(shape.num_heads):
        segments, anywhere = pattern.strided_segments(shape, head), matrix(pattern, shape, head, masked=False)
        if segments is not None:
            on = [np.where(i % w % r == offset, i // w, -1 - i) for w, r, offset in segments]
            union = sum((labels[:, None] == labels) & (labels >= 0) for labels in on)
            if not np.array_equal(union, anywhere):
                yield f"strided_segments of head {head} are not counts"
    heads = range(shape.num_heads)
    if pattern.is_dense(shape) and not all((matrix(pattern, shape, h, masked=False) == 1).all() for h in heads):
        yield "is_dense says so, counts does not"


def _cut(pattern: Pattern, shape: SequenceShape) -> Iterator[str]:
    cut = pattern.cut_length
    if cut is not None and cut <= LONGEST_CUT:
        # A length with keys on both sides of the cut.
        longer = replace(shape, length=2 * cut + 5)
        anywhere = matrix(pattern, longer, 0, masked=False)
        if anywhere[:cut, cut:].any() or anywhere[cut:, :cut].any():
            yield f"cut_length is {cut}, and counts has keys on the other side of it"


def _edges(pattern: Pattern, shape: SequenceShape) -> Iterator[str]:
    edges = pattern.edges(shape)
    if len(edges) and not 0 <= edges.min() <= edges.max() <= shape.length:
        yield f"edges {edges.tolist()!r:.60} are outside of the sequence"


QUESTIONS: dict[str, Callable[[Pattern, SequenceShape], Iterator[str]]] = {
    "pairs": _pairs,
    "covered, rows_seeing, keys_per_row": _rows,
    "counts of some rows": _some_rows,
    "head_key": _heads,
    "reached_rows": _reach,
    "last_rows": _last_rows,
    "strided_segments, is_dense": _segments,
    "cut_length": _cut,
    "edges": _edges,
}
