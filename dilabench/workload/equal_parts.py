"""What peers over ranks cannot cut, and which meshes ranks make: the reasons that skip a case, and refuse a build.

Our implementations take any number of rows per rank; peers need parts of equal length and at least 2 ranks. No torch.
"""

from __future__ import annotations

from math import gcd

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


def mesh_degrees(workload: Workload, ranks: int) -> tuple[int, int]:
    """Of `ulysses-ring`: how many ranks trade tokens for heads, and how many such groups form a ring.

    As many as divide ranks and key/value heads, but not all ranks: that is `ulysses`. (1, P) where there is no mesh.
    """
    shared = gcd(ranks, workload.num_kv_heads)
    heads = max(one for one in range(1, ranks + 1) if shared % one == 0 and (one < ranks or ranks == 1))
    return heads, ranks // heads


def against_mesh(workload: Workload, ranks: int) -> str | None:
    """The reason against the mesh of `mesh_degrees`."""
    if mesh_degrees(workload, ranks)[0] > 1:
        return None
    return (
        f"{ranks} ranks and num_kv_heads {workload.num_kv_heads} make no mesh of heads x sequence: no number between 1 "
        f"and {ranks} divides both; use ulysses or zigzag-ring"
    )


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
