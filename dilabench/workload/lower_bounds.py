"""Lower bounds on the FLOPs and bytes of one call of any implementation. No torch."""

from dilabench.workload.spec import DTYPE_BYTES, Workload, flops, least_pairs, tensor_bytes


def least_flops(workload: Workload) -> float:
    """FLOPs that no implementation can avoid: pairs that the pattern gives several times may be computed once."""
    return flops(workload, least_pairs(workload))


def least_bytes(workload: Workload) -> int:
    """Bytes that one call must read and write at least.

    Forward reads q, k, v where the pattern reaches them and writes out; backward reads these, out and its gradient, and
    writes dq, dk, dv. Results are written as a whole: rows that are not reached are 0.
    """
    sizes = tensor_bytes(workload)
    query_rows, key_rows = reached_rows(workload)
    item = DTYPE_BYTES[workload.dtype]
    query, out = query_rows * workload.head_dim * item, query_rows * workload.value_width * item
    keys = key_rows * (workload.head_dim + workload.value_width) * item
    forward = query + keys + sizes["out"]
    backward = query + 2 * out + keys + sizes["q"] + sizes["k"] + sizes["v"]
    return {"forward": forward, "backward": backward, "both": forward + backward}[workload.mode]


def reached_rows(workload: Workload) -> tuple[int, int]:
    """Rows of q, over query heads, and of k and of v, over key/value heads, that belong to any pair: a lower bound."""
    if workload.query_len is None:
        reached = [workload.pattern.reached_rows(shape) for shape in workload.shapes]
    else:
        reached = [workload.pattern.last_rows(shape, workload.query_len)[1:] for shape in workload.shapes]
    queries, keys = (workload.batch_size * sum(rows) for rows in zip(*reached, strict=True))
    return queries, keys
