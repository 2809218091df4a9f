"""What peers over ranks cannot cut: the reasons that skip a case, and refuse a build.

Our implementations take any number of rows per rank; peers need parts of equal length and at least 2 ranks. No torch.
"""

from __future__ import annotations

from dilabench.workload.spec import Workload


def against_equal_parts(workload: Workload, ranks: int) -> str | None:
    """The reason against one part of the sequence per rank."""
    return _against(workload, ranks, ranks)


def against_equal_pairs(workload: Workload, ranks: int) -> str | None:
    """The reason against zigzag: two parts of the sequence per rank."""
    return _against(workload, ranks, 2 * ranks)


def against_whole_heads(workload: Workload, ranks: int) -> str | None:
    """The reason against one part of the sequence, and as many whole heads, per rank."""
    return _against(workload, ranks, ranks) or _against_heads(workload, ranks)


def against_usp(workload: Workload, ranks: int) -> str | None:
    """The reason against the mesh of `usp_degrees`."""
    return _against(workload, ranks, 2 * ranks) or _against_heads(workload, usp_degrees(ranks)[0])


def usp_degrees(ranks: int) -> tuple[int, int]:
    """Of USP's mesh: how many ranks trade tokens for heads, and how many such groups form a ring.

    Pairs, so that both kinds of message are there from 4 ranks on; a ring alone where the number is odd, or 2.
    """
    heads = 2 if ranks >= 4 and ranks % 2 == 0 else 1
    return heads, ranks // heads


def _against_heads(workload: Workload, ranks: int) -> str | None:
    if workload.num_heads % ranks or workload.num_kv_heads % ranks:
        heads = f"num_heads {workload.num_heads}, num_kv_heads {workload.num_kv_heads}"
        return f"{heads}: both must be multiples of {ranks}, the ranks that share heads out"
    return None


def _against(workload: Workload, ranks: int, parts: int) -> str | None:
    if ranks < 2:
        return f"needs at least 2 ranks, not {ranks} (--nproc)"
    if workload.seq_len % parts:
        return f"seq_len {workload.seq_len} is not a multiple of {parts}, which {ranks} ranks need here"
    return None
