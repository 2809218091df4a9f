"""What peers over ranks cannot cut: the reasons that skip a case, and refuse a build. No torch.

Our implementations take any number of rows per rank; these need parts of equal length and at least 2 ranks.
"""

from __future__ import annotations

from dilabench.workload.spec import Workload


def against_equal_parts(workload: Workload, ranks: int) -> str | None:
    """The reason against one part of the sequence per rank."""
    return _against(workload, ranks, ranks)


def against_equal_pairs(workload: Workload, ranks: int) -> str | None:
    """The reason against zigzag: two parts of the sequence per rank."""
    return _against(workload, ranks, 2 * ranks)


def _against(workload: Workload, ranks: int, parts: int) -> str | None:
    if ranks < 2:
        return f"needs at least 2 ranks, not {ranks} (--nproc)"
    if workload.seq_len % parts:
        return f"seq_len {workload.seq_len} is not a multiple of {parts}, which {ranks} ranks need here"
    return None
