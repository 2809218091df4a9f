"""Suite `backends`: which dense kernel is fastest here, for full and for dilated attention, and in which dtype?"""

from dilabench.plugins.descriptors import Implementation
from dilabench.record import PlannedCase
from dilabench.request import ALL, RunRequest
from dilabench.suites.planner import Planner

DTYPES = {"small": ("float32", "bfloat16"), "large": ("bfloat16", "float16", "float32")}
# Plain PyTorch over all pairs is one of the backends; a CPU should not need minutes for it.
LENGTH = {"small": 2048, "large": 8192}


def expand(request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """Full and dilated attention of one shape over every backend, in the dtypes that this device is used with.

    A dtype, backends or implementations that are named are the only ones.
    """
    planner = planner.asking(backends=request.backends or (ALL,))
    size = planner.machine.facts.size
    defaults = [{"seq_len": LENGTH[size], "dtype": dtype} for dtype in DTYPES[size]]
    workloads = planner.workload_requests(defaults)

    def is_shown(one: Implementation) -> bool:
        fits = one.supports.only_dense or any(one.supports.computes(workload.pattern) for workload in workloads)
        on_one = one.takes == "heads" and one.supports.max_world_size == 1
        return one.uses_backend and one.role == "method" and on_one and fits

    default = planner.where(is_shown)
    return planner.compare(workloads, planner.implementations(default))
