"""The plan of a case, by its implementation.

Not yet measured on a GPU: `block-sparse-flash4`, and the rank of `zigzag-ring` that needs most. Their factors on CUDA
are derived from the code; `scripts/gpu_memory_plan.py` measures them. On an H200 everything else is within 6 %.
"""

from collections.abc import Callable
from dataclasses import replace

from dilabench.predict.memory.block_sparse import block_sparse
from dilabench.predict.memory.flexed import flex, flex_permuted
from dilabench.predict.memory.kernels import TILES, kernel_of
from dilabench.predict.memory.module import projected
from dilabench.predict.memory.over_ranks.ranks import OVER_RANKS, plan_ranks
from dilabench.predict.memory.reference import reference
from dilabench.predict.memory.sizes import MemoryPlan, Sizes, inputs_of
from dilabench.predict.memory.union import Passes, one_kernel
from dilabench.record import Case
from dilabench.workload.spec import BlockSparsePattern, DilatedPattern, Workload

LONGEST = 2**40
Plan = Callable[[Case, str], MemoryPlan | None]
FLEXED = {"flex": flex, "flex-permuted": flex_permuted}
UNIONS = frozenset({"dense", "strided", "gather"})


def plan_memory(case: Case, device: str) -> MemoryPlan | None:
    """The memory of a case on a kind of device ('cpu' or 'cuda'); None where there is no formula for it.

    Chunked queries and offloaded inputs count as their chunks do; a stream counts as one of its pieces.
    """
    workload, switched = case.workload, case.optimizations
    chunk = switched.query_chunk
    if not chunk or chunk >= workload.seq_len:
        return _plan(case, device, checkpointed=switched.gradient_checkpointing)
    piece = _plan(case.model_copy(update={"workload": workload.replace(seq_len=chunk)}), device)
    if piece is None:
        return None
    whole = Sizes.of(workload)
    backward = workload.mode != "forward"
    results = round(whole.q + (whole.gradients if backward else 0.0))
    if switched.offload_inputs:
        return piece
    # The piece's inputs are views of the whole ones, but a backward pass starts from a leaf of its own.
    workspace = results + piece.saved_bytes + piece.workspace_bytes
    return replace(piece, inputs_bytes=inputs_of(workload, whole), saved_bytes=0, workspace_bytes=workspace)


def longest_that_fits(case: Case, device: str, capacity_bytes: int, plan: Plan = plan_memory) -> int | None:
    """The largest sequence length of the case whose plan fits into so many bytes; None without a formula, 0 if none.

    The batch size, heads and branches stay; packed sequences and a mask from a file have the length that they have,
    and give None. Found by halving: over ranks, where lengths that cut segments need more than those that do not, a
    longer one may fit, too. It is a prediction: `extreme` finds the length by real runs.
    """
    pattern = case.workload.pattern
    from_file = isinstance(pattern, BlockSparsePattern) and pattern.mask == "custom"
    if from_file or case.workload.layout == "packed" or plan(case, device) is None:
        return None

    def fits(length: int) -> bool:
        workload = case.workload.replace(seq_len=length)
        found = plan(case.model_copy(update={"workload": workload}), device)
        return found is not None and found.peak_bytes <= capacity_bytes

    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= LONGEST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _plan(case: Case, device: str, checkpointed: bool = False) -> MemoryPlan | None:
    workload = case.workload
    if case.world_size > 1 or case.implementation in OVER_RANKS:
        return _over_ranks(case, device)
    if workload.layout != "padded":
        return None
    name = case.implementation.removesuffix("-multihead")
    core = _attention(name, case, device, checkpointed)
    if core is None or name == case.implementation:
        return core
    return projected(core, workload)


def _over_ranks(case: Case, device: str) -> MemoryPlan | None:
    kernel = kernel_of(case.backend, case.workload, device)
    if kernel is None or case.optimizations.gradient_checkpointing:
        return None
    return plan_ranks(case.implementation, case.workload, case.world_size, kernel, device == "cpu")


def _attention(name: str, case: Case, device: str, checkpointed: bool) -> MemoryPlan | None:
    workload = case.workload
    if name == "reference":
        return reference(workload, device)
    if name in FLEXED:
        return FLEXED[name](workload) if device == "cuda" and workload.dilated else None
    if name.startswith("block-sparse"):
        return block_sparse(name, workload, device, checkpointed)
    if name == "fused":
        if _is_planned(workload):
            return one_kernel(workload, TILES.stats, checkpointed)
        return Passes.of(workload, TILES, gathered=False).plan(checkpointed)
    kernel = kernel_of(case.backend, workload, device)
    if kernel is None or name not in UNIONS:
        return None
    return Passes.of(workload, kernel, gathered=name == "gather").plan(checkpointed)


def _is_planned(workload: Workload) -> bool:
    """Whether `fused` takes all branches in its one kernel: rates divide lengths, no window, no grouped heads."""
    pattern = workload.pattern
    if not isinstance(pattern, DilatedPattern) or pattern.heads == "grouped" or workload.window != (-1, -1):
        return False
    rates = [rate for _, rate in pattern.branches]
    widest = max(rates)
    lengths = [workload.seq_len, *(segment for segment, _ in pattern.branches if segment < workload.seq_len)]
    return all(widest % rate == 0 for rate in rates) and all(length % widest == 0 for length in lengths)
