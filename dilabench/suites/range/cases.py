"""Suite `range`: how do time and memory grow with length, and where does one implementation overtake another?"""

from collections.abc import Sequence

from dilabench.errors import ConfigError
from dilabench.patterns.dense import DENSE
from dilabench.record import PlannedCase, Skipped
from dilabench.request import RunRequest
from dilabench.suites.planner import Planner
from dilabench.suites.room import shortage
from dilabench.units import format_count
from dilabench.workload.ranges import RANGES

DEFAULT_RANGE = "production"


def expand(request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """Every implementation on q, k, v at each length as it stands; what cannot fit into memory becomes a skipped row.

    Without lengths it is the production range; without names every implementation that need not compile for tens of
    seconds at each length. The batch is `auto` (16384 tokens on a GPU, one sequence on a CPU) unless the user or a
    preset sets it, so that every length keeps the device equally busy. Raises ConfigError for lengths that do not rise.
    """
    _refuse_disorder(request.lengths)
    lengths = request.lengths
    if not lengths and not request.presets and "seq_len" not in request.overrides:
        lengths = RANGES[DEFAULT_RANGE]
    planner = planner.asking(lengths=lengths)
    workloads = planner.workload_requests([{}])
    patterns = {workload.pattern for workload in workloads} | {DENSE.kind}
    default = planner.where(
        lambda one: not one.compiles and one.takes == "heads" and not one.supports.patterns.isdisjoint(patterns)
    )
    return tuple(_within_memory(case, planner) for case in planner.compare(workloads, planner.implementations(default)))


def _refuse_disorder(lengths: Sequence[int]) -> None:
    if list(lengths) != sorted(lengths):
        given, ordered = (",".join(map(format_count, some)) for some in (lengths, sorted(lengths)))
        raise ConfigError(f"lengths {given} are out of order; a range rises: write --lengths {ordered}")


def _within_memory(planned: PlannedCase, planner: Planner) -> PlannedCase:
    why = None if planned.skip else shortage(planned.case, planner.machine, planner.catalogue)
    return planned.model_copy(update={"skip": Skipped(code="does_not_fit", why=why)}) if why else planned
