"""Suite `distributed`: strong and weak scaling over ranks, and which implementation wins at which length."""

from typing import Any

from dilabench.metadata import SCALING
from dilabench.patterns.dense import DENSE
from dilabench.record import PlannedCase
from dilabench.request import RunRequest
from dilabench.suites.planner import Planner
from dilabench.suites.ring.cases import beside_one_device, ranks_here
from dilabench.workload.spec import DEFAULT_PATTERN

STRONG, WEAK = "strong", "weak"
LENGTHS_CUDA = (16384, 65536)
LENGTHS_CPU = (1024, 2048)
PATTERNS = (DENSE.kind, DEFAULT_PATTERN)


def expand(request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """Each length on 1, 2, 4, ... ranks up to `--nproc` (strong), and the shortest per rank on each (weak)."""
    most = request.nproc if request.nproc > 1 else ranks_here(planner)
    cuda = planner.machine.device == "cuda"
    lengths = request.lengths or (LENGTHS_CUDA if cuda else LENGTHS_CPU)
    defaults: list[dict[str, Any]] = [
        {"pattern": pattern, "batch_size": 1, "num_heads": 32 if cuda else 4, "head_dim": 128 if cuda else 64}
        for pattern in PATTERNS
    ]
    cases: dict[str, PlannedCase] = {}
    for ranks in rank_counts(most):
        for scaling, chosen in ((STRONG, lengths), (WEAK, (min(lengths) * ranks,))):
            asked = planner.asking(lengths=chosen)
            for workload in asked.workload_requests(defaults):
                mode = request.overrides.get("mode", "both")
                one = workload.model_copy(update={"mode": mode})
                for planned in beside_one_device(one, asked, ranks):
                    labels = planned.labels | SCALING.entry(scaling)
                    cases.setdefault(planned.case.case_id, planned.model_copy(update={"labels": labels}))
    return tuple(cases.values())


def rank_counts(most: int) -> tuple[int, ...]:
    """2, 4, 8, ... and the largest."""
    counts = [2**power for power in range(1, most.bit_length()) if 2**power <= most]
    return tuple(dict.fromkeys([*counts, most]))
