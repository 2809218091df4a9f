"""Suite `implementations`: which implementation is fastest and smallest on one workload?"""

from dilabench.record import PlannedCase
from dilabench.request import RunRequest
from dilabench.suites.planner import Planner, refuse_unknown_options

ORACLE = "reference"


def expand(request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """Every implementation but the oracle (which is there to be right, not fast) unless it is asked for by name."""
    refuse_unknown_options(request, ())
    default = [name for name in planner.catalogue.implementations.names if name != ORACLE]
    return planner.compare(planner.workload_requests([{}]), planner.implementations(default))
