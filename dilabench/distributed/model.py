"""What a parallel call must move and how evenly its work lies, in closed form. No torch, no tensors.

Sources: docs/explanation of ring attention (`ring.md` §5.3). l = N/P rows per rank; bytes are those that the rank with
most receives, which all others wait for.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from dilabench.distributed import block_deal
from dilabench.distributed.balance import hop_pairs
from dilabench.workload.spec import DTYPE_BYTES, UNBOUNDED, DilatedPattern, Workload

RINGS = ("ring", "ring-overlap", "zigzag-ring")
# It moves what a ring moves, but keeps all keys for the backward pass.
GATHER = "zigzag-allgather"


def load_balance(workload: Workload, implementation: str, ranks: int) -> float | None:
    """λ: mean over maximum of the ranks' work; 1 is even. None for an implementation whose sharding is not known here.

    Dense and causal this comes to P/(2P-1) in order and to 1 zigzag.
    """
    if implementation == "ulysses":
        # Whole heads: where they do not divide, some ranks have one more.
        return workload.num_heads / ranks / -(-workload.num_heads // ranks)
    pairs = hop_pairs(workload, implementation, ranks)
    if pairs is None:
        return None
    work = [sum(hops) for hops in pairs]
    return sum(work) / ranks / max(work)


def overlapping_share(workload: Workload, implementation: str, ranks: int) -> float | None:
    """Share of the slowest rank's work that can go on while messages are under way; None where λ is None, too.

    Gather: the work that needs no remote key. Rings: all but the last hop's, whose keys must have arrived; a backward
    pass that begins with this hop has no gradients to send before. Ulysses, and the zigzag gather, where all ranks work
    alike and the last one has no call on its own keys alone: nothing.
    """
    if implementation in ("ulysses", GATHER):
        return 0.0
    pairs = hop_pairs(workload, implementation, ranks)
    if pairs is None:
        return None
    slowest = max(pairs, key=sum)
    if implementation in ("ring-allgather", *block_deal.IMPLEMENTATIONS):
        return slowest[0] / sum(slowest)
    last = next((work for work in reversed(slowest[1:]) if work), 0.0)
    return 1 - last / sum(slowest)


def ideal_efficiency(balance: float, computation_ns: float, transfer_ns: float, overlapping_ns: float) -> float:
    """E = λ · T_comp / (T_comp + T_exposed) with T_exposed = max(0, V/B - T_local) (ring.md §5.3).

    computation: T_comp = FLOPs / (P·F), of the mean rank. transfer: V/B. overlapping: T_local, the work meanwhile.
    """
    exposed_ns = max(0.0, transfer_ns - overlapping_ns)
    return balance * computation_ns / (computation_ns + exposed_ns)


def received_bytes(workload: Workload, implementation: str, ranks: int) -> int | None:
    """Bytes that one call in the workload's mode brings the rank with most; None where no closed form holds.

    Rings: K and V of the others, again in the backward pass (where hops overlap, all but the last hop's, which were
    kept), and there dK and dV come back in the dtype of K. The zigzag gather: the same with all of them kept. Gather:
    each row of nested branches once,
    rows = Σ (w_i - max(w_{i-1}, l))/r_i, behind a causal mask what lies before; its backward pass has only gradients,
    of several branches in float32 (float64 for float64). Ulysses: the other ranks' (P-1)/P of q, k, v, out and lse,
    backward of dout, dq, dk and dv. Block masks: `block_deal.received_bytes`.
    """
    if ranks == 1:
        return 0
    if implementation in block_deal.IMPLEMENTATIONS:
        return block_deal.received_bytes(workload, ranks)
    if workload.seq_len % (2 * ranks) or workload.layout == "packed":
        return None
    item, rows = DTYPE_BYTES[workload.dtype], workload.seq_len // ranks
    wide = 8 if workload.dtype == "float64" else 4
    forward, backward = workload.mode != "backward", workload.mode != "forward"
    if implementation == "ulysses":
        if workload.num_heads % ranks or workload.num_kv_heads % ranks:
            return None
        vectors = 2 * (workload.num_heads + workload.num_kv_heads) * workload.head_dim * item
        row = vectors * (forward + backward) + workload.num_heads * wide * forward
        return workload.batch_size * rows * row * (ranks - 1) // ranks
    if workload.window != UNBOUNDED:
        return None
    vector = workload.batch_size * workload.num_kv_heads * workload.head_dim * 2
    if implementation in (*RINGS, GATHER) and workload.pattern.kind == "dense":
        # Behind a causal mask one rank receives every K and another every dK; the largest sum of one rank counts.
        halves = max(
            keys * forward + (keys_again + gradients) * backward
            for keys, keys_again, gradients in _half_shards(workload.causal, implementation, ranks)
        )
        return vector * rows * item * halves // 2
    if implementation == "ring-allgather":
        gathered = _nested_rows(workload, ranks)
        if gathered is None:
            return None
        returned = wide if isinstance(workload.pattern, DilatedPattern) else item
        return vector * max(item * forward * keys + returned * backward * own for keys, own in gathered)
    return None


def joined_bytes(workload: Workload, ranks: int) -> int | None:
    """Bytes that each rank receives besides where calls begin and end with whole tensors: out, and dq, dk, dv.

    None where ranks hold different numbers of rows.
    """
    if workload.seq_len % ranks or workload.layout == "packed":
        return None
    forward, backward = workload.mode != "backward", workload.mode != "forward"
    heads = workload.num_heads * (forward + backward) + 2 * workload.num_kv_heads * backward
    others = workload.seq_len - workload.seq_len // ranks
    return workload.batch_size * others * heads * workload.head_dim * DTYPE_BYTES[workload.dtype]


def _half_shards(causal: bool, implementation: str, ranks: int) -> Iterator[tuple[int, int, int]]:
    """Per rank, in half shards: K that it receives forward, K that it receives backward, dK that come back to it."""
    # What is needed of an earlier rank's shard and of a later one's.
    earlier, later = 2, 2
    if causal:
        earlier, later = (1, 2) if implementation in ("zigzag-ring", GATHER) else (2, 0)
    for before in range(ranks):
        after = ranks - 1 - before
        keys = earlier * before + later * after
        # The last hop comes from the next rank, round the ring.
        last = later if after else earlier
        again = {"ring": keys, GATHER: 0}.get(implementation, keys - last)
        yield keys, again, earlier * after + later * before


def _nested_rows(workload: Workload, ranks: int) -> list[tuple[int, int]] | None:
    """(rows gathered, rows of its own that come back) per rank and key/value head.

    None unless branches nest and a key/value head keeps a single residue of each.
    """
    rows, branches = workload.seq_len // ranks, [(workload.seq_len, 1)]
    pattern = workload.pattern
    if isinstance(pattern, DilatedPattern):
        single = workload.num_heads == workload.num_kv_heads or pattern.offset_by == "kv_head"
        branches = sorted((min(w, workload.seq_len), r) for w, r in pattern.branches)
        nested = all(b[0] % a[0] == 0 and b[1] % a[1] == 0 for a, b in pairwise(branches))
        even = all((rows % w == 0 or w % rows == 0) and min(w, rows) % r == 0 for w, r in branches)
        if not (single and nested and even and pattern.heads == "all"):
            return None
    elif pattern.kind != "dense":
        return None
    found = []
    for rank in range(ranks):
        keys, own, inner = 0, 0, (rank * rows, (rank + 1) * rows)
        for segment, rate in branches:
            start = rank * rows // segment * segment
            outer = min(start, inner[0]), max(min(start + segment, workload.seq_len), inner[1])
            before, after = (inner[0] - outer[0]) // rate, (outer[1] - inner[1]) // rate
            keys += before if workload.causal else before + after
            own += after if workload.causal else before + after
            inner = outer
        found.append((keys, own))
    return found
