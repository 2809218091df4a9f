"""How much memory each rank of a parallel call needs, by formula. No tensors."""

from dilabench.predict.memory import MemoryPlan, plan_memory
from dilabench.record import Case
from dilabench.workload.cuts import cut_apart, why_not_apart

APART = "fused-sharded"


def plan_per_rank(case: Case, device: str) -> MemoryPlan | None:
    """The memory of the rank that needs most, on a kind of device ('cpu' or 'cuda'); None without a formula.

    A rank that needs nothing of the others is `fused` at the length of its part. Communicators (NCCL's buffers) and the
    CUDA context are left out.
    """
    if case.implementation != APART:
        return plan_memory(case, device)
    workload, ranks = case.workload, case.world_size
    if ranks > 1 and why_not_apart(workload, ranks):
        return None
    part = workload.replace(seq_len=max(cut_apart(workload, ranks)))
    return plan_memory(case.model_copy(update={"implementation": "fused", "workload": part, "world_size": 1}), device)
