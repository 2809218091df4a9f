"""Suite `ring`: the speed-up of several ranks over one device."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from dilabench.patterns.dense import DENSE
from dilabench.plugins.builtin.suites import RingOptions
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.descriptors import Implementation
from dilabench.record import PlannedCase
from dilabench.request import RunRequest
from dilabench.suites.planner import Planner
from dilabench.validation import validated
from dilabench.workload.spec import WorkloadRequest

# `both` comes first: efficiency is computed from it, and the budget may end early.
MODES = ("both", "forward", "backward")
RANKS_ON_A_CPU = 2
ON_CUDA = ("performance", "large_seq", "qwen3_32b")
ON_CPU: tuple[dict[str, object], ...] = (
    {"pattern": DENSE.kind, "batch_size": 1, "num_heads": 4, "num_kv_heads": 2, "seq_len": 2048},
    {"batch_size": 1, "num_heads": 4, "seq_len": 4096, "segment_lengths": (1024, 2048, 4096)},
)


def expand(request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """One device, then all ranks, for forward, backward and both, on each workload; last what the library takes.

    Without presets: the largest dense ones on GPUs, two small ones on a CPU. Without `--nproc`: every GPU, or two
    processes.
    """
    ranks = request.nproc if request.nproc > 1 else ranks_here(planner)
    if not request.presets and planner.machine.facts.size == "large":
        planner = planner.asking(presets=ON_CUDA)
    cases: list[PlannedCase] = []
    for workload in planner.workload_requests(ON_CPU):
        for in_mode in in_modes(workload, planner):
            cases += beside_one_device(in_mode, planner, ranks)
            if not request.implementations:
                parallel = planner.asking(nproc=ranks)
                cases += _over_ranks(parallel, _library(planner.catalogue, in_mode), in_mode)
    return tuple(cases)


def ranks_here(planner: Planner) -> int:
    """The number of GPUs, at least two; with fewer GPUs rows are skipped with their reason."""
    return max(RANKS_ON_A_CPU, len(planner.machine.gpus) if planner.machine.facts.own_memory else 0)


def in_modes(workload: WorkloadRequest, planner: Planner) -> Iterator[WorkloadRequest]:
    """Both, forward and backward; only one of the latter if the user chose that."""
    chosen = planner.request.overrides.get("mode", "both")
    for mode in MODES if chosen == "both" else (chosen,):
        yield workload.model_copy(update={"mode": mode})


def beside_one_device(workload: WorkloadRequest, planner: Planner, ranks: int) -> list[PlannedCase]:
    """The single-device rows of a workload and the rows of its parallel implementations."""
    single = planner.asking(nproc=1)
    parallel = planner.asking(nproc=ranks)
    default = planner.over_ranks(workload, ranks)
    implementations = parallel.implementations(default)
    # An implementation with projections is compared with itself on one rank, which is the plain module.
    first, *others = _on_one_device(planner, workload, default)
    alone = dict.fromkeys(first if sharded.takes == "heads" else sharded for sharded in implementations)
    cases = [case for implementation in alone for case in single.plan(implementation, workload)]
    if first in alone:
        # These make the base faster if they run; without them it is unchanged.
        planned = (case for implementation in others for case in single.plan(implementation, workload))
        cases += [case for case in planned if case.skip is None]
    return [*cases, *_over_ranks(parallel, implementations, workload)]


def _over_ranks(
    parallel: Planner, implementations: Iterable[Implementation], workload: WorkloadRequest
) -> Iterator[PlannedCase]:
    inside = validated(RingOptions, parallel.request.options).sharding == "inside"
    for implementation in implementations:
        yield from parallel.plan(implementation, workload, sharding_inside=inside)


def _library(catalogue: Catalogue, workload: WorkloadRequest) -> tuple[Implementation, ...]:
    """The library's default choice over ranks."""
    return tuple(
        known
        for known in catalogue.implementations
        if known.chooses and known.supports.max_world_size != 1 and known.supports.computes(workload.pattern)
    )


def _on_one_device(planner: Planner, workload: WorkloadRequest, over_ranks: Sequence[str]) -> list[Implementation]:
    """The implementations of the single device: the best that calls a backend, and the best that does not.

    The first is of the same kind as those over ranks; if there is none, the first of those over ranks, on one rank.
    """
    registry = planner.catalogue.implementations
    sharded = registry.get(over_ranks[0])
    names = planner.where(
        lambda known: (
            known.supports.max_world_size == 1
            and known.takes == "heads"
            and known.role == "method"
            and workload.pattern in known.supports.patterns
            and workload.layout in known.supports.layouts
        )
    )
    ranked = sorted(map(registry.get, names), key=lambda known: -known.priority)
    first = next((known for known in ranked if known.uses_backend == sharded.uses_backend), sharded)
    other = (known for known in ranked if known.uses_backend != first.uses_backend and known.priority)
    return [first, *islice(other, 1)]
