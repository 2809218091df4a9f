"""`Implementation.memory` over ranks: what the fullest of them needs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from dilabench.predict.memory import one_device
from dilabench.predict.memory.kernels import Kernel
from dilabench.predict.memory.module import parameter_bytes, projected
from dilabench.predict.memory.over_ranks.allgather import AllGatherMemory
from dilabench.predict.memory.over_ranks.gathered import GatheredMemory
from dilabench.predict.memory.over_ranks.packed import packed_share_of
from dilabench.predict.memory.over_ranks.rings import RankMemory, RingMemory
from dilabench.predict.memory.over_ranks.shares import Share, share_of
from dilabench.predict.memory.over_ranks.ulysses import UlyssesMemory
from dilabench.predict.memory.sizes import MemoryPlan, Sizes, branches_under
from dilabench.predict.memory.union import two_passes
from dilabench.record import Case
from dilabench.workload.cuts import cut_apart, why_not_apart
from dilabench.workload.spec import UNBOUNDED, Workload

# A workload, a rank, how many there are, the kernel, and whether they run on a CPU.
OfRank = Callable[[Workload, int, int, Kernel, bool], MemoryPlan]


class RankPasses(Protocol):
    """Bytes of one rank beyond its inputs, at the fullest moment of each pass."""

    def forward(self) -> float:
        """With out and lse."""
        ...

    def backward(self) -> float:
        """Without out and lse, which are kept."""
        ...


@dataclass(frozen=True, slots=True)
class OverRanks:
    """The plan of an implementation; None for windows, checkpoints and what it is not stated for.

    packed: whether it is stated for packed sequences, else for padded ones. branches: whether for dilated patterns.
    """

    of_rank: OfRank
    packed: bool = False
    branches: bool = True

    def __call__(self, case: Case, device: str, kernel: Kernel | None) -> MemoryPlan | None:
        """Bytes of the fullest rank."""
        workload, size = case.workload, case.world_size
        if kernel is None or case.optimizations.gradient_checkpointing or workload.window != UNBOUNDED:
            return None
        if (workload.layout == "packed") != self.packed or (branches_under(workload) and not self.branches):
            return None
        # Under a causal mask work and memory rise or fall along the ranks.
        first_middle_last = sorted({0, size // 2, size - 1})
        plans = [self.of_rank(workload, rank, size, kernel, device == "cpu") for rank in first_middle_last]
        return max(plans, key=lambda plan: plan.peak_bytes)


def _hops(overlap: bool, zigzag: bool = False) -> OfRank:
    def of_rank(workload: Workload, rank: int, size: int, kernel: Kernel, on_cpu: bool) -> MemoryPlan:
        packed = workload.layout == "packed"
        share = packed_share_of(workload, rank, size) if packed else share_of(workload, rank, size, zigzag=zigzag)
        ring = RingMemory(RankMemory(share, kernel, on_cpu), overlap)
        return _plan(workload, ring, share, ring.kept)

    return of_rank


def _one_exchange(workload: Workload, rank: int, size: int, kernel: Kernel, on_cpu: bool) -> MemoryPlan:
    share = share_of(workload, rank, size, zigzag=False)
    gather = AllGatherMemory(RankMemory(share, kernel, on_cpu))
    return _plan(workload, gather, share, gather.gathered)


def _all_keys(workload: Workload, rank: int, size: int, kernel: Kernel, on_cpu: bool) -> MemoryPlan:
    gathered = GatheredMemory.of(workload, rank, size, kernel, on_cpu)
    return _plan(workload, gathered, gathered.rank.share, gathered.kept)


def _heads_for_tokens(workload: Workload, _rank: int, size: int, kernel: Kernel, on_cpu: bool) -> MemoryPlan:
    passes = UlyssesMemory.of(workload, size, kernel, on_cpu)
    backward = passes.backward() + _arriving(workload, passes.own) if workload.mode != "forward" else 0.0
    return two_passes(workload, passes.forward(), backward, kept=passes.kept, sizes=passes.own)


RING = OverRanks(_hops(overlap=False))
RING_OVERLAP = OverRanks(_hops(overlap=True))
ZIGZAG_RING = OverRanks(_hops(overlap=True, zigzag=True), branches=False)
RING_VARLEN = OverRanks(_hops(overlap=True), packed=True, branches=False)
RING_ALLGATHER = OverRanks(_one_exchange)
ZIGZAG_ALLGATHER = OverRanks(_all_keys, branches=False)
ULYSSES = OverRanks(_heads_for_tokens)


def ring_multihead(case: Case, device: str, kernel: Kernel | None) -> MemoryPlan | None:
    """Projections around `zigzag-ring` or `ring-overlap`."""
    workload = case.workload
    core = (ZIGZAG_RING if workload.causal and branches_under(workload) is None else RING_OVERLAP)(case, device, kernel)
    return core and _projected(core, _rows_of(workload, case.world_size))


def fused_sharded(case: Case, device: str, kernel: Kernel | None) -> MemoryPlan | None:
    """`fused` at the length of the longest part, for a rank needs nothing of the others."""
    workload, ranks = case.workload, case.world_size
    if ranks > 1 and why_not_apart(workload, ranks):
        return None
    part = workload.replace(seq_len=max(cut_apart(workload, ranks)))
    return one_device.fused(case.model_copy(update={"workload": part}), device, kernel)


def _plan(workload: Workload, passes: RankPasses, share: Share, kept: float) -> MemoryPlan:
    return two_passes(
        workload,
        passes.forward(),
        passes.backward() + _arriving(workload, share.sizes) if workload.mode != "forward" else 0.0,
        kept=kept,
        tables=round(share.index_bytes),
        sizes=share.sizes,
    )


def _arriving(workload: Workload, sizes: Sizes) -> float:
    """Gradients that autograd makes before the backward pass and holds all through it (`impls.ring.function`).

    That of lse, which nobody asks for, is zeros. Packed, out is one item of a batch, and torch copies that item's
    gradient into one of the whole batch.
    """
    return sizes.lse + (sizes.q if workload.layout == "packed" else 0.0)


def _projected(core: MemoryPlan, rows: Workload) -> MemoryPlan:
    """Around the ring: parameter gradients of all ranks are summed in one buffer at the end."""
    plan = projected(core, rows)
    if rows.mode == "forward":
        return plan
    last = round(Sizes.of(rows).q) + 2 * parameter_bytes(rows) - core.saved_bytes
    return plan if last < plan.workspace_bytes else replace(plan, workspace_bytes=last)


def _rows_of(workload: Workload, size: int) -> Workload:
    """The shape of a rank's rows."""
    return workload.as_dense().model_copy(update={"seq_len": -(-workload.seq_len // size)})
