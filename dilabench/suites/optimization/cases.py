"""Suite `optimization`: what do pattern cache, buffer pool, CUDA graph and torch.compile bring, alone and together?"""

from dilabench.metadata import VARIANT
from dilabench.record import PlannedCase
from dilabench.request import RunRequest
from dilabench.suites.optimization.variants import variants
from dilabench.suites.planner import Planner

# Launches and tables weigh most where calls are short, copies and workspace where they are long.
LENGTHS = {"small": (1024, 4096), "large": (4096, 16384, 65536)}


def expand(request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """Each implementation at each length with everything off, each optimization alone, and all of them together; with a
    backward pass also gradient checkpointing, whose gain is in memory.

    Together leaves out what this device does not have. All variants of a length are timed in the same rounds. To
    torch.compile the implementations of heads are one operator each: it compiles what is around them, nothing inside.
    """
    defaults = [{"seq_len": length} for length in LENGTHS[planner.machine.facts.size]]
    cases: list[PlannedCase] = []
    for workload in planner.workload_requests(defaults):
        for implementation in planner.implementations(planner.on_one_device(workload.pattern)):
            for name, fields in variants(request, planner.machine, workload.mode).items():
                cases += planner.plan(implementation, workload, VARIANT.entry(name), **fields)
    return tuple(cases)
