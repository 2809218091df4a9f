"""From a workload to what computes it: the fastest way, or the one over a backend that the caller names or gives."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import torch

from dilabench.choice import first_use
from dilabench.choice.descriptors import load_target
from dilabench.choice.rules import Choice
from dilabench.choice.ways import AUTO, Candidate, Way, own_ways
from dilabench.contracts import Attend, BuildContext, LoadedBackend
from dilabench.impls.one_operator import Computation
from dilabench.machine import Machine, detect
from dilabench.workload.spec import Workload


def automatic(workload: Workload, device: torch.device) -> tuple[Choice, Computation]:
    """What `backend="auto"` takes, and its computation: the fastest way that is known or can be measured here.

    A rule may leave the backend open; then it is the best dense kernel. Raises ConfigError when nothing can compute it
    on this machine.
    """
    ways, machine = own_ways(), machine_of(device.type)
    # Who asks for a backward pass will call a forward pass before it.
    asked = workload if workload.mode == "forward" else workload.replace(mode="both")

    def build(way: Candidate) -> Computation | None:
        implementation = ways.implementations.get(way.implementation)
        if implementation.uses_backend and way.backend is None:
            return None
        backend = load_backend(ways.backends.get(way.backend)) if way.backend else None
        built = load_target(implementation.target)(asked, BuildContext(device=device, backend=backend))
        return built if isinstance(built, Computation) else None

    choice = first_use.fastest(ways, machine, asked, device, build)
    computation = build(Way(choice.implementation, choice.backend, asked))
    if computation is not None:
        return choice, computation
    name = choice.implementation if ways.implementations.get(choice.implementation).uses_backend else "strided"
    backend = backend_of(AUTO, Way(name, None, workload.replace(mode="both")), device.type)
    return Choice(name, backend.name, choice.source), over(backend, name, asked, device)


def over(backend: LoadedBackend, implementation: str, workload: Workload, device: torch.device) -> Computation:
    """The computation of an implementation over a backend."""
    build = load_target(own_ways().implementations.get(implementation).target)
    computation: Computation = build(workload, BuildContext(device=device, backend=backend))
    return computation


def backend_of(backend: str | Attend, way: Candidate, device: str) -> LoadedBackend:
    """The backend of a name that can serve a way here, what 'auto' means for it, or the caller's own function.

    A function is differentiated by the plain backward pass of backend `math`. Raises ValueError for a backend that
    cannot serve the way, ConfigError for an unknown name.
    """
    if not isinstance(backend, str):
        from dilabench.backends import math

        return LoadedBackend(getattr(backend, "__name__", "function"), backend, math.attend_backward)
    ways, machine = own_ways(way.world_size > 1), machine_of(device)
    if backend == AUTO:
        name, reasons = ways.choose_backend(way, machine)
    else:
        name = ways.backends.get(backend).name
        reasons = "; ".join(ways.reasons_against_backend(way, machine, name))
    if name is None or (backend != AUTO and reasons):
        raise ValueError(f"backend {backend!r} cannot serve this call: {reasons}")
    return load_backend(ways.backends.get(name))


class Described(Protocol):
    """A backend's descriptor, or the part of it that is sent to a worker."""

    @property
    def name(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def backward_target(self) -> str | None: ...
    @property
    def packed_target(self) -> str | None: ...
    @property
    def merging_target(self) -> str | None: ...
    @property
    def aligns_ends(self) -> bool: ...
    @property
    def places_results(self) -> bool: ...


def load_backend(backend: Described) -> LoadedBackend:
    """Import what a backend's targets name. Raises PluginError for one that names nothing."""
    backward = load_target(backend.backward_target) if backend.backward_target else None
    return LoadedBackend(
        backend.name,
        load_target(backend.target),
        backward,
        aligns_ends=backend.aligns_ends,
        places_results=backend.places_results,
        packed=load_target(backend.packed_target) if backend.packed_target else None,
        merging=load_target(backend.merging_target) if backend.merging_target else None,
    )


@lru_cache(maxsize=2)
def machine_of(device: str) -> Machine:
    """The machine as calls on a kind of device see it."""
    return detect(device)
