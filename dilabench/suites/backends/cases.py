"""Suite `backends`: which dense kernel is fastest here, for full and for dilated attention, and in which dtype?"""

from dilabench.plugins.descriptors import Implementation
from dilabench.record import PlannedCase
from dilabench.request import ALL, RunRequest
from dilabench.suites.planner import Planner

DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16", "float16", "float32")}
# Plain PyTorch over all pairs is one of the backends; a CPU should not need minutes for it.
LENGTH = {"cpu": 2048, "cuda": 8192}


def expand(request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """Full and dilated attention of one shape over every backend, in the dtypes that this device is used with.

    A dtype, backends or implementations that are named are the only ones.
    """
    planner = planner.asking(backends=request.backends or (ALL,))
    device = planner.machine.device
    defaults = [{"seq_len": LENGTH[device], "dtype": dtype} for dtype in DTYPES[device]]
    workloads = planner.workload_requests(defaults)

    def is_shown(one: Implementation) -> bool:
        fits = one.supports.only_dense or any(one.supports.computes(workload.pattern) for workload in workloads)
        on_one = one.takes == "heads" and one.supports.max_world_size == 1
        return one.uses_backend and one.role == "method" and on_one and fits

    default = planner.where(is_shown)
    return planner.compare(workloads, planner.implementations(default))
