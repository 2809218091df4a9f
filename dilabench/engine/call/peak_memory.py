"""Peak memory of one call, split by what it is for (torch). Meant for a process in which nothing else ran."""

import contextlib
import gc
import resource
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.device.device import release_heap, resident_bytes, synchronize
from dilabench.record import Memory, MemorySource

METHODS: Mapping[MemorySource, str] = {
    "allocator": "torch.cuda.max_memory_allocated over one call after a first call",
    "resident_set": "VmHWM after a reset (clear_refs) minus VmRSS, over one call after a first call and malloc_trim",
    "process_peak": "ru_maxrss minus VmRSS over one call: the peak cannot be reset here, a higher one before hides it",
}


def measure_memory(call: PreparedCall, isolated: bool) -> Memory:
    """Inputs, parameters, workspace (outputs and temporaries) and what is saved for backward; they add up to the peak.

    The peak covers forward and, unless the mode is forward, backward; gradients count as workspace, and so does what
    optimizations keep between calls (pooled buffers, cached patterns, CUDA graphs): it is there during a call.
    """
    given = [*call.inputs(0).distinct, *([call.output_gradient()] if call.workload.mode != "forward" else [])]
    # Offloaded inputs are not in the memory that is measured.
    inputs = sum(tensor.nbytes for tensor in given if tensor.device == call.device)
    parameters = sum(parameter.nbytes for parameter in call.parameters())
    saved = _saved_for_backward(call) if call.workload.mode != "forward" else None
    held = call.held_bytes
    # Garbage of the first call that goes during the measured one would count as memory that this one did not need: a
    # caught exception keeps the frames it passed through, and those the tensors in them.
    gc.collect()
    extra, source = _cuda_extra(call) if call.device.type == "cuda" else _cpu_extra(call)
    extra += held
    return Memory(
        peak_bytes=inputs + parameters + max(extra, saved or 0),
        inputs_bytes=inputs,
        parameters_bytes=parameters,
        workspace_bytes=max(0, extra - (saved or 0)),
        saved_for_backward_bytes=saved,
        isolated=isolated,
        source=source,
        method=METHODS[source],
    )


def _whole_call(call: PreparedCall) -> None:
    """Forward, and backward when it belongs to the mode; the result is dropped at the end."""
    result = call.fresh()()
    synchronize(call.device)
    del result


def _cuda_extra(call: PreparedCall) -> tuple[int, MemorySource]:
    device = call.device
    torch.cuda.empty_cache()
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    _whole_call(call)
    return torch.cuda.max_memory_allocated(device) - before, "allocator"


def _cpu_extra(call: PreparedCall) -> tuple[int, MemorySource]:
    release_heap()
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = resident_bytes("VmRSS")
        _whole_call(call)
        return max(0, resident_bytes("VmHWM") - before), "resident_set"
    except OSError:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        _whole_call(call)
        return max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before), "process_peak"


def _saved_for_backward(call: PreparedCall) -> int:
    """Bytes of distinct storages that autograd keeps between forward and backward, inputs and parameters left out."""
    inputs = call.inputs(0)
    known = {tensor.untyped_storage().data_ptr() for tensor in (*inputs.distinct, *call.parameters())}
    seen: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in known:
            seen[pointer] = tensor
        return tensor

    hooks: contextlib.AbstractContextManager[object] = torch.autograd.graph.saved_tensors_hooks(
        pack, lambda tensor: tensor
    )
    with hooks:
        out = call.function(inputs.q, inputs.k, inputs.v)
    total = sum(tensor.untyped_storage().nbytes() for tensor in seen.values())
    del out
    return total
