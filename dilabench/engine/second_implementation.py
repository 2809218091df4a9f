"""The choice of a built-in that computes every row of a case by other means, for verification. No torch."""

from collections.abc import Iterator

from dilabench.machine import Machine
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.descriptors import Backend, Implementation
from dilabench.record import Case, Optimizations
from dilabench.workload.spec import flops

MOST = 3
BUILTIN = "builtin"


def second_implementations(
    case: Case, catalogue: Catalogue, machine: Machine
) -> Iterator[tuple[Implementation, Backend | None]]:
    """At most three built-ins, with the dense kernel that each is built over, the best to compare with first.

    Another implementation comes before another kernel below the same one, a plain method before others. None if a call
    takes more work than is affordable, and for calls that take embeddings. Implementations that compile at their first
    call or need an extra library are excluded.
    """
    workload = case.workload
    takes = catalogue.implementations.get(case.implementation).takes
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
