"""Peak memory of one call, split by what it is for, as torch's allocator of the device counts it (torch)."""

import contextlib
import gc
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dilabench.engine.call.kernel_trace import MEMORY_EVENT, profiled
from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.device.device import device_of
from dilabench.record import Memory


def measure_memory(call: PreparedCall, profiled_call: profile | None = None) -> Memory | None:
    """Inputs, parameters, workspace (outputs and temporaries) and what is saved for backward; they add up to the peak.
    None on a device whose allocator keeps no statistics.

    On a CPU `profiled_call`, one of these calls under the profiler with its memory, spares another one.

    The peak covers forward and, unless the mode is forward, backward; gradients count as workspace, and so does what
    optimizations keep between calls (pooled buffers, cached patterns, CUDA graphs): it is there during a call. What
    libraries allocate past torch's allocator, and on a CPU what threads of the function's own do, is not counted.
    """
    given = [*call.inputs(0).distinct, *([call.output_gradient()] if call.workload.mode != "forward" else [])]
    # Offloaded inputs are not in the memory that is measured.
    inputs = sum(tensor.nbytes for tensor in given if tensor.device == call.device)
    parameters = sum(parameter.nbytes for parameter in call.parameters())
    saved = _saved_for_backward(call) if call.workload.mode != "forward" else None
    held = call.held_bytes
    if profiled_call is not None:
        extra = held + allocations(profiled_call)[1]
    else:
        # Garbage of the first call that goes during the measured one would count as memory that this one did not need:
        # a caught exception keeps the frames it passed through, and those the tensors in them.
        gc.collect()
        found = _extra(call)
        if found is None:
            return None
        extra = held + found
    return Memory(
        peak_bytes=inputs + parameters + max(extra, saved or 0),
        inputs_bytes=inputs,
        parameters_bytes=parameters,
        workspace_bytes=max(0, extra - (saved or 0)),
        saved_for_backward_bytes=saved,
        isolated=True,
        source="allocator",
        method=device_of(call.device).peak_method,
    )


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
    """(bytes that stay, largest bytes above the start) of what torch's CPU allocator gave and took in a profiled call.

    The profiler is told of each block by the allocator itself, so that what operators allocate inside counts, and what
    is freed at once; blocks from before do not, whether they are freed or not.
    """
    live = peak = 0
    assert profiler.kineto_results is not None
    for event in sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == MEMORY_EVENT:
            live += event.nbytes()  # type: ignore[attr-defined]
            peak = max(peak, live)
    return live, peak


def _saved_for_backward(call: PreparedCall) -> int:
    """Bytes of distinct storages that autograd keeps between forward and backward, inputs and parameters left out."""
    inputs = call.inputs(0)
    known = {tensor.untyped_storage().data_ptr() for tensor in (*inputs.distinct, *call.parameters())}
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
    """What a tensor is made of: itself, or what a wrapper such as DTensor, whose own storage has no address, holds."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain_parts(getattr(tensor, name))
