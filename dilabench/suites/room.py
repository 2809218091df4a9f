"""What a case needs of the device's memory, against what there is: known before anything runs."""

from pathlib import Path

from dilabench.machine import Machine
from dilabench.plugins.catalogue import Catalogue
from dilabench.record import Case
from dilabench.units import format_bytes
from dilabench.workload.work import tensor_bytes

# Nothing that is planned for needs more than so many times q, k, v, out and lse, and so many bytes of blocks.
PLENTY, PLENTY_BYTES = 8, 2**31
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


def rank_memory_bytes(machine: Machine, ranks: int) -> int | None:
    """What each of several ranks has: a GPU of its own, or its part of the host."""
    found = memory_bytes(machine)
    return found if found is None or machine.device == "cuda" else found // ranks


def shortage(case: Case, machine: Machine, catalogue: Catalogue) -> str | None:
    """Why the case cannot fit into the device's memory; None when it may.

    By q, k, v, out and lse where these say it already, else by a trace of it.
    """
    available = memory_bytes(machine)
    least = sum(tensor_bytes(case.workload).values())
    if available is None or PLENTY * least + PLENTY_BYTES <= available:
        return None
    plan = None
    if least <= available:
        from dilabench.predict.memory import plan_memory

        plan = plan_memory(case, machine.device, catalogue)
    needed = plan.peak_bytes if plan else least
    if needed <= available:
        return None
    about = "about" if plan else "at least"
    return (
        f"needs {about} {format_bytes(needed)} ({needed} bytes) of memory, this device has {format_bytes(available)}; "
        "use a shorter length or a smaller batch"
    )
