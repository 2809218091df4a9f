"""Traces a case: inputs, what is saved for backward, workspace and peak, on a device that need not be there (torch)."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor

from dilabench.choice.computation import load_backend
from dilabench.choice.descriptors import load_target
from dilabench.contracts import AttentionFn, BuildContext, PatternCache
from dilabench.distributed.single_rank import SingleRank
from dilabench.engine.call.chunked_queries import build_in_chunks, checkpointed
from dilabench.engine.call.inputs import TORCH_DTYPE, input_shapes
from dilabench.engine.call.specs import CaseSpec
from dilabench.engine.trace.kernel_forms import kernel_forms
from dilabench.engine.trace.storages import CPU, CUDA, Storages, following
from dilabench.record import MemoryPlan

MOST_RANKS = 16


def trace(spec: CaseSpec, device: str, most_operations: int | None = None) -> MemoryPlan:
    """The fullest rank; of more than MOST_RANKS the fullest of as many, evenly spaced. With one rank, the device."""
    # Memory follows no order of ranks: it depends on the segments that cross a rank's rows, or its documents.
    last = spec.case.world_size - 1
    ranks = sorted({last * place // (MOST_RANKS - 1) for place in range(MOST_RANKS)})
    where = CUDA if device == "cuda" else CPU
    found = [_trace(spec, where, rank, most_operations) for rank in ranks]
    return max(found, key=lambda plan: plan.peak_bytes)


def _trace(spec: CaseSpec, device: torch.device, rank: int, most_operations: int | None) -> MemoryPlan:
    case, workload = spec.case, spec.case.workload
    backward = workload.mode != "forward"
    storages = Storages(device, most_operations)
    gc.collect()
    with kernel_forms(), following(storages):
        function, rows = _built(spec, device, rank)
        parameters = [*function.parameters()] if isinstance(function, torch.nn.Module) else []
        parameters = [parameter for parameter in parameters if parameter.requires_grad]
        parameter_bytes = sum(parameter.nbytes for parameter in parameters)
        built = storages.live
        where = CPU if case.optimizations.offload_inputs else device
        made = [
            torch.empty(shape, dtype=TORCH_DTYPE[workload.dtype], device=where, requires_grad=backward)
            for shape in input_shapes(workload, spec.takes, rows)
        ]
        q, k, v = made if len(made) == 3 else made * 3
        dout = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=where) if backward else None
        inputs = storages.live - built
        leaves = [*made, *parameters]
        saved = 0
        for _ in range(2):
            storages.restart()
            before = storages.live
            with torch.set_grad_enabled(backward):
                saved = _call(function, (q, k, v), leaves, dout, storages)
            gc.collect()
            if storages.live == before:
                break
        tables = max(0, before - inputs - parameter_bytes)
        peak = storages.peak
    held = inputs + parameter_bytes + tables
    saved = min(saved, peak - held)
    return MemoryPlan(
        inputs_bytes=inputs,
        parameters_bytes=parameter_bytes,
        saved_bytes=saved,
        workspace_bytes=peak - held - saved,
        tables_bytes=tables,
    )


def _call(
    function: AttentionFn,
    inputs: tuple[Tensor, Tensor, Tensor],
    leaves: list[Tensor],
    dout: Tensor | None,
    storages: Storages,
) -> int:
    """One call; what it holds between forward and backward, results included."""
    before = storages.live
    out = function(*inputs)
    if dout is None:
        return 0
    held = storages.live - before
    gradients = torch.autograd.grad(out, leaves, dout, allow_unused=True)
    del gradients
    return held


def _built(spec: CaseSpec, device: torch.device, rank: int) -> tuple[AttentionFn, int | None]:
    """The function as a worker would build it, and the rows of its rank (None: all)."""
    case, workload = spec.case, spec.case.workload
    options = case.optimizations
    world = SingleRank.of(rank, case.world_size, device) if case.world_size > 1 else None
    context = BuildContext(
        device=device,
        backend=load_backend(spec.backend) if spec.backend else None,
        world=world,
        patterns=PatternCache(options.pattern_cache_entries),
    )
    build = load_target(spec.target)
    if options.query_chunk or options.offload_inputs:
        function: Any = build_in_chunks(build, workload, context, options.query_chunk or workload.seq_len)
    else:
        function = build(workload, context)
    rows = None if world is None else function.shards.rows[rank]
    return (checkpointed(function) if options.gradient_checkpointing else function), rows
