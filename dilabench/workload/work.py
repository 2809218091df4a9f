"""How much work a workload is: attended pairs, FLOPs, tensor bytes. Exact integer arithmetic, no tensors.

Formulas: semantics.md §2. Forward costs 4·D FLOPs per (query, key) pair of the multiset, backward 2.5 times that.
"""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from dilabench.patterns.block_masks import block_mask, visible_blocks
from dilabench.workload.spec import DTYPE_BYTES, BlockSparsePattern, DilatedPattern, Workload

FORWARD_FLOPS_PER_PAIR_AND_DIM = 4
BACKWARD_FACTOR = 2.5
MODE_FACTOR = {"forward": 1.0, "backward": BACKWARD_FACTOR, "both": 1.0 + BACKWARD_FACTOR}


def head_offset(pattern: DilatedPattern, head: int, rate: int, num_heads: int, num_kv_heads: int) -> int:
    """offset(h, r): the residue that head `head` keeps in a branch of dilation `rate` (semantics.md §2)."""
    index, count = head, num_heads
    if pattern.offset_by == "kv_head":
        index, count = head // (num_heads // num_kv_heads), num_kv_heads
    if pattern.offset == "modulo":
        return index % rate
    return index // -(-count // rate)


def head_branches(pattern: DilatedPattern, head: int, num_heads: int) -> tuple[tuple[int, int], ...]:
    """The (w, r) branches that head `head` takes part in: all of them, or its group's one.

    Grouped: heads are split over the branches in order, sizes differing by at most one, larger groups first.
    """
    if pattern.heads == "all":
        return pattern.branches
    size, larger = divmod(num_heads, len(pattern.branches))
    start = 0
    for index, branch in enumerate(pattern.branches):
        start += size + (index < larger)
        if head < start:
            return (branch,)
    raise ValueError(f"head {head} is not below num_heads {num_heads}")


