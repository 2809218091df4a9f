"""Checks of cases in worker processes without timing: correctness and memory.

GPUs may check several cases at the same time, because most of a check is compiling and launching on the host.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal

from dilabench.machine import Machine
from dilabench.plugins.catalogue import Catalogue
from dilabench.record import Case, CheckName, Failed, Memory, PlannedCase, Skipped, Verification
from dilabench.units import counted

if TYPE_CHECKING:
    from dilabench.engine.call.specs import CaseSpec
    from dilabench.engine.worker.client import WorkerPool
    from dilabench.engine.worker.protocol import Command, ReplyT

PREPARE_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 1800.0
# Processes that check on one GPU at the same time.
MAX_PER_GPU = 8
CAUSE = CheckName.DEPENDENCY
# Threads with which a worker compiles and launches, about.
CORES_PER_WORKER = 4

Outcome = Verification | Skipped | Failed
"""The result of the checks, or why they could not be made."""
Result = Literal["right", "wrong", "failed", "skipped"]


def num_workers_for(planned: Sequence[PlannedCase], machine: Machine, cores: int) -> int:
    """Workers that check at the same time, a group of ranks counted as one: on a CPU one, which fills its cores."""
    if machine.device != "cuda":
        return 1
    ranks = max((plan.case.world_size for plan in planned if plan.skip is None), default=1)
    gpus = ranks if ranks > 1 else len(_like_the_first(machine))
    return max(1, min(MAX_PER_GPU * gpus, cores // CORES_PER_WORKER) // ranks)


def _like_the_first(machine: Machine) -> list[int]:
    """The GPUs, by position, on which a case has the same kernels as on the first; 0 without a GPU."""
    gpus = machine.used_gpus
    return [index for index, gpu in enumerate(gpus) if gpu.name == gpus[0].name] or [0]


def outcomes_of(planned: Sequence[PlannedCase], catalogue: Catalogue, machine: Machine, seed: int) -> Iterator[Outcome]:
    """An outcome per case, as soon as it and those before it are known."""
    from dilabench.engine.worker.client import WorkerPool
    from dilabench.engine.worker.process import end_server
    from dilabench.engine.worker.protocol import WorkerSettings

    num_workers = num_workers_for(planned, machine, os.cpu_count() or 1)
    gpus = islice(cycle(_like_the_first(machine)), num_workers)
    # A group's ranks use a GPU each, whichever is named here.
    settings = [WorkerSettings(device=machine.device, gpu=gpu, num_workers=num_workers) for gpu in gpus]
    pools = [WorkerPool(own) for own in settings]
    free: SimpleQueue[WorkerPool] = SimpleQueue()
    for pool in pools:
        free.put(pool)

    def checked(plan: PlannedCase) -> Outcome:
        pool = free.get()
        try:
            return plan.skip or _checked(plan, pool, catalogue, machine, seed)
        finally:
            free.put(pool)

    executor = ThreadPoolExecutor(num_workers, thread_name_prefix="dilabench verify")
    complete = False
    try:
        yield from executor.map(checked, planned)
        complete = True
    finally:
        with ThreadPoolExecutor(num_workers) as threads:
            # Ending the workers ends the checks that are still running.
            list(threads.map(WorkerPool.end, pools))
        if not complete:
            # A thread may be waiting for a worker that the server has not made yet.
            end_server()
        executor.shutdown(cancel_futures=True)


def _checked(plan: PlannedCase, pool: WorkerPool, catalogue: Catalogue, machine: Machine, seed: int) -> Outcome:
    from dilabench.engine.case_spec import case_spec
    from dilabench.engine.worker.protocol import Verify

    reply = ask_about(case_spec(plan.case, catalogue, seed, machine), pool, catalogue, "verify", Verify())
    return reply if isinstance(reply, Skipped | Failed) else reply.verification


def ask_about(
    spec: CaseSpec, pool: WorkerPool, catalogue: Catalogue, stage: Literal["verify", "memory"], command: Command[ReplyT]
) -> ReplyT | Skipped | Failed:
    """Have a worker prepare a case, answer one command about it, and forget it; or why there is no answer."""
    from dilabench.engine.case_executor import unverified_in_time
    from dilabench.engine.case_spec import worker_key
    from dilabench.engine.worker.client import WorkerFailure
    from dilabench.engine.worker.protocol import Prepare, Release

    try:
        worker = pool.resident(worker_key(spec.case, catalogue))
        worker.ask(Prepare(spec=spec), spec.handle, timeout_s=PREPARE_TIMEOUT_S)
        reply = worker.ask(command, spec.handle, timeout_s=ANSWER_TIMEOUT_S)
        worker.ask(Release(), spec.handle, timeout_s=PREPARE_TIMEOUT_S)
    except WorkerFailure as failure:
        if failure.code == "unusable_optimization":
            return Skipped(code=failure.code, why=failure.why)
        if failure.code == "timeout" and stage == "verify":
            return unverified_in_time(failure.why, failure.traceback)
        return Failed(stage=stage, code=failure.code, why=failure.why, traceback=failure.traceback)
    return reply


def measured_memory(case: Case, catalogue: Catalogue, machine: Machine, seed: int) -> Memory | Skipped | Failed:
    """The peak memory of one call, from a separate worker; or why it was not measured."""
    from dilabench.engine.worker.client import WorkerPool
    from dilabench.engine.worker.protocol import WorkerSettings

    pool = WorkerPool(WorkerSettings(device=machine.device))
    try:
        return memory_in(pool, case, catalogue, seed)
    finally:
        pool.close()


def memory_in(pool: WorkerPool, case: Case, catalogue: Catalogue, seed: int) -> Memory | Skipped | Failed:
    """The peak memory of one call in a worker of the pool; or why it was not measured."""
    from dilabench.engine.case_spec import case_spec
    from dilabench.engine.worker.protocol import MeasureMemory

    reply = ask_about(case_spec(case, catalogue, seed), pool, catalogue, "memory", MeasureMemory())
    if isinstance(reply, Skipped | Failed):
        return reply
    assert reply.memory is not None
    return reply.memory


def said_of(outcome: Outcome) -> tuple[Result, str]:
    """The result of a case and its text: for a wrong one, the likely mistake, then a line for each failed check."""
    if not isinstance(outcome, Verification):
        return outcome.status, outcome.why
    if outcome.passed:
        rows = "all rows" if outcome.sampled_rows is None else f"{outcome.sampled_rows} sampled rows"
        against = f", all rows against {outcome.against}" if outcome.against else ""
        return "right", f"{counted(len(outcome.checks), 'check')}, {rows}{against}"
    # Which key a row misses is the cause of what other checks see.
    failed = sorted((check for check in outcome.checks if not check.passed), key=lambda check: check.name != CAUSE)
    lines = [check.text for check in failed] or ["nothing was checked"]
    return "wrong", "\n".join([outcome.diagnosis, *lines] if outcome.diagnosis else lines)


def mistake_of(outcome: Outcome) -> tuple[str, str]:
    """A short and a long text on a wrong case: the likely mistake, or the check that failed first; the long one with
    place and values. For an unchecked case, the reason.
    """
    if not isinstance(outcome, Verification):
        return outcome.why, outcome.why
    failed = [check for check in outcome.checks if not check.passed]
    first = failed[0].text if failed else "nothing was checked"
    name = outcome.diagnosis or (f"check {failed[0].name} fails" if failed else first)
    return name, "; ".join(filter(None, (outcome.diagnosis, first)))
