"""Peak memory of one call, split by what it is for, as torch's allocator of the device counts it (torch)."""

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType, ModuleType

import numpy as np
import torch
from torch import Tensor
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dilabench.engine.call.kernel_trace import MEMORY_EVENT, profiled
from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.device.device import device_of
from dilabench.record import Memory

# More than any function refers to.
MOST_OBJECTS = 200_000
_NOT_LOOKED_AT = (ModuleType, type, FrameType, str, bytes, int, float, bool, type(None))


def measure_memory(call: PreparedCall, profiled_call: profile | None = None) -> Memory | None:
    """Inputs, parameters, workspace (outputs and temporaries) and tensors saved for backward; they add up to the peak.
    None on a device whose allocator keeps no statistics.

    On a CPU, `profiled_call` is a call that the profiler has already recorded with its memory.

    The peak covers forward and, unless the mode is forward, backward; gradients count as workspace. So do pooled
    buffers, cached patterns, CUDA graphs, and tensors and arrays that the built function keeps, because they exist
    during a call. Allocations outside torch's allocator, and on a CPU in separate threads, show in the process's
    high-water mark (`Memory.process_bytes`).
    """
    given = [*call.inputs(0).distinct, *([call.output_gradient()] if call.workload.mode != "forward" else [])]
    # Offloaded inputs are not in the memory that is measured.
    inputs = sum(tensor.nbytes for tensor in given if tensor.device == call.device)
    parameters = sum(parameter.nbytes for parameter in call.parameters)
    saved = _saved_for_backward(call) if call.workload.mode != "forward" else None
    held, kept = call.held_bytes, kept_bytes(call)
    if profiled_call is not None:
        extra = held + allocations(profiled_call)[1]
    else:
        # Collect the garbage of the first call, for example frames of a caught exception with their tensors. Otherwise
        # its release during the measured call would lower the measured peak.
        gc.collect()
        found = _extra(call)
        if found is None:
            return None
        extra = held + found
    return Memory(
        peak_bytes=inputs + parameters + kept + max(extra, saved or 0),
        inputs_bytes=inputs,
        parameters_bytes=parameters,
        kept_bytes=kept,
        workspace_bytes=max(0, extra - (saved or 0)),
        saved_for_backward_bytes=saved,
        isolated=True,
        source="allocator",
        method=device_of(call.device).peak_method,
    )


def kept_bytes(call: PreparedCall) -> int:
    """Bytes on the device of tensors, and on a CPU of arrays, that the built function refers to.

    Inputs, parameters, patterns and pooled buffers count elsewhere. Zero over ranks, whose message buffers belong to
    the group. Python modules are not searched.
    """
    if call.world is not None:
        return 0
    given = [*call.inputs(0).distinct, *call.parameters, call.context, call.workload]
    known = _storages([*given, *([call.output_gradient()] if call.workload.mode != "forward" else [])], call.device)
    found = _storages([call.built], call.device)
    return sum(size for place, size in found.items() if place not in known)


def _storages(roots: list[object], device: torch.device) -> dict[int, int]:
    """Address and bytes of the memory of tensors and arrays that can be reached from some objects."""
    found: dict[int, int] = {}
    namespaces = {id(vars(module)) for module in list(sys.modules.values()) if module is not None}
    seen: set[int] = set()
    waiting = roots
    while waiting and len(seen) < MOST_OBJECTS:
        value = waiting.pop()
        if id(value) in seen or id(value) in namespaces or isinstance(value, _NOT_LOOKED_AT):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            for part in _plain_parts(value) if value.device.type == device.type else ():
                found[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
        elif isinstance(value, np.ndarray):
            while isinstance(value.base, np.ndarray):
                value = value.base
            if device.type == "cpu":
                found[value.ctypes.data] = value.nbytes
        elif isinstance(value, FunctionType):
            waiting += [value.__defaults__, value.__kwdefaults__, value.__closure__, value.__dict__]
        else:
            waiting += gc.get_referents(value)
    return found


def _whole_call(call: PreparedCall) -> None:
    """Forward, and backward when it belongs to the mode; the result is dropped at the end."""
    result = call.fresh()()
    device_of(call.device).synchronize()
    del result


def _extra(call: PreparedCall) -> int | None:
    """Bytes that a call holds at most beyond those before it."""
    device = device_of(call.device)
    if device.profiles_memory:
        return cpu_allocations(lambda: _whole_call(call))[1]
    return device.peak_over(lambda: _whole_call(call))


def cpu_allocations(call: Callable[[], object]) -> tuple[int, int]:
    """`allocations` of a call on a CPU."""
    return allocations(profiled(call, torch.device("cpu"), memory=True))


def allocations(profiler: profile) -> tuple[int, int]:
    """(remaining bytes, peak bytes above the start) of torch's CPU allocator in a profiled call.

    The allocator reports each block to the profiler, so temporary blocks inside operators count. Blocks from before the
    call do not count.
    """
    live = peak = 0
    assert profiler.kineto_results is not None
    of_memory = [event for event in profiler.kineto_results.events() if event.name() == MEMORY_EVENT]
    for event in sorted(of_memory, key=lambda event: event.start_ns()):
        live += event.nbytes()  # type: ignore[attr-defined]
        peak = max(peak, live)
    return live, peak


def _saved_for_backward(call: PreparedCall) -> int:
    """Bytes of distinct storages that autograd keeps between forward and backward, without inputs and parameters."""
    inputs = call.inputs(0)
    known = {tensor.untyped_storage().data_ptr() for tensor in (*inputs.distinct, *call.parameters)}
    seen: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        for part in _plain_parts(tensor):
            pointer = part.untyped_storage().data_ptr()
            if pointer not in known:
                seen[pointer] = part
        return tensor

    hooks: contextlib.AbstractContextManager[object] = torch.autograd.graph.saved_tensors_hooks(
        pack, lambda tensor: tensor
    )
    with hooks:
        out = call.function(inputs.q, inputs.k, inputs.v)
    total = sum(tensor.untyped_storage().nbytes() for tensor in seen.values())
    del out
    return total


def _plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the data of a tensor: itself, or those inside a wrapper such as DTensor, whose own storage
    has no address.
    """
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain_parts(getattr(tensor, name))
