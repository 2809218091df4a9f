"""P worker processes that compute one case together, in the shape of one worker. No torch.

Every command goes to all ranks at once, and what they answer becomes one answer: times and memory are the largest over
ranks, verification is the first that failed, everything else is rank 0's. When a rank fails or dies, the others are
waiting for it in a collective; they are given a moment to say what they know, then ended, and the first reason is told.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from statistics import median
from typing import Any

from dilabench.bench.commands import CommandName, Prepared, Reply, WorkerSettings
from dilabench.bench.workers import Worker, WorkerFailure
from dilabench.distributed.failures import tells_of_another
from dilabench.results import Slot

GRACE_S = 5.0


def start_worker(key: str, settings: WorkerSettings) -> Worker:
    """The worker of a key: one process, or a group of N where the key ends in '@N'."""
    _, _, ranks = key.partition("@")
    return GroupWorker(key, settings, int(ranks)) if ranks else Worker(key, settings)


class GroupWorker(Worker):
    """`Worker` over several ranks."""

    def __init__(self, key: str, settings: WorkerSettings, size: int) -> None:
        self.key = key
        self.handles: set[str] = set()
        self._folder = tempfile.TemporaryDirectory(prefix="dilabench-ranks-")
        # gloo would otherwise look the host's name up, which not every machine can.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = str(Path(self._folder.name, "store"))
        self._ranks: list[Worker] = []
        try:
            for rank in range(size):
                own = settings.model_copy(update={"rank": rank, "world_size": size, "store": store})
                self._ranks.append(Worker(f"{key}#{rank}", own))
        except BaseException:
            self.kill()
            raise
        self.hello = self._ranks[0].hello

    @property
    def alive(self) -> bool:
        """Every rank is."""
        return bool(self._ranks) and all(worker.alive for worker in self._ranks)

    def ask(self, name: CommandName, handle: str = "", *, timeout_s: float, **arguments: Any) -> Reply:
        """Send a command to all ranks and merge their answers. Raises WorkerFailure with the first reason."""
        with ThreadPoolExecutor(len(self._ranks)) as threads:
            answers = [
                threads.submit(worker.ask, name, handle, timeout_s=timeout_s, **_arguments_of(rank, arguments))
                for rank, worker in enumerate(self._ranks)
            ]
            failures = self._wait(answers)
        if failures:
            raise _first_cause(failures, everyone=len(self._ranks) == len(failures))
        return _merged([answer.result() for answer in answers])

    def close(self) -> None:
        """End all ranks: none of them could close the world alone."""
        self.kill()

    def kill(self) -> None:
        """End all ranks, at once."""
        for worker in self._ranks:
            worker.kill()
        with contextlib.suppress(OSError):
            self._folder.cleanup()

    def _wait(self, answers: Sequence[Future[Reply]]) -> dict[int, tuple[float, WorkerFailure]]:
        """Until all have answered, or a while after the first that failed; failures by rank, with their time."""
        failures: dict[int, tuple[float, WorkerFailure]] = {}
        waiting = set(answers)
        deadline: float | None = None
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            done, waiting = wait(waiting, timeout=left, return_when=FIRST_COMPLETED)
            for answer in done:
                error = answer.exception()
                if isinstance(error, WorkerFailure):
                    failures[answers.index(answer)] = (time.monotonic(), error)
                elif error is not None:
                    self.kill()
                    raise error
            if failures and deadline is None:
                deadline = time.monotonic() + GRACE_S
            if not done:
                # These wait for the one that failed; without it they never end.
                for worker in self._ranks:
                    worker.kill()
                wait(waiting)
                return failures
        if any(failure.died for _, failure in failures.values()) or 0 < len(failures) < len(answers):
            for worker in self._ranks:
                worker.kill()
        return failures


def _arguments_of(rank: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Only rank 0 writes a trace."""
    return arguments if rank == 0 else {name: value for name, value in arguments.items() if name != "trace"}


def _first_cause(failures: dict[int, tuple[float, WorkerFailure]], everyone: bool) -> WorkerFailure:
    """The failure that the others follow from, with its rank; as it is where every rank says the same."""

    def order(item: tuple[int, tuple[float, WorkerFailure]]) -> tuple[bool, bool, float]:
        at, failure = item[1]
        return tells_of_another(failure.why), failure.timed_out, at

    rank, (_, cause) = min(failures.items(), key=order)
    same = everyone and len({failure.why for _, failure in failures.values()}) == 1
    why = cause.why if same else f"rank {rank}: {cause.why}"
    return WorkerFailure(
        why,
        died=not same or cause.died,
        timed_out=cause.timed_out,
        out_of_memory=cause.out_of_memory,
        traceback=cause.traceback,
    )


def _merged(replies: Sequence[Reply]) -> Reply:
    """One answer of all ranks'."""
    first = replies[0]
    changes: dict[str, Any] = {}
    if first.prepared is not None:
        changes["prepared"] = _slowest([reply.prepared for reply in replies if reply.prepared is not None])
    if first.slot is not None:
        slots = [reply.slot for reply in replies if reply.slot is not None]
        changes["slot"] = _slowest_samples(slots)
        changes["counters"] = _largest([reply.counters for reply in replies]) | _spread(slots)
    if first.memory is not None:
        changes["memory"] = max(
            (reply.memory for reply in replies if reply.memory is not None), key=lambda memory: memory.peak_bytes
        )
    if first.verification is not None:
        wrong = next((reply for reply in replies if reply.verification and not reply.verification.passed), first)
        rank = replies.index(wrong)
        changes["verification"] = wrong.verification
        changes["why"] = f"rank {rank}: {wrong.why}" if wrong is not first else first.why
    return first.model_copy(update=changes)


def _slowest(prepared: Sequence[Prepared]) -> Prepared:
    return Prepared(setup_ns=_largest([one.setup_ns for one in prepared]), call_ns=max(one.call_ns for one in prepared))


def _slowest_samples(slots: Sequence[Slot]) -> Slot:
    """Sample by sample the slowest rank: ranks start each one together."""
    samples = tuple(max(column) for column in zip(*(slot.samples_ns for slot in slots), strict=True))
    enqueue = tuple(max(column) for column in zip(*(slot.enqueue_ns for slot in slots), strict=True))
    throttle = tuple(dict.fromkeys(reason for slot in slots for reason in slot.throttle))
    return slots[0].model_copy(update={"samples_ns": samples, "enqueue_ns": enqueue, "throttle": throttle})


def _spread(slots: Sequence[Slot]) -> dict[str, int]:
    """The fastest and the slowest rank's median in a slot."""
    medians = [int(median(slot.samples_ns)) for slot in slots]
    return {"fastest_rank_ns": min(medians), "slowest_rank_ns": max(medians)}


def _largest(several: Sequence[dict[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(name for one in several for name in one)
    return {name: max(one.get(name, 0) for one in several) for name in names}
