"""Suite `quick`: does it work, and how fast is it roughly? 1K, 4K and 16K tokens in under a minute on two CPU cores."""

from dilabench.record import PlannedCase
from dilabench.request import RunRequest
from dilabench.suites.planner import Planner, refuse_unknown_options

LENGTHS = (1024, 4096, 16384)
IMPLEMENTATIONS = ("dense", "gather", "strided", "gather-multihead", "strided-multihead")


def expand(request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """Each implementation at each length, one sequence of two heads; full attention as a yardstick."""
    refuse_unknown_options(request, ())
    shape = {"batch_size": 1, "num_heads": 2, "head_dim": 64}
    workloads = planner.workload_requests([{**shape, "seq_len": length} for length in LENGTHS])
    return planner.compare(workloads, planner.implementations(IMPLEMENTATIONS))
