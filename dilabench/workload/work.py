"""How much work a workload is: attended pairs, FLOPs, tensor bytes. Exact integer arithmetic, no tensors.

Formulas: semantics.md §2. Forward costs 4·D FLOPs per (query, key) pair of the multiset, backward 2.5 times that.
"""

from dilabench.workload.spec import DTYPE_BYTES, Workload

FORWARD_FLOPS_PER_PAIR_AND_DIM = 4
BACKWARD_FACTOR = 2.5
MODE_FACTOR = {"forward": 1.0, "backward": BACKWARD_FACTOR, "both": 1.0 + BACKWARD_FACTOR}


def attended_pairs(workload: Workload) -> int:
    """(query, key) pairs of the multiset in one forward call, over batch and heads."""
    return workload.batch_size * sum(workload.pattern.pairs(shape).attended for shape in workload.shapes)


def least_pairs(workload: Workload) -> int:
    """A lower bound of the pairs that differ, which no implementation can avoid."""
    return workload.batch_size * sum(workload.pattern.pairs(shape).least for shape in workload.shapes)


def flops(workload: Workload) -> float:
    """FLOPs of one call in the workload's mode, by the multiset formula, whatever an implementation saves."""
    return flops_of_pairs(workload, attended_pairs(workload))


def flops_of_pairs(workload: Workload, pairs: int) -> float:
    """FLOPs of one call in the workload's mode over so many pairs."""
    return FORWARD_FLOPS_PER_PAIR_AND_DIM * workload.head_dim * pairs * MODE_FACTOR[workload.mode]


def tensor_bytes(workload: Workload) -> dict[str, int]:
    """Bytes of q, k, v, out and lse of the workload."""
    item = DTYPE_BYTES[workload.dtype]
    query = workload.tokens * workload.num_heads * workload.head_dim * item
    key = workload.tokens * workload.num_kv_heads * workload.head_dim * item
    lse = workload.tokens * workload.num_heads * (8 if workload.dtype == "float64" else 4)
    return {"q": query, "k": key, "v": key, "out": query, "lse": lse}
