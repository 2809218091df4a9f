"""The plan of a case, by the formula that its implementation's descriptor names.

Not yet measured on a GPU: `block-sparse-flash4`, and the rank of `zigzag-ring` that needs most. Their factors on CUDA
are derived from the code; `scripts/gpu_memory_plan.py` measures them. On an H200 everything else is within 6 %.
"""

from dataclasses import replace

from dilabench.plugins.boundary import answered
from dilabench.plugins.catalogue import Catalogue, load_target
from dilabench.predict.memory.sizes import MemoryPlan, Sizes, inputs_of
from dilabench.record import Case

LONGEST = 2**40


def plan_memory(case: Case, device: str, catalogue: Catalogue) -> MemoryPlan | None:
    """The memory of a case on a kind of device ('cpu' or 'cuda'); None where there is no formula for it.

    Over ranks it is that of the rank that needs most; communicators (NCCL's buffers) and the CUDA context are left out.
    Chunked queries and offloaded inputs count as their chunks do; a stream counts as one of its pieces.
    """
    workload, switched = case.workload, case.optimizations
    chunk = switched.query_chunk
    if not chunk or chunk >= workload.seq_len:
        return _plan(case, device, catalogue)
    in_one = switched.model_copy(update={"gradient_checkpointing": False})
    changes = {"workload": workload.replace(seq_len=chunk), "optimizations": in_one}
    piece = _plan(case.model_copy(update=changes), device, catalogue)
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


def longest_that_fits(case: Case, device: str, capacity_bytes: int, catalogue: Catalogue) -> int | None:
    """The largest sequence length of the case whose plan fits into so many bytes; None without a formula, 0 if none.

    The batch size, heads and branches stay; packed sequences and a mask from a file have the length that they have,
    and give None. Found by halving: over ranks, where lengths that cut segments need more than those that do not, a
    longer one may fit, too. It is a prediction: `extreme` finds the length by real runs.
    """
    pattern = case.workload.pattern
    from_file = pattern.has_fixed_length
    if from_file or case.workload.layout == "packed" or plan_memory(case, device, catalogue) is None:
        return None

    def fits(length: int) -> bool:
        workload = case.workload.replace(seq_len=length)
        found = plan_memory(case.model_copy(update={"workload": workload}), device, catalogue)
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


def _plan(case: Case, device: str, catalogue: Catalogue) -> MemoryPlan | None:
    if case.implementation not in catalogue.implementations:
        return None
    implementation = catalogue.implementations.get(case.implementation)
    supports = implementation.supports
    over_too_many = case.world_size > 1 and supports.max_world_size == 1
    if implementation.memory is None or over_too_many or case.workload.layout not in supports.layouts:
        return None
    kernel = None
    if case.backend and case.backend in catalogue.backends and (memory := catalogue.backends.get(case.backend).memory):
        with catalogue.left_out(catalogue.backends.origin(case.backend), f"memory of backend {case.backend!r}"):
            kernel = load_target(memory)(case.workload, device)
    origin = catalogue.implementations.origin(implementation.name)
    what = f"memory of {implementation.name!r}"
    with catalogue.left_out(origin, what):
        plan: MemoryPlan | None = answered(
            origin, what, load_target(implementation.memory), case, device, kernel, kind=(MemoryPlan, type(None))
        )
        return plan
    return None
