"""The memory plan of a case (from a trace) or the reason why there is none."""

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from queue import LifoQueue
from typing import Any, TypeVar

from dilabench.atomic_file import cache_folder, open_to_append, read_file
from dilabench.choice.ways import of_a_kernel
from dilabench.errors import first_line
from dilabench.plugins.catalogue import Catalogue
from dilabench.predict.memory.tracer import Tracer
from dilabench.record import Case, MemoryPlan
from dilabench.validation import content_hash

CaseT = TypeVar("CaseT")
AnswerT = TypeVar("AnswerT")
PACKAGE = Path(__file__).parents[2]
# Sources that determine how much an implementation allocates.
SOURCES = ("backends", "distributed", "engine/call", "engine/trace", "impls", "kernels", "patterns", "workload")


logger = logging.getLogger(__name__)


class TraceCache:
    """Answers of traces by key: in the process and, for dilabench's own implementations, in the cache folder.

    A file that cannot be written is no error: the case is traced again. A damaged one is removed, and logged.
    """

    def __init__(self) -> None:
        self._answers: dict[str, dict[str, Any]] | None = None

    def get(self, key: str) -> dict[str, Any] | None:
        """The answer, if there is one."""
        if self._answers is None:
            self._answers = _read(_file())
        return self._answers.get(key)

    def put(self, key: str, answer: dict[str, Any], lasting: bool) -> None:
        """Store an answer; a `lasting` one also for later processes, unless it says that there is no plan."""
        assert self._answers is not None
        self._answers[key] = answer
        if not lasting or "why" in answer:
            return
        with contextlib.suppress(OSError):
            path = _file()
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                for old in path.parent.glob("*.jsonl"):
                    old.unlink()
            with open_to_append(path) as file:
                file.write((json.dumps([key, answer]) + "\n").encode())


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        *lines, torn = read_file(path).decode().split("\n")
        # Another process may be writing the last line.
        return dict(map(_key_and_answer, lines or filter(None, [torn])))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        logger.warning("%s cannot be read (%s) and is rebuilt", path, first_line(error))
        with contextlib.suppress(OSError):
            path.unlink()
        return {}


def _key_and_answer(line: str) -> tuple[str, dict[str, Any]]:
    """Raises ValueError, TypeError or RecursionError for a line that `TraceCache.put` did not write."""
    key, answer = json.loads(line)
    if not isinstance(key, str):
        raise TypeError(f"{key!r:.40} is no key")
    MemoryPlan.model_validate(answer)
    return key, answer


def _file() -> Path:
    return cache_folder() / "memory" / f"{_sources_hash()}.jsonl"


@cache
def _sources_hash() -> str:
    """Sixteen hex digits over torch's version and the sources that a trace runs."""
    digest = hashlib.sha256(importlib.metadata.version("torch").encode())
    for folder in SOURCES:
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


OURS = "dilabench."
# A trace of a plug-in may wait for anything. After one that took longer, no other length of it is tried. Traces of
# dilabench's own code wait only for the processor.
PLUGIN_TIMEOUT_S, OUR_TIMEOUT_S = 60.0, 300.0
# Largest deviation of a traced peak from the measured one.
WITHIN = 0.1


# The last one used comes first, so that consecutive plans share one process.
_ALL = tuple(Tracer() for _ in range(min(4, os.cpu_count() or 1)))
_tracers: LifoQueue[Tracer] = LifoQueue()
for _tracer in _ALL:
    _tracers.put(_tracer)
_hung: dict[str, dict[str, Any]] = {}
_cache = TraceCache()


def plan_memory(case: Case, device: str, catalogue: Catalogue) -> MemoryPlan | None:
    """Return the memory plan of a case on a kind of device ('cpu' or 'cuda'), or None if it has no trace.

    The device need not exist here. Over ranks it is the plan of the rank that needs most. NCCL's buffers and the CUDA
    context are not included. Compiled code counts like its eager source.
    """
    answer = _answer(case, device, catalogue)
    return None if "why" in answer else MemoryPlan.model_validate(answer)


def plan_ahead(cases: Iterable[Case], device: str, catalogue: Catalogue) -> None:
    """Trace several cases at the same time, so that later calls of `plan_memory` return immediately."""
    each_traced(lambda case: plan_memory(case, device, catalogue), cases)


def each_traced(ask: Callable[[CaseT], AnswerT], cases: Iterable[CaseT]) -> list[AnswerT]:
    """The answers of a function that traces, for each case, several at a time. Ctrl-C ends all traces."""
    pool = ThreadPoolExecutor(len(_ALL))
    answers = [pool.submit(ask, case) for case in cases]
    try:
        return [answer.result() for answer in answers]
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        # A thread that is about to start its process does so after the first kill.
        while not all(answer.done() for answer in answers):
            for tracer in _ALL:
                tracer.end()
            time.sleep(0.02)
        for tracer in _ALL:
            tracer.stop()
        raise
    finally:
        pool.shutdown()


def why_no_plan(case: Case, device: str, catalogue: Catalogue) -> str:
    """Return why there is no plan; empty if there is one."""
    return str(_answer(case, device, catalogue).get("why", ""))


def _answer(case: Case, device: str, catalogue: Catalogue) -> dict[str, Any]:
    order, why = _order(case, device, catalogue)
    if why:
        return {"why": why}
    # Kernels on a CPU have buffers per thread.
    key = content_hash([order, device, os.environ.get("OMP_NUM_THREADS")])
    answer = _cache.get(key)
    if answer is None:
        about, ours = (
            f"the memory of {case.implementation} at {case.workload.label()} on {device}",
            _is_ours(case, order),
        )
        tracer = _tracers.get()
        try:
            if order["target"] in _hung:
                return _hung[order["target"]]
            answer = tracer.ask({"spec": order, "device": device}, about, OUR_TIMEOUT_S if ours else PLUGIN_TIMEOUT_S)
        finally:
            _tracers.put(tracer)
        if answer.pop("hung", False) and not ours:
            _hung[order["target"]] = answer
        _cache.put(key, answer, lasting=ours)
    return answer


def _order(case: Case, device: str, catalogue: Catalogue) -> tuple[dict[str, Any], str]:
    """Return the request to the tracing process (`engine.worker.protocol.CaseSpec`), or why there cannot be one."""
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
        if reasons := catalogue.unsupported(descriptor, of_a_kernel(workload), device):
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
    """Return True if a trace runs only dilabench's code; its answer then holds until that code changes."""
    targets = [order["target"], type(case.workload.pattern).__module__]
    if order["backend"] is not None:
        targets.append(order["backend"]["target"])
    return all(target.startswith(OURS) for target in targets)
