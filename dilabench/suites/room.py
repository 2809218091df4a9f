"""What a case needs of the device's memory at least, against what there is: known before anything runs."""

from pathlib import Path

from dilabench.machine import Machine
from dilabench.results import Case
from dilabench.spec import DTYPE_BYTES, DilatedPattern, Workload
from dilabench.units import format_bytes
from dilabench.work import rows_kept, tensor_bytes

GROUP_LIMIT_FILE = Path("/sys/fs/cgroup/memory.max")


def memory_bytes(machine: Machine) -> int | None:
    """Memory of the device that cases run on: of the first GPU, or of the host within its control group's limit."""
    if machine.device == "cuda":
        return machine.gpus[0].memory_bytes if machine.gpus else None
    import psutil

    total: int = psutil.virtual_memory().total
    try:
        limit = GROUP_LIMIT_FILE.read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def least_bytes(case: Case) -> int:
    """A lower bound of the peak: the tensors of a call, their gradients in a backward pass, and a method's own copies.

    Forward holds q, k, v, out and lse. Backward adds a gradient for each of q, k, v and out. `gather` also holds
    the rows of one kernel call (q, k, v and its result) as copies, at worst those of its largest branch.
    """
    sizes = tensor_bytes(case.workload)
    total = sum(sizes.values())
    if case.workload.mode != "forward":
        total += sizes["q"] + sizes["k"] + sizes["v"] + sizes["out"]
    if case.implementation.startswith("gather"):
        total += int(_largest_share(case.workload) * (sizes["q"] + sizes["k"] + sizes["v"] + sizes["out"]))
    return total


def _largest_share(workload: Workload) -> float:
    """Rows of the largest branch as a share of all rows; a head keeps at least the rows of the last residue."""
    pattern = workload.pattern
    if not isinstance(pattern, DilatedPattern):
        return 1.0
    if pattern.heads == "grouped":
        return 0.0
    N = workload.seq_len
    return max((N // min(w, N)) * rows_kept(min(w, N), r, r - 1) / N for w, r in pattern.branches)


def shortage(case: Case, machine: Machine) -> str | None:
    """Why the case cannot fit into the device's memory; None when it may."""
    available = memory_bytes(machine)
    needed = least_bytes(case)
    if available is None or needed <= available:
        return None
    item = DTYPE_BYTES[case.workload.dtype]
    smaller = " or a dtype of 2 bytes" if item > 2 else ""
    return (
        f"needs at least {format_bytes(needed)} ({needed} bytes) of memory, this device has {format_bytes(available)}; "
        f"use a shorter length, a smaller batch{smaller}"
    )
