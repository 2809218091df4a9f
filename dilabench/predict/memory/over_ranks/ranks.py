"""The plan of a case over several ranks: what the fullest of them needs."""

from dataclasses import replace
from typing import Protocol

from dilabench.predict.memory.kernels import Kernel
from dilabench.predict.memory.module import parameter_bytes, projected
from dilabench.predict.memory.over_ranks.allgather import AllGatherMemory
from dilabench.predict.memory.over_ranks.gathered import GatheredMemory
from dilabench.predict.memory.over_ranks.packed import packed_share_of
from dilabench.predict.memory.over_ranks.rings import RankMemory, RingMemory
from dilabench.predict.memory.over_ranks.shares import Share, share_of
from dilabench.predict.memory.over_ranks.ulysses import UlyssesMemory
from dilabench.predict.memory.sizes import MemoryPlan, Sizes
from dilabench.predict.memory.union import two_passes
from dilabench.workload.spec import Workload

OVERLAPS = {"ring": False, "ring-overlap": True, "zigzag-ring": True, "ring-varlen": True, "ring-allgather": True}
OVER_RANKS = frozenset({*OVERLAPS, "zigzag-allgather", "ring-multihead", "ulysses"})
DENSE_ONLY = frozenset({"zigzag-ring", "zigzag-allgather", "ring-varlen"})


class RankPasses(Protocol):
    """Bytes of one rank beyond its inputs, at the fullest moment of each pass."""

    def forward(self) -> float:
        """With out and lse."""
        ...

    def backward(self) -> float:
        """Without out and lse, which are kept."""
        ...


def plan_ranks(name: str, workload: Workload, size: int, kernel: Kernel, on_cpu: bool) -> MemoryPlan | None:
    """The plan of an implementation over ranks; None for windows, and for branches on zigzag or packed shards."""
    if workload.window != (-1, -1):
        return None
    packed = workload.layout == "packed"
    if name == "ring-multihead":
        zigzag = workload.causal and workload.dilated is None
        core = plan_ranks("zigzag-ring" if zigzag else "ring-overlap", workload, size, kernel, on_cpu)
        return _projected(core, _rows_of(workload, size)) if core else None
    if packed != (name == "ring-varlen") or (workload.dilated and name in DENSE_ONLY):
        return None
    if name == "ulysses":
        return _ulysses(workload, size, kernel, on_cpu)
    if name not in OVER_RANKS:
        return None
    # Under a causal mask work and memory rise or fall along the ranks.
    first_middle_last = sorted({0, size // 2, size - 1})
    plans = [_plan(name, workload, rank, size, kernel, on_cpu) for rank in first_middle_last]
    return max(plans, key=lambda plan: plan.peak_bytes)


def _plan(name: str, workload: Workload, rank: int, size: int, kernel: Kernel, on_cpu: bool) -> MemoryPlan:
    passes: RankPasses
    if name == "zigzag-allgather":
        passes = gathered = GatheredMemory.of(workload, rank, size, kernel, on_cpu)
        share, kept = gathered.rank.share, gathered.kept
    else:
        share = _share(name, workload, rank, size)
        own = RankMemory(share, kernel, on_cpu)
        if name == "ring-allgather":
            passes = gather = AllGatherMemory(own)
            kept = gather.gathered
        else:
            passes = ring = RingMemory(own, OVERLAPS[name])
            kept = ring.kept
    return two_passes(
        workload,
        passes.forward(),
        passes.backward() + _arriving(workload, share.sizes) if workload.mode != "forward" else 0.0,
        kept=kept,
        tables=round(share.index_bytes),
        sizes=share.sizes,
    )


def _share(name: str, workload: Workload, rank: int, size: int) -> Share:
    if name == "ring-varlen":
        return packed_share_of(workload, rank, size)
    return share_of(workload, rank, size, zigzag=name == "zigzag-ring")


def _arriving(workload: Workload, sizes: Sizes) -> float:
    """Gradients that autograd makes before the backward pass and holds all through it (`impls.ring.function`).

    That of lse, which nobody asks for, is zeros. Packed, out is one item of a batch, and torch copies that item's
    gradient into one of the whole batch.
    """
    return sizes.lse + (sizes.q if workload.layout == "packed" else 0.0)


def _ulysses(workload: Workload, size: int, kernel: Kernel, on_cpu: bool) -> MemoryPlan:
    passes = UlyssesMemory.of(workload, size, kernel, on_cpu)
    backward = passes.backward() + _arriving(workload, passes.own) if workload.mode != "forward" else 0.0
    return two_passes(workload, passes.forward(), backward, kept=passes.kept, sizes=passes.own)


def _projected(core: MemoryPlan, rows: Workload) -> MemoryPlan:
    """Around the ring: parameter gradients of all ranks are summed in one buffer at the end."""
    plan = projected(core, rows)
    if rows.mode == "forward":
        return plan
    last = round(Sizes.of(rows).q) + 2 * parameter_bytes(rows) - core.saved_bytes
    return plan if last < plan.workspace_bytes else replace(plan, workspace_bytes=last)


def _rows_of(workload: Workload, size: int) -> Workload:
    """The shape of a rank's rows."""
    return workload.replace(seq_len=-(-workload.seq_len // size), pattern={"kind": "dense"})
