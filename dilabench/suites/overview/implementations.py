"""Suite `implementations`: which implementation is fastest and smallest on one workload?"""

from dilabench.record import PlannedCase
from dilabench.request import RunRequest
from dilabench.suites.planner import Planner


def expand(_request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """Every implementation but the oracle (which is there to be right, not fast) unless it is asked for by name."""
    default = planner.where(lambda _: True)
    return planner.compare(planner.workload_requests([{}]), planner.implementations(default))
