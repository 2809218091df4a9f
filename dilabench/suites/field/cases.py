"""Suite `field`: every public project that has an adapter, compared with dilabench on the patterns it computes."""

from collections.abc import Iterator
from typing import Any

from dilabench.patterns.dense import DENSE
from dilabench.record import PlannedCase
from dilabench.request import RunRequest
from dilabench.suites.planner import Planner
from dilabench.suites.ring.cases import beside_one_device
from dilabench.workload.spec import DEFAULT_PATTERN, WorkloadRequest

SHAPE: dict[str, dict[str, Any]] = {
    "small": {"batch_size": 1, "seq_len": 4000, "num_heads": 4, "head_dim": 64},
    "large": {"batch_size": 1, "seq_len": 65000, "num_heads": 16, "head_dim": 64},
}
BRANCHES: dict[str, dict[str, Any]] = {
    "small": {"segment_lengths": (1024, 2048, 4096), "dilation_rates": (1, 2, 4)},
    "large": {"segment_lengths": (2048, 4096, 8192, 16384, 32768), "dilation_rates": (1, 2, 4, 8, 16)},
}
# LongNet's formula as its paper has it, and as the released models compute it.
FUNCTIONS: tuple[dict[str, Any], ...] = (
    {"causal": True},
    {"causal": False, "offset": "blocked", "padding": "zero_key", "merge_grad": "detached"},
)
# Per rank: halves are enough for every project; 8 keeps the lengths of earlier records.
CHUNKS = 8
OVER_RANKS: dict[str, Any] = {"pattern": DENSE.kind, "causal": True, "dtype": "bfloat16"}


def expand(request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """Dilated attention on one device; with several ranks also dense attention over them, from one device on.

    Requested workloads replace both. The number of ranks is that of `--nproc`, else of the GPUs. Projects without a
    case are listed in the findings.
    """
    machine = planner.machine
    ranks = request.nproc if request.nproc > 1 else max(1, len(machine.gpus))
    shape = {**SHAPE[machine.facts.size], "mode": "both"}
    dilated = [
        {**shape, "pattern": DEFAULT_PATTERN, **BRANCHES[machine.facts.size], **function} for function in FUNCTIONS
    ]
    asked = planner.workload_requests([shape] if "pattern" in request.overrides else dilated)
    cases = list(_on_one_device(asked, planner.asking(nproc=1)))
    if ranks > 1:
        over_ranks = asked
        if not request.presets and "pattern" not in request.overrides:
            # Dense, at most as long, in CHUNKS equal parts for each rank.
            length = shape["seq_len"] // (CHUNKS * ranks) * CHUNKS * ranks
            over_ranks = planner.workload_requests([{**shape, **OVER_RANKS, "seq_len": length}])
        for workload in over_ranks:
            cases += _over_ranks(workload, planner, ranks)
    return tuple({case.case.case_id: case for case in cases}.values())


def _on_one_device(asked: tuple[WorkloadRequest, ...], planner: Planner) -> Iterator[PlannedCase]:
    for workload in asked:
        names = (*planner.on_one_device(workload.pattern), *_peers(planner, workload, over_ranks=False))
        for implementation in planner.implementations(names):
            if implementation.supports.max_world_size == 1:
                yield from planner.plan(implementation, workload)


def _over_ranks(workload: WorkloadRequest, planner: Planner, ranks: int) -> list[PlannedCase]:
    names = (*planner.over_ranks(workload, ranks), *_peers(planner, workload, over_ranks=True))
    asked = planner.asking(nproc=ranks).implementations(names)
    chosen = tuple(implementation.name for implementation in asked if implementation.supports.max_world_size != 1)
    return beside_one_device(workload, planner.asking(implementations=chosen), ranks) if chosen else []


def _peers(planner: Planner, workload: WorkloadRequest, over_ranks: bool) -> tuple[str, ...]:
    """Names of the public projects' implementations of a pattern and layout, on one device or over ranks."""
    return tuple(
        implementation.name
        for implementation in planner.catalogue.implementations
        if implementation.project is not None
        and implementation.takes != "model"
        and (implementation.supports.max_world_size != 1) == over_ranks
        and implementation.supports.computes(workload.pattern)
        and workload.layout in implementation.supports.layouts
    )
