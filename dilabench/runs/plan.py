"""From a request to what it comes to: its cases, the machine that they run on, how each of them is timed."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dilabench.engine.method import Method, method_for
from dilabench.errors import ConfigError
from dilabench.machine import Machine, detect
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.manager import Found
from dilabench.record import PlannedCase
from dilabench.request import RunRequest
from dilabench.suites.planner import Planner, expand

if TYPE_CHECKING:
    from dilabench.engine.worker.nodes import Nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What is to be measured, before anything is. `nodes`: where ranks run that torchrun has started."""

    found: Found
    machine: Machine
    request: RunRequest
    planned: tuple[PlannedCase, ...]
    method: Method
    nodes: "Nodes | None" = None

    @property
    def catalogue(self) -> Catalogue:
        """All that the cases may name."""
        return self.found.catalogue

    def planner(self) -> Planner:
        """What makes further cases of the same request."""
        return Planner(self.catalogue, self.machine, self.request)


def plan_run(found: Found, request: RunRequest, nodes: "Nodes | None" = None) -> RunPlan:
    """The plan of a request. Under torchrun it is for all ranks, unless the request names a number.

    Raises ConfigError for a request that cannot be carried out, `--nproc` beyond the ranks of torchrun included, and
    PluginError for a suite that fails.
    """
    request, machine = asking_all(request, nodes), detect(request.device)
    machine = nodes.machine(machine) if nodes else machine
    planned = expand(found.catalogue, machine, request)
    method = method_for(request, machine.device, found.catalogue)
    return RunPlan(found=found, machine=machine, request=request, planned=planned, method=method, nodes=nodes)


def asking_all(request: RunRequest, nodes: "Nodes | None") -> RunRequest:
    """The request for all ranks of torchrun unless it names a number. Raises ConfigError for more than there are."""
    if nodes is None:
        return request
    if request.nproc > nodes.size:
        raise ConfigError(
            f"--nproc {request.nproc} asks for more ranks than torchrun started ({nodes.size}); leave --nproc out"
        )
    return request if request.nproc > 1 else request.model_copy(update={"nproc": nodes.size})
