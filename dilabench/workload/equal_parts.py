"""Workloads that public projects over ranks cannot cut: the reasons that skip a case, and refuse a build.

dilabench's implementations take any number of rows per rank; those need equal parts and at least 2 ranks. No torch.
"""

from __future__ import annotations

from dilabench.workload.spec import Workload


def against_equal_parts(workload: Workload, ranks: int) -> str | None:
    """Return why the sequence cannot be cut into one part per rank, or None."""
    return _against(workload, ranks, ranks)


def against_equal_pairs(workload: Workload, ranks: int) -> str | None:
    """Return why the sequence cannot be cut for zigzag, two parts per rank, or None."""
    return _against(workload, ranks, 2 * ranks)


def against_whole_heads(workload: Workload, ranks: int) -> str | None:
    """Return why sequence and heads cannot both be divided by the ranks, or None."""
    return _against(workload, ranks, ranks) or _against_heads(workload, ranks)


def against_usp(workload: Workload, ranks: int) -> str | None:
    """Return why the mesh of `usp_degrees` cannot be formed, or None."""
    return _against(workload, ranks, 2 * ranks) or _against_heads(workload, usp_degrees(ranks)[0])


def usp_degrees(ranks: int) -> tuple[int, int]:
    """Return USP's degrees: ranks of an all-to-all group, and number of groups in the ring.

    All-to-all groups are pairs, so that both kinds of message occur from 4 ranks on; an odd number of ranks, or 2,
    forms only a ring.
    """
    heads = 2 if ranks >= 4 and ranks % 2 == 0 else 1
    return heads, ranks // heads


def _against_heads(workload: Workload, ranks: int) -> str | None:
    if workload.num_heads % ranks or workload.num_kv_heads % ranks:
        heads = f"num_heads {workload.num_heads}, num_kv_heads {workload.num_kv_heads}"
        return f"{heads}: both must be multiples of {ranks}, the number of ranks that divide the heads"
    return None


def _against(workload: Workload, ranks: int, parts: int) -> str | None:
    if ranks < 2:
        return f"needs at least 2 ranks, not {ranks} (--nproc)"
    if workload.seq_len % parts:
        return f"seq_len {workload.seq_len} is not a multiple of {parts}, which {ranks} ranks need here"
    return None
