"""Suite `billion`: one sequence of 2^30 tokens. On one device `extreme` searches up to it; over ranks it is measured
as one length of `distributed`, each case in separate processes."""

from collections.abc import Sequence

from dilabench.choice.rules import by_priority
from dilabench.errors import ConfigError
from dilabench.metadata import WAY
from dilabench.plugins.builtin.suites import BillionOptions
from dilabench.record import PlannedCase, Row
from dilabench.request import RunRequest
from dilabench.suites.extreme import cases as extreme
from dilabench.suites.planner import Planner
from dilabench.suites.ring.cases import ranks_here
from dilabench.validation import validated
from dilabench.workload.spec import WorkloadRequest

# One head of 64 fits into four H200 (kernels.md §6).
SHAPE = {"batch_size": 1, "num_heads": 1, "head_dim": 64, "mode": "forward"}


def expand(request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """The first length of a search on one device; over ranks the sequence itself.

    Without `-i` the best implementation by priority computes it. Raises ConfigError if there is none.
    """
    ranks = _ranks(planner)
    if ranks == 1:
        search = _search(planner)
        return extreme.first_lengths(search.request, search, SHAPE, lambda asked: _best(search, asked, 1))
    options = validated(BillionOptions, request.options)
    there, way = planner.asking(nproc=ranks), WAY.entry(f"one sequence over {ranks} ranks")
    planned: list[PlannedCase] = []
    for asked in planner.workload_requests([SHAPE]):
        whole = asked.model_copy(update={"seq_len": options.tokens})
        for implementation in there.implementations(_best(there, whole, ranks)):
            planned += [case.isolated(options.memory_limit) for case in there.plan(implementation, whole, way)]
    return tuple(planned)


def follow_up(rows: Sequence[Row], _request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """The next length of the search; over ranks there is no search."""
    search = _search(planner)
    return extreme.follow_up(rows, search.request, search) if _ranks(planner) == 1 else ()


def _search(planner: Planner) -> Planner:
    """The planner of the request to `extreme`: the tokens are the longest length that it tries."""
    options = validated(BillionOptions, planner.request.options)
    return planner.asking(options={"max_seq_length": options.tokens, "memory_limit": options.memory_limit})


def _ranks(planner: Planner) -> int:
    """The requested number of ranks, else one per GPU, else one."""
    if planner.request.nproc > 1:
        return planner.request.nproc
    return ranks_here(planner) if len(planner.machine.gpus) > 1 and planner.machine.facts.own_memory else 1


def _best(planner: Planner, asked: WorkloadRequest, ranks: int) -> tuple[str, ...]:
    """The implementation of highest priority for this device; its row shows any other obstacle."""
    machine, registry = planner.machine, planner.catalogue.implementations
    workload = asked.resolve(machine.auto_dtype, machine.auto_tokens)
    names = by_priority(planner.catalogue, workload, ranks)
    if not names and not planner.request.implementations:
        raise ConfigError(f"nothing computes {workload.label()} by default; name an implementation with -i")
    supported = {name: registry.get(name).supports for name in names}
    names = tuple(name for name in names if workload.layout in supported[name].layouts) or names
    here = [name for name in names if machine.facts.word in supported[name].devices]
    return tuple((here or names)[:1])
