"""Suite `quick`: does it work, and how fast is it roughly? 1K, 4K and 16K tokens in under a minute on two CPU cores."""

from dilabench.record import PlannedCase
from dilabench.request import RunRequest
from dilabench.suites.planner import Planner

LENGTHS = (1024, 4096, 16384)


def expand(_request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """What calls a dense kernel, and so runs everywhere, at each length; full attention as a yardstick.

    One sequence of two heads.
    """
    shape = {"batch_size": 1, "num_heads": 2, "head_dim": 64}
    workloads = planner.workload_requests([{**shape, "seq_len": length} for length in LENGTHS])
    default = planner.where(lambda one: one.uses_backend and one.supports.max_world_size == 1)
    return planner.compare(workloads, planner.implementations(default))
