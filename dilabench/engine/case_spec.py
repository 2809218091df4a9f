"""The spec of a case, by which a worker builds it, the built-ins that compute every row of it by other means, for
verification, and the worker that it belongs to. No torch.
"""

from collections.abc import Iterator

from dilabench.engine.call.specs import BackendSpec, CaseSpec, SecondSpec
from dilabench.machine import Machine
from dilabench.patterns.dense import DENSE
from dilabench.plugins.catalogue import BUILTIN, Catalogue
from dilabench.plugins.descriptors import Backend, Implementation
from dilabench.record import Case, Optimizations
from dilabench.validation import content_hash
from dilabench.workload.spec import UNBOUNDED, flops

MOST = 3


def case_spec(case: Case, catalogue: Catalogue, seed: int, machine: Machine | None = None) -> CaseSpec:
    """The spec of a case; inputs depend on the run's seed and the group only. Without a machine it has no seconds."""
    implementation = catalogue.implementations.get(case.implementation)
    backend = None
    if case.backend is not None:
        backend = BackendSpec.model_validate(catalogue.backends.get(case.backend), from_attributes=True)
    return CaseSpec(
        case=case,
        target=implementation.target,
        takes=implementation.takes,
        deterministic=implementation.deterministic,
        backend=backend,
        seconds=() if machine is None else tuple(_seconds(case, catalogue, machine)),
        seed=int(content_hash([seed, case.group_id]), 16) % 2**31,
    )


def _seconds(case: Case, catalogue: Catalogue, machine: Machine) -> Iterator[SecondSpec]:
    for implementation, backend in second_implementations(case, catalogue, machine):
        over = None if backend is None else BackendSpec.model_validate(backend, from_attributes=True)
        same = implementation.name == case.implementation and backend is not None
        name = f"{implementation.name} over {backend.name}" if backend and same else implementation.name
        yield SecondSpec(name=name, target=implementation.target, backend=over)


def second_implementations(
    case: Case, catalogue: Catalogue, machine: Machine
) -> Iterator[tuple[Implementation, Backend | None]]:
    """At most three built-ins, with the dense kernel that each is built over, the best to compare with first.

    Another implementation comes before another kernel below the same one, a plain method before others. None if a call
    takes more work than is affordable, and for calls that take embeddings. Implementations that compile at their first
    call or need an extra library are excluded. For a model: that with eager attention, and that with SDPA, or if SDPA
    cannot compute it with eager attention by rows.
    """
    workload = case.workload
    takes = catalogue.implementations.get(case.implementation).takes
    if takes == "model":
        own = [model for model in catalogue.implementations if catalogue.implementations.origin(model.name) == BUILTIN]
        project = catalogue.implementations.get(case.implementation).project
        oracles, plain = (
            [model for model in own if (model.takes, model.role, model.project) == (takes, role, project)]
            for role in ("oracle", "plain")
        )
        dense = workload.replace(pattern=DENSE, window=UNBOUNDED)
        able = [model for model in plain if not catalogue.unsupported(model, dense, machine.device)]
        yield from ((model, None) for model in (oracles[0], *(able or oracles[1:])))
        return
    if takes != "heads" or flops(workload) > machine.facts.affordable_flops:
        return
    found = [
        (implementation, backend)
        for implementation in catalogue.implementations
        if _may_serve(implementation, catalogue)
        for backend in _backends(implementation, catalogue, machine)
        if not catalogue.reasons_against(_trial(case, implementation, backend), machine)
        and (implementation.name, backend and backend.name) != (case.implementation, case.backend)
        and (implementation.name != case.implementation or backend is not None)
    ]

    def rank(pair: tuple[Implementation, Backend | None]) -> tuple[bool, bool]:
        implementation, _ = pair
        return implementation.name == case.implementation, implementation.role != "plain"

    yield from sorted(found, key=rank)[:MOST]


def _may_serve(implementation: Implementation, catalogue: Catalogue) -> bool:
    built_in = catalogue.implementations.origin(implementation.name) == BUILTIN
    on_one_device = implementation.sharding is None and implementation.takes == "heads" and not implementation.compiles
    return built_in and on_one_device and implementation.role in ("plain", "method") and not implementation.chooses


def _backends(implementation: Implementation, catalogue: Catalogue, machine: Machine) -> Iterator[Backend | None]:
    """The built-in kernels that `auto` would choose from, the best first; None if it needs none."""
    if not implementation.uses_backend:
        yield None
        return
    for name in catalogue.preferred_backends(machine):
        backend = catalogue.backends.get(name)
        if catalogue.backends.origin(name) == BUILTIN and not backend.library and not backend.compiles:
            yield backend


def _trial(case: Case, implementation: Implementation, backend: Backend | None) -> Case:
    changes = {"implementation": implementation.name, "backend": backend and backend.name, "world_size": 1}
    return case.model_copy(update={**changes, "optimizations": Optimizations()})


def worker_key(case: Case, catalogue: Catalogue) -> str:
    """The process that a case belongs to: one per plug-in, and one per backend that needs an extra library.

    Libraries that cannot live in one process (xformers and flash-attn 4, say) never meet; built-ins on torch's own
    kernels share a process, so that their samples alternate within milliseconds. '@4' at the end: four ranks.
    """
    origin = catalogue.implementations.origin(case.implementation)
    ranks = f"@{case.world_size}" if case.world_size > 1 else ""
    if case.backend is None:
        return origin + ranks
    backend = catalogue.backends.get(case.backend)
    foreign = catalogue.backends.origin(backend.name)
    parts = [origin, *([foreign] if foreign != origin else []), *([backend.name] if backend.library else [])]
    return "+".join(parts) + ranks
