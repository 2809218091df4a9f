"""The computation of a workload: the fastest implementation, or one over a backend that the caller names or passes."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from dilabench.choice.descriptors import Implementation, load_target
from dilabench.choice.rules import Choice, by_priority, choose, nothing_computes, usable
from dilabench.choice.ways import Candidate, Way, own_ways
from dilabench.contracts import Attend, BuildContext, LoadedBackend
from dilabench.errors import ConfigError, said
from dilabench.impls.call import Computation, OwnBackend, function_of
from dilabench.impls.last_rows import InSquare
from dilabench.machine import CPU, CUDA, Machine, detect
from dilabench.workload.spec import AUTO, UNBOUNDED, Window, Workload

logger = logging.getLogger(__name__)


def automatic(workload: Workload, device: torch.device) -> tuple[Choice, Computation]:
    """Return the choice of `backend="auto"` and its computation: the fastest that is known or can be measured here.

    If a rule names no backend, the best dense kernel is used. Raises ConfigError if nothing can compute the workload on
    this machine.
    """
    if workload.query_len is not None:
        return _of_last_rows(workload, device)
    ways, machine = own_ways(), machine_of(device)
    if not calls_backends(workload):
        implementation = implementation_of(workload, device)
        built: Computation = load_target(implementation.target)(workload, BuildContext(device=device))
        return Choice(implementation.name, None, "rule"), built
    # A backward pass follows a forward pass, so both are chosen together.
    requested = workload if workload.mode == "forward" else workload.replace(mode="both")

    def build(way: Candidate) -> Computation | None:
        implementation = ways.implementations.get(way.implementation)
        if implementation.uses_backend and way.backend is None:
            return None
        backend = load_backend(ways.backends.get(way.backend)) if way.backend else None
        built = load_target(implementation.target)(requested, BuildContext(device=device, backend=backend))
        return built if isinstance(built, Computation) else None

    if device.type == CUDA.name:
        # Implementations are measured on GPUs only.
        from dilabench.choice.first_use import fastest

        choice = fastest(ways, machine, requested, device, build)
    else:
        choice = choose(ways, machine, requested)
    try:
        computation = build(Way(choice.implementation, choice.backend, requested))
    # Triton's descriptors are experimental: a version may lack them.
    except ImportError as error:
        logger.warning("%s cannot be loaded, and dense kernels serve: %s", choice.implementation, said(error))
        computation = None
    if computation is not None:
        return choice, computation
    name = choice.implementation
    if not ways.implementations.get(name).uses_backend:
        name = over_backends(workload, device)
    backend = backend_of(AUTO, Way(name, None, workload.replace(mode="both")), device)
    return Choice(name, backend.name, choice.source), over(backend, name, requested, device)


def _of_last_rows(workload: Workload, device: torch.device) -> tuple[Choice, Computation]:
    """`automatic` for queries that are the last rows of their keys, by priority, without measurements: the first
    implementation that takes them, else the choice for the square with queries of zeros before them.
    """
    ways, machine = own_ways(), machine_of(device)
    for name in by_priority(ways, workload):
        way = Way(name, None, workload)
        if usable(ways, machine, way):
            both = way if workload.mode == "forward" else replace(way, workload=workload.replace(mode="both"))
            backend = backend_of(AUTO, both, device) if ways.implementations.get(name).uses_backend else None
            return Choice(name, backend.name if backend else None, "rule"), over(backend, name, both.workload, device)
    choice, square = automatic(workload.replace(query_len=None), device)
    return choice, InSquare(square, workload.seq_len)


def calls_backends(workload: Workload) -> bool:
    """Return True if an implementation that `auto` may take computes the workload over dense backends."""
    ways = own_ways()
    return any(ways.implementations.get(name).uses_backend for name in by_priority(ways, workload))


def over_backends(workload: Workload, device: torch.device) -> str:
    """Return the implementation that computes the workload over a backend. Raises ConfigError if there is none."""
    ways, machine = own_ways(), machine_of(device)
    names = [name for name in by_priority(ways, workload) if ways.implementations.get(name).uses_backend]
    for name in names:
        if not ways.reasons_against(Way(name, None, workload), machine):
            return name
    if names:
        raise nothing_computes(ways, machine, workload)
    raise ConfigError(f"pattern {workload.pattern.kind}, whose kernels call none; leave it out")


def implementation_of(workload: Workload, device: torch.device) -> Implementation:
    """Return the implementation of highest priority that computes the workload alone, or raise ConfigError."""
    ways, machine = own_ways(), machine_of(device)
    for name in by_priority(ways, workload):
        way = Way(name, None, workload)
        if not (ways.reasons_against(way, machine) or ways.reasons_unasked(way, machine)):
            return ways.implementations.get(name)
    raise nothing_computes(ways, machine, workload)


def over(backend: LoadedBackend | None, implementation: str, workload: Workload, device: torch.device) -> Computation:
    """The computation of an implementation, over a backend if it calls one."""
    build = load_target(own_ways().implementations.get(implementation).target)
    computation: Computation = build(workload, BuildContext(device=device, backend=backend))
    return computation


def check_backend(backend: str | OwnBackend) -> None:
    """Raise ConfigError for a name that no backend has, even if no backend will be called."""
    if isinstance(backend, str) and backend != AUTO and function_of(backend) is None:
        own_ways().backends.get(backend)


def backend_of(backend: str | OwnBackend, way: Candidate, device: torch.device) -> LoadedBackend:
    """Return the backend: by name, the best one for 'auto', or the caller's function.

    A function is differentiated by the plain backward pass of backend `math`. Raises ValueError for a backend that
    cannot serve the way, ConfigError for an unknown name.
    """
    function = None if backend == AUTO else function_of(backend)
    if function is not None:
        from dilabench.backends import math

        if way.workload.softcap is not None:
            raise ValueError(
                f"softcap {way.workload.softcap} with {function} as backend: a function (q, k, v, *, causal, window, "
                "scale) gets none; leave the softcap out, or give the name of a backend, such as 'math'"
            )
        return LoadedBackend(getattr(function, "__name__", "function"), _checked(function), math.attend_backward)
    assert isinstance(backend, str)
    ways, machine = own_ways(way.world_size > 1), machine_of(device)
    if backend == AUTO:
        name, reasons = ways.choose_backend(way, machine)
    else:
        name = ways.backends.get(backend).name
        reasons = "; ".join(ways.reasons_against_backend(way, machine, name))
        able = [other.name for other in ways.backends if not ways.reasons_against_backend(way, machine, other.name)]
        reasons += f"; use {' or '.join(able)}" if reasons and able else ""
    if name is None or (backend != AUTO and reasons):
        raise ValueError(f"backend {backend!r} cannot serve this call: {reasons}")
    return load_backend(ways.backends.get(name))


_DTYPES_OF_LSE = frozenset((torch.float32, torch.float64))


def _checked(function: Attend) -> Attend:
    """The caller's function. Raises ValueError if it returns anything but out and lse in the shapes and dtypes of
    `Attend`."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: Window = UNBOUNDED, scale: float
    ) -> tuple[Tensor, Tensor]:
        result = function(q, k, v, causal=causal, window=window, scale=scale)
        of_out, of_lse = (*q.shape[:3], v.shape[3]), (q.shape[0], q.shape[2], q.shape[1])
        is_pair = isinstance(result, tuple) and all(isinstance(x, Tensor) for x in result)
        found = [tuple(x.shape) for x in result] if is_pair else type(result).__name__
        if found != [of_out, of_lse]:
            raise ValueError(
                f"backend {function} returned {found}; it must return (out, lse), of shapes {of_out} and {of_lse}"
            )
        out, lse = result
        if out.dtype != q.dtype or lse.dtype not in _DTYPES_OF_LSE:
            raise ValueError(
                f"backend {function} returned out {out.dtype} and lse {lse.dtype} of query {q.dtype}; give "
                "out.to(query.dtype), and lse in float32 or float64"
            )
        return result

    return attend


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
    """Import a backend's targets. Raises PluginError for a target that does not exist."""
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


def machine_of(device: torch.device | str) -> Machine:
    """Return the machine with the device's GPU first, whose properties and measurements then apply."""
    device = torch.device(device)
    if device.type != CUDA.name or not torch.cuda.is_available():
        return _machine(device.type)
    return _machine(CUDA.name, torch.cuda.current_device() if device.index is None else device.index)


@lru_cache(maxsize=16)
def _machine(device: str, index: int | None = None) -> Machine:
    """Return the machine for a kind of device; tensors without data, on `meta`, count as the default device."""
    if index is not None:
        machine = detect(device)
        # NVML may count the GPUs in another order than CUDA.
        name = torch.cuda.get_device_name(index)
        gpus = sorted(enumerate(machine.gpus), key=lambda numbered: (numbered[1].name != name, numbered[0] != index))
        return replace(machine, gpus=tuple(gpu for _, gpu in gpus))
    if device in (CPU.name, CUDA.name):
        return detect(device)
    # There are tensors on the device, so its presence need not be checked.
    return detect() if device == "meta" else Machine(device=device)