def rows_kept(length: int, rate: int, offset: int) -> int:
    """Rows of a segment of `length` positions that lie on the residue: ceil((length - offset) / rate), at least 0."""
    return max(0, -(-(length - offset) // rate))


def windowed_pairs(rows: int, causal: bool, left: int, right: int) -> int:
    """Visible pairs among `rows` consecutive rows under a causal mask and a window (-1: unbounded)."""
    right = 0 if causal else right
    reach_left = rows - 1 if left < 0 else min(left, rows - 1)
    reach_right = rows - 1 if right < 0 else min(right, rows - 1)
    if rows <= 0:
        return 0
    # Sum over distances d of (rows - d), on both sides of the diagonal.
    below = reach_left * rows - reach_left * (reach_left + 1) // 2
    above = reach_right * rows - reach_right * (reach_right + 1) // 2
    return rows + below + above


def masked_pairs(mask: Any, size: int, rows: int, causal: bool, window: tuple[int, int]) -> int:
    """Visible pairs of one head's block mask [n, n] (bool array over blocks of `size`) on `rows` consecutive rows."""
    last = mask.shape[0] - 1
    short = rows - last * size
    row, column = mask.nonzero()
    # Blocks at one distance hold equally many pairs, but for those that the end of the rows cuts.
    alike = Counter(((row - column) * 4 + (row == last) * 2 + (column == last)).tolist())
    total = 0
    for kind, count in alike.items():
        queries, keys = (short if kind & 2 else size), (short if kind & 1 else size)
        total += count * _pairs_of_blocks((kind >> 2) * size, queries, keys, causal, window)
    return total


@lru_cache(maxsize=4096)
def _pairs_of_blocks(distance: int, queries: int, keys: int, causal: bool, window: tuple[int, int]) -> int:
    """Pairs between a block of queries and one of keys that starts `distance` rows earlier."""
    left, right = window
    right = 0 if causal else right
    if left < 0 and (right < 0 or keys - 1 <= distance + right):
        return queries * keys
    total = 0
    for query in range(queries):
        position = query + distance
        first = 0 if left < 0 else max(0, position - left)
        last = keys - 1 if right < 0 else min(keys - 1, position + right)
        total += max(0, last - first + 1)
    return total


def attended_pairs(workload: Workload) -> int:
    """(query, key) pairs of the multiset in one forward call, over batch and heads."""
    total = 0
    for start, end in workload.sequences:
        total += _sequence_pairs(workload, end - start)
    return total * workload.batch_size


def _sequence_pairs(workload: Workload, length: int) -> int:
    left, right = workload.window
    pattern = workload.pattern
    if isinstance(pattern, BlockSparsePattern):
        total = 0
        for times, rows, head, window in _masked_rows(workload, pattern, length):
            pairs = _pairs_of_masks(pattern, rows, workload.num_heads, workload.causal, window)
            total += times * pairs[head % len(pairs)]
        return total
    if not isinstance(pattern, DilatedPattern):
        return workload.num_heads * windowed_pairs(length, workload.causal, left, right)
    total = 0
    for head in range(workload.num_heads):
        for segment, rate in head_branches(pattern, head, workload.num_heads):
            offset = head_offset(pattern, head, rate, workload.num_heads, workload.num_kv_heads)
            # Window distances count positions; rows of a branch lie `rate` positions apart.
            limits = tuple(side if side < 0 else side // rate for side in (left, right))
            full, tail = divmod(length, min(segment, length))
            total += full * windowed_pairs(rows_kept(min(segment, length), rate, offset), workload.causal, *limits)
            total += windowed_pairs(rows_kept(tail, rate, offset), workload.causal, *limits)
    return total


def _masked_rows(
    workload: Workload, pattern: BlockSparsePattern, length: int
) -> Iterator[tuple[int, int, int, tuple[int, int]]]:
    """(times, rows, query head, window in rows) of every set of rows that a block mask lies over."""
    dilated = pattern.branches
    for head in range(workload.num_heads):
        if dilated is None:
            yield 1, length, head, workload.window
            continue
        for segment, rate in head_branches(dilated, head, workload.num_heads):
            offset = head_offset(dilated, head, rate, workload.num_heads, workload.num_kv_heads)
            left, right = (side if side < 0 else side // rate for side in workload.window)
            full, tail = divmod(length, min(segment, length))
            for times, part in ((full, min(segment, length)), (1, tail)):
                if rows := rows_kept(part, rate, offset):
                    yield times, rows, head, (left, right)


@lru_cache(maxsize=4096)
def _pairs_of_masks(
    pattern: BlockSparsePattern, rows: int, num_heads: int, causal: bool, window: tuple[int, int]
) -> tuple[int, ...]:
    """Pairs of each head, or of the one mask that all heads share."""
    masks = block_mask(pattern, rows, causal, num_heads)
    return tuple(masked_pairs(mask, pattern.block_size, rows, causal, window) for mask in masks)


def sparsity_of(workload: Workload) -> float:
    """The share of visible blocks that a block-sparse workload does not compute, over all heads and branches."""
    pattern = workload.pattern
    assert isinstance(pattern, BlockSparsePattern)
    # Per set of rows, blocks computed by each mask, and visible: a mask file is read once for all heads.
    counted: dict[int, tuple[list[int], int]] = {}
    computed = visible = 0
    for start, end in workload.sequences:
        for times, rows, head, _ in _masked_rows(workload, pattern, end - start):
            if rows not in counted:
                masks = block_mask(pattern, rows, workload.causal, workload.num_heads)
                counted[rows] = [int(mask.sum()) for mask in masks], visible_blocks(masks.shape[-1], workload.causal)
            blocks, all_blocks = counted[rows]
            computed += times * blocks[head % len(blocks)]
            visible += times * all_blocks
    return 1.0 - computed / visible


def flops(workload: Workload) -> float:
    """FLOPs of one call in the workload's mode, by the multiset formula, whatever an implementation saves."""
    forward = FORWARD_FLOPS_PER_PAIR_AND_DIM * workload.head_dim * attended_pairs(workload)
    return forward * MODE_FACTOR[workload.mode]


def tensor_bytes(workload: Workload) -> dict[str, int]:
    """Bytes of q, k, v, out and lse of the workload."""
    item = DTYPE_BYTES[workload.dtype]
    query = workload.tokens * workload.num_heads * workload.head_dim * item
    key = workload.tokens * workload.num_kv_heads * workload.head_dim * item
    lse = workload.tokens * workload.num_heads * (8 if workload.dtype == "float64" else 4)
    return {"q": query, "k": key, "v": key, "out": query, "lse": lse}
