"""Suites `quick` (does it work, and how fast is it roughly?) and `implementations` (what is fastest and smallest?)."""

from dilabench.plugins.descriptors import Implementation
from dilabench.record import PlannedCase
from dilabench.request import RunRequest
from dilabench.suites.planner import Planner
from dilabench.workload.spec import DEFAULT_PATTERN

QUICK_LENGTHS = (1024, 4096, 16384)


def quick(_request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """What calls a dense kernel, and so runs everywhere, and what `auto` takes on this device, at each length.

    Full attention is a yardstick. One sequence of two heads: under a minute on two CPU cores.
    """
    shape = {"batch_size": 1, "num_heads": 2, "head_dim": 64}
    workloads = planner.workload_requests([{**shape, "seq_len": length} for length in QUICK_LENGTHS])

    def is_shown(one: Implementation) -> bool:
        dilated = one.supports.computes(DEFAULT_PATTERN)
        here = planner.machine.facts.among(one.supports.devices) and dilated
        over_kernel = one.uses_backend and (dilated or one.supports.only_dense)
        return one.supports.max_world_size == 1 and (over_kernel or (one.priority > 0 and here))

    default = planner.where(is_shown)
    return planner.compare(workloads, planner.implementations(default))


def implementations(_request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """Every implementation but the oracle (which is there to be right, not fast) unless it is asked for by name."""
    default = planner.where(lambda _: True)
    return planner.compare(planner.workload_requests([{}]), planner.implementations(default))
