"""Suite `distributed`: strong and weak scaling over ranks, and which implementation wins at which length."""

from collections.abc import Iterator, Sequence

from dilabench.metadata import SCALING
from dilabench.patterns.dense import DENSE
from dilabench.record import PlannedCase
from dilabench.request import RunRequest
from dilabench.suites.planner import Planner
from dilabench.suites.ring.cases import beside_one_device, ranks_here
from dilabench.workload.last_length import last_length
from dilabench.workload.spec import DEFAULT_PATTERN, WorkloadRequest

STRONG, WEAK = "strong", "weak"
LENGTHS_CUDA = (16384, 65536)
LENGTHS_CPU = (1024, 2048)
PATTERNS = (DENSE.kind, DEFAULT_PATTERN)


def expand(request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """Each length on 1, 2, 4, ... ranks up to `--nproc` (strong), and the shortest per rank on each (weak)."""
    most = request.nproc if request.nproc > 1 else ranks_here(planner)
    large = planner.machine.facts.size == "large"
    shape = {"batch_size": 1, "num_heads": 32 if large else 4, "head_dim": 128 if large else 64}
    asked = planner.workload_requests(
        [
            {"pattern": pattern, "seq_len": length, **shape}
            for length in (LENGTHS_CUDA if large else LENGTHS_CPU)
            for pattern in PATTERNS
        ]
    )
    cases: dict[str, PlannedCase] = {}
    for ranks in rank_counts(most):
        for scaling, workloads in ((STRONG, asked), (WEAK, _per_rank(asked, ranks, planner))):
            for workload in workloads:
                mode = request.overrides.get("mode", "both")
                in_mode = workload.model_copy(update={"mode": mode})
                for planned in beside_one_device(in_mode, planner, ranks):
                    labels = planned.labels | SCALING.entry(scaling)
                    cases.setdefault(planned.case.case_id, planned.model_copy(update={"labels": labels}))
    return tuple(cases.values())


def _per_rank(asked: Sequence[WorkloadRequest], ranks: int, planner: Planner) -> Iterator[WorkloadRequest]:
    """The shortest of the requests that differ only in length, with that length per rank; without packed ones."""
    shortest: dict[WorkloadRequest, int] = {}
    for request in asked:
        alike = request.model_copy(update={"seq_len": 1})
        shortest[alike] = min(request.seq_len, shortest.get(alike, request.seq_len))
    for alike, length in shortest.items():
        longer = alike.model_copy(update={"seq_len": length * ranks})
        workload = alike.model_copy(update={"seq_len": length}).resolve(planner.machine.auto_dtype)
        if last_length(workload) >= longer.seq_len:
            yield longer


def rank_counts(most: int) -> tuple[int, ...]:
    """2, 4, 8, ... and the largest."""
    counts = [2**power for power in range(1, most.bit_length()) if 2**power <= most]
    return tuple(dict.fromkeys([*counts, most]))
