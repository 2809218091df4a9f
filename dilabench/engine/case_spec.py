"""The spec of a case, by which a worker builds it, and the worker that it belongs to. No torch."""

from collections.abc import Iterator

from dilabench.engine.call.specs import BackendSpec, CaseSpec, SecondSpec
from dilabench.engine.second_implementation import second_implementations
from dilabench.machine import Machine
from dilabench.plugins.catalogue import Catalogue
from dilabench.record import Case
from dilabench.validation import content_hash


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
