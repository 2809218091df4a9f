"""Suite `range`: growth of time and memory with length, and the lengths at which implementations overtake others."""

from operator import attrgetter

from dilabench.errors import ConfigError
from dilabench.machine import Machine, memory_bytes
from dilabench.patterns.dense import DENSE
from dilabench.plugins.catalogue import Catalogue
from dilabench.record import Case, PlannedCase, Skipped
from dilabench.request import RunRequest
from dilabench.suites.planner import Planner
from dilabench.units import format_bytes, format_count
from dilabench.workload.ranges import RANGES
from dilabench.workload.spec import tensor_bytes

DEFAULT_RANGE = "production"
# Upper bounds of a plan: multiples of the bytes of q, k, v, out and lse, and bytes of blocks.
PLENTY, PLENTY_BYTES = 8, 2**31


def expand(request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """Every implementation on q, k, v at each length; a case that cannot fit into memory becomes a skipped row.

    Without lengths it is the production range; without names every implementation that need not compile for tens of
    seconds at each length. The batch is `auto` (16384 tokens on a GPU, one sequence on a CPU) unless the user or a
    preset sets it, so that every length keeps the device equally busy. Raises ConfigError for lengths that do not rise.
    """
    lengths = request.lengths
    if list(lengths) != sorted(lengths):
        given, ordered = (",".join(map(format_count, order)) for order in (lengths, sorted(lengths)))
        raise ConfigError(f"lengths {given} are out of order; a range rises: write --lengths {ordered}")
    if not lengths and not request.presets and "seq_len" not in request.overrides:
        lengths = RANGES[DEFAULT_RANGE]
    planner = planner.asking(lengths=lengths)
    workloads = planner.workload_requests([{}])
    patterns = {DENSE.kind, *map(attrgetter("pattern"), workloads)}
    default = planner.where(
        lambda implementation: (
            not implementation.compiles
            and implementation.takes == "heads"
            and not implementation.supports.patterns.isdisjoint(patterns)
        )
    )
    cases: list[PlannedCase] = []
    for planned in planner.compare(workloads, planner.implementations(default)):
        why = None if planned.skip else _shortage(planned.case, planner.machine, planner.catalogue)
        skip = Skipped(code="does_not_fit", why=why) if why else planned.skip
        cases.append(planned.model_copy(update={"skip": skip}))
    return tuple(cases)


def _shortage(case: Case, machine: Machine, catalogue: Catalogue) -> str | None:
    """Return why the case cannot fit into the device's memory; None if it may.

    The bytes of q, k, v, out and lse decide if they suffice, else a trace of the case.
    """
    available = memory_bytes(machine)
    least = sum(tensor_bytes(case.workload).values())
    if available is None or PLENTY * least + PLENTY_BYTES <= available:
        return None
    plan = None
    if least <= available:
        from dilabench.predict.memory import plan_memory

        plan = plan_memory(case, machine.device, catalogue)
    needed = plan.peak_bytes if plan else least
    if needed <= available:
        return None
    about = "about" if plan else "at least"
    return (
        f"needs {about} {format_bytes(needed)} ({needed} bytes) of memory, this device has {format_bytes(available)}; "
        "use a shorter length or a smaller batch"
    )
