"""What no implementation can avoid: lower bounds on the FLOPs and bytes of one call. No torch."""

from functools import lru_cache
from math import lcm

from dilabench.workload.spec import DTYPE_BYTES, BlockSparsePattern, DilatedPattern, Workload
from dilabench.workload.work import (
    MODE_FACTOR,
    attended_pairs,
    flops,
    head_branches,
    head_offset,
    rows_kept,
    tensor_bytes,
)

# The positions (i mod w) mod r == offset of one branch (w, r) for one head, as (w, r, offset).
Residue = tuple[int, int, int]

MAX_COUNTED_POSITIONS = 2**22


def least_flops(workload: Workload) -> float:
    """FLOPs that no implementation can avoid: keys that several branches give may be computed once.

    The largest single branch is a lower bound of the distinct pairs, so that saved work is never suspicious.
    """
    pattern = workload.pattern
    if not isinstance(pattern, DilatedPattern) or pattern.heads == "grouped":
        return flops(workload)
    pairs = max(
        attended_pairs(
            workload.replace(
                pattern=pattern.model_copy(update={"segment_lengths": (w,), "dilation_rates": (r,)}).model_dump()
            )
        )
        for w, r in pattern.branches
    )
    return 4 * workload.head_dim * pairs * MODE_FACTOR[workload.mode]


def least_bytes(workload: Workload) -> int:
    """Bytes that one call must read and write at least.

    Forward reads q, k, v where the pattern reaches them and writes out; backward reads these, out and its gradient, and
    writes dq, dk, dv. Results are written as a whole: rows that are not reached are 0.
    """
    sizes = tensor_bytes(workload)
    query_rows, key_rows = reached_rows(workload)
    row_bytes = workload.head_dim * DTYPE_BYTES[workload.dtype]
    query, keys = query_rows * row_bytes, 2 * key_rows * row_bytes
    forward = query + keys + sizes["out"]
    backward = 3 * query + keys + sizes["q"] + sizes["k"] + sizes["v"]
    return {"forward": forward, "backward": backward, "both": forward + backward}[workload.mode]


def reached_rows(workload: Workload) -> tuple[int, int]:
    """Rows of q, over query heads, and of k and of v, over key/value heads, that belong to any pair of the pattern.

    A row on a residue sees itself, and a generated mask holds its diagonal. A mask from a file may leave out any row,
    so none of it counts.
    """
    H, K = workload.num_heads, workload.num_kv_heads
    pattern = workload.pattern
    if isinstance(pattern, BlockSparsePattern) and pattern.mask == "custom":
        return 0, 0
    dilated = pattern.branches if isinstance(pattern, BlockSparsePattern) else pattern
    if not isinstance(dilated, DilatedPattern):
        return workload.tokens * H, workload.tokens * K
    of_head = [
        frozenset((w, r, head_offset(dilated, head, r, H, K)) for w, r in head_branches(dilated, head, H))
        for head in range(H)
    ]
    of_kv_head = [frozenset[Residue]().union(*of_head[first : first + H // K]) for first in range(0, H, H // K)]
    queries = keys = 0
    for start, end in workload.sequences:
        queries += sum(rows_on(residues, end - start) for residues in of_head)
        keys += sum(rows_on(residues, end - start) for residues in of_kv_head)
    return queries * workload.batch_size, keys * workload.batch_size


@lru_cache(maxsize=4096)
def rows_on(residues: frozenset[Residue], length: int) -> int:
    """Positions of a sequence that lie on any of the residues.

    Where they repeat after too many positions to count, those of the residue that keeps most: a lower bound.
    """
    clamped = [(min(w, length), r, offset) for w, r, offset in residues]
    most = max(length // w * rows_kept(w, r, offset) + rows_kept(length % w, r, offset) for w, r, offset in clamped)
    # Segments show only where their length is no multiple of the rate, or the sequence has a single one.
    period = lcm(*(r if w % r == 0 or w == length else w for w, r, _ in clamped))
    counted = min(period, length)
    if len(clamped) == 1 or most == length or counted > MAX_COUNTED_POSITIONS:
        return most
    import numpy as np

    position = np.arange(counted)
    on = np.any([position % w % r == offset for w, r, offset in clamped], axis=0)
    full, tail = divmod(length, period)
    return full * int(on.sum()) + int(on[:tail].sum())
