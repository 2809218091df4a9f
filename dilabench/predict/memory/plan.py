"""The plan of a case: what a trace of it found, or why there is none."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from queue import LifoQueue
from typing import Any

from dilabench.plugins.catalogue import Catalogue
from dilabench.predict.memory.trace_cache import TraceCache
from dilabench.predict.memory.tracer import Tracer
from dilabench.record import Case, MemoryPlan
from dilabench.validation import content_hash

OURS = "dilabench."
# How far a traced peak may lie from the measured one.
WITHIN = 0.1


# The last one that was used comes first: who asks for one plan after another starts one process.
_tracers: LifoQueue[Tracer] = LifoQueue()
for _ in range(min(4, os.cpu_count() or 1)):
    _tracers.put(Tracer())
_cache = TraceCache()


def plan_memory(case: Case, device: str, catalogue: Catalogue) -> MemoryPlan | None:
    """The memory of a case on a kind of device ('cpu' or 'cuda', which need not be there); None where it has no trace.

    Over ranks it is that of the rank that needs most; communicators (NCCL's buffers) and the CUDA context are left out.
    Compiled code counts as what it was compiled from.
    """
    answer = _answer(case, device, catalogue)
    return None if "why" in answer else MemoryPlan.model_validate(answer)


def plan_ahead(cases: Iterable[Case], device: str, catalogue: Catalogue) -> None:
    """Trace several cases at the same time, so that their plans are there when they are asked for."""
    with ThreadPoolExecutor(_tracers.qsize()) as pool:
        for _ in pool.map(lambda case: plan_memory(case, device, catalogue), cases):
            pass


def why_no_plan(case: Case, device: str, catalogue: Catalogue) -> str:
    """Why there is no plan; empty where there is one."""
    return str(_answer(case, device, catalogue).get("why", ""))


def _answer(case: Case, device: str, catalogue: Catalogue) -> dict[str, Any]:
    order, why = _order(case, device, catalogue)
    if why:
        return {"why": why}
    # Kernels on a CPU have buffers per thread.
    key = content_hash([order, device, os.environ.get("OMP_NUM_THREADS")])
    answer = _cache.get(key)
    if answer is None:
        about = f"the memory of {case.implementation} at {case.workload.label()} on {device}"
        tracer = _tracers.get()
        try:
            answer = tracer.ask({"spec": order, "device": device}, about)
        finally:
            _tracers.put(tracer)
        _cache.put(key, answer, lasting=_is_ours(case, order))
    return answer


def _order(case: Case, device: str, catalogue: Catalogue) -> tuple[dict[str, Any], str]:
    """What the tracing process needs (`engine.worker.protocol.CaseSpec`), or why there is no sense in asking it."""
    if case.implementation not in catalogue.implementations:
        return {}, f"no implementation {case.implementation!r}"
    implementation, workload = catalogue.implementations.get(case.implementation), case.workload
    backend = None
    if case.backend is not None:
        if case.backend not in catalogue.backends:
            return {}, f"no backend {case.backend!r}"
        descriptor = catalogue.backends.get(case.backend)
        targets = ("target", "backward_target", "packed_target", "merging_target")
        named = ("name", *targets, "aligns_ends", "places_results")
        backend = {name: getattr(descriptor, name) for name in named}
        dense = case.workload.as_dense().model_copy(update={"layout": "padded", "cu_seqlens": None})
        if reasons := catalogue.unsupported(descriptor, dense, device):
            return {}, reasons[0]
    elif implementation.uses_backend:
        return {}, "no backend is named"
    if reasons := catalogue.unsupported(implementation, workload, device, case.world_size):
        return {}, reasons[0]
    changes = {"compile": False, "cuda_graph": False}
    plain = case.model_copy(update={"optimizations": case.optimizations.model_copy(update=changes)})
    spec = {"case": plain.model_dump(mode="json"), "target": implementation.target, "takes": implementation.takes}
    return {**spec, "backend": backend}, ""


def _is_ours(case: Case, order: dict[str, Any]) -> bool:
    """Whether everything that a trace runs is ours: what it found then holds for as long as our sources do."""
    targets = [order["target"], type(case.workload.pattern).__module__]
    if order["backend"] is not None:
        targets.append(order["backend"]["target"])
    return all(target.startswith(OURS) for target in targets)
