"""What a parallel call must move and how evenly its work lies, in closed form. No torch, no tensors.

Sources: docs/explanation of ring attention (`ring.md` §5.3). l = N/P rows per rank; bytes are those that the rank with
most receives, which all others wait for.
"""

from __future__ import annotations

from itertools import pairwise

from dilabench.spec import DTYPE_BYTES, UNBOUNDED, DilatedPattern, Workload

RINGS = ("ring", "ring-overlap", "zigzag-ring")


def load_balance(workload: Workload, implementation: str, ranks: int) -> float | None:
    """λ: mean over maximum of the ranks' work; 1 is even. None where no closed form is known (windows, packed).

    Dense and causal in order P/(2P-1), zigzag 1; dilated and causal in order, rank j:
    work_j = Σ_{w<=l} l·w/(2r²) + Σ_{w>l} (((j·l) mod w) + l/2)·l/r².
    """
    if not workload.causal or ranks == 1 or implementation == "ulysses":
        return 1.0
    if workload.window != UNBOUNDED or workload.layout == "packed":
        return None
    if implementation == "zigzag-ring":
        return 1.0 if workload.pattern.kind == "dense" else None
    if workload.pattern.kind == "dense":
        return ranks / (2 * ranks - 1)
    if not isinstance(workload.pattern, DilatedPattern):
        return None
    rows = workload.seq_len / ranks
    work = [0.0] * ranks
    for segment, rate in workload.pattern.branches:
        length = min(segment, workload.seq_len)
        for rank in range(ranks):
            before = (rank * rows) % length + rows / 2 if length > rows else length / 2
            work[rank] += rows * before / rate**2
    return sum(work) / ranks / max(work)


def received_bytes(workload: Workload, implementation: str, ranks: int) -> int | None:
    """Bytes that one call in the workload's mode brings the rank with most; None where no closed form holds.

    Rings: K and V of the others, again in the backward pass, where dK and dV come back in the dtype of K. Gather: each
    row of nested branches once, rows = Σ (w_i - max(w_{i-1}, l))/r_i; its backward pass has only gradients, in float32
    (float64 for float64).
    """
    if ranks == 1:
        return 0
    if workload.window != UNBOUNDED or workload.seq_len % (2 * ranks) or workload.layout == "packed":
        return None
    item, rows = DTYPE_BYTES[workload.dtype], workload.seq_len // ranks
    vector = workload.batch_size * workload.num_kv_heads * workload.head_dim * 2
    forward, backward = workload.mode != "backward", workload.mode != "forward"
    if implementation in RINGS and workload.pattern.kind == "dense":
        # Behind a causal mask one rank receives every K and another every dK; the sum over one rank is the larger.
        shard = vector * rows * item
        if not workload.causal:
            return shard * (ranks - 1) * (forward + 2 * backward)
        keys, gradients = _causal_shards(implementation, ranks)
        return max(
            int(shard * (key * (forward + backward) + gradient * backward))
            for key, gradient in zip(keys, gradients, strict=True)
        )
    if implementation == "ring-allgather" and isinstance(workload.pattern, DilatedPattern):
        gathered = _nested_rows(workload, rows)
        wide = 8 if workload.dtype == "float64" else 4
        return None if gathered is None else vector * gathered * (item * forward + wide * backward)
    return None


def _causal_shards(implementation: str, ranks: int) -> tuple[list[float], list[float]]:
    """Shards of K that each rank receives, and shards of dK that come back to it."""
    if implementation == "zigzag-ring":
        keys = [rank / 2 + (ranks - 1 - rank) for rank in range(ranks)]
        return keys, [(ranks - 1 - rank) / 2 + rank for rank in range(ranks)]
    keys = [float(rank) for rank in range(ranks)]
    return keys, keys[::-1]


def _nested_rows(workload: Workload, rows: int) -> int | None:
    """Rows that the last rank of a segment gathers per key/value head, where branches nest and residues are single."""
    pattern = workload.pattern
    assert isinstance(pattern, DilatedPattern)
    single = workload.num_heads == workload.num_kv_heads or pattern.offset_by == "kv_head"
    branches = sorted((min(w, workload.seq_len), r) for w, r in pattern.branches)
    nested = all(b[0] % a[0] == 0 and b[1] % a[1] == 0 for a, b in pairwise(branches))
    even = all((rows % w == 0 or w % rows == 0) and min(w, rows) % r == 0 for w, r in branches)
    if not (single and nested and even and pattern.heads == "all"):
        return None
    total, inner = 0, rows
    for segment, rate in branches:
        total += max(0, segment - inner) // rate
        inner = max(inner, segment)
    return total
