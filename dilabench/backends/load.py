"""Loads a backend: imports the functions that its descriptor names."""

from typing import Protocol

from dilabench.contracts import LoadedBackend
from dilabench.plugins.catalogue import load_target


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
