"""`Implementation.memory` on one device: `plan(case, device, kernel)`, the kernel being that of the case's backend."""

from dilabench.patterns.dilated import DilatedPattern
from dilabench.predict.memory import flexed
from dilabench.predict.memory.kernels import TILES, Kernel
from dilabench.predict.memory.module import projected
from dilabench.predict.memory.reference import reference as in_float64
from dilabench.predict.memory.sizes import MemoryPlan, branches_under
from dilabench.predict.memory.union import Passes, one_kernel
from dilabench.record import Case
from dilabench.workload.spec import Workload


def reference(case: Case, device: str, _kernel: Kernel | None) -> MemoryPlan | None:
    """The formula in float64; nothing is known of packed sequences, or of keys that lie in no strided segments."""
    workload = case.workload
    known = workload.pattern.under.strided_segments(workload.shapes[0], 0) is not None
    return in_float64(workload, device) if known and workload.layout != "packed" else None


def strided(case: Case, _device: str, kernel: Kernel | None) -> MemoryPlan | None:
    """Kernel calls on views, merged; dense attention is a branch that holds everything."""
    return _union(case, kernel, gathered=False)


def gather(case: Case, _device: str, kernel: Kernel | None) -> MemoryPlan | None:
    """The same on rows that are copied in and out by index."""
    return _union(case, kernel, gathered=True)


def strided_multihead(case: Case, device: str, kernel: Kernel | None) -> MemoryPlan | None:
    """Projections around `strided`."""
    core = strided(case, device, kernel)
    return core and projected(core, case.workload)


def gather_multihead(case: Case, device: str, kernel: Kernel | None) -> MemoryPlan | None:
    """Projections around `gather`."""
    core = gather(case, device, kernel)
    return core and projected(core, case.workload)


def fused(case: Case, _device: str, _kernel: Kernel | None) -> MemoryPlan | None:
    """One kernel over all branches where it takes them all, else a call per branch."""
    checkpointed = case.optimizations.gradient_checkpointing
    if _is_planned(case.workload):
        return one_kernel(case.workload, TILES.stats, checkpointed)
    return Passes.of(case.workload, TILES, gathered=False).plan(checkpointed)


def flex(case: Case, device: str, _kernel: Kernel | None) -> MemoryPlan | None:
    """FlexAttention, on CUDA only."""
    return flexed.flex(case.workload) if device == "cuda" and branches_under(case.workload) else None


def flex_permuted(case: Case, device: str, _kernel: Kernel | None) -> MemoryPlan | None:
    """The same with tokens in another order."""
    return flexed.flex_permuted(case.workload) if device == "cuda" and branches_under(case.workload) else None


def _union(case: Case, kernel: Kernel | None, gathered: bool) -> MemoryPlan | None:
    if kernel is None:
        return None
    return Passes.of(case.workload, kernel, gathered=gathered).plan(case.optimizations.gradient_checkpointing)


def _is_planned(workload: Workload) -> bool:
    """Whether `fused` takes all branches in its one kernel: rates divide lengths, no window, no grouped heads."""
    pattern = DilatedPattern.match(workload.pattern)
    if pattern is None or pattern.has_grouped_heads or workload.window != (-1, -1):
        return False
    rates = [rate for _, rate in pattern.branches]
    widest = max(rates)
    lengths = [workload.seq_len, *(segment for segment, _ in pattern.branches if segment < workload.seq_len)]
    return all(widest % rate == 0 for rate in rates) and all(length % widest == 0 for length in lengths)
