"""Which rank failed first. When one rank fails, the others fail because of it; the user must read the first reason."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from dilabench.errors import DilabenchError, ExitCode

# What torch.distributed says on the ranks that did nothing wrong.
CONSEQUENCES = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection was likely closed",
    "timed out",
    "timeout",
    "wait timeout",
    "socket closed",
    "socket error",
    "failed to recv",
    "failed to pass monitoredbarrier",
    "nccl communicator was aborted",
    "remote process exited",
    "did not complete",
)


def tells_of_another(why: str) -> bool:
    """Whether an exception's text is what torch.distributed says on a rank that only waits for another one.

    Asked where the exception is caught and nowhere later: its types are those of any other fault.
    """
    return any(phrase in why.lower() for phrase in CONSEQUENCES)


class RanksDisagreeError(DilabenchError):
    """Ranks were given different work; told on every rank."""

    exit_code = ExitCode.CASE_FAILED


class RankFailedError(DilabenchError):
    """A rank failed, died or was too slow; `rank` is the one that failed first."""

    exit_code = ExitCode.CASE_FAILED

    def __init__(self, rank: int, why: str, exit_code: ExitCode = ExitCode.CASE_FAILED) -> None:
        super().__init__(f"rank {rank}: {why}")
        self.rank = rank
        self.why = why
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Failure:
    """One rank's failure. `at_ns`: when, by the clock of its machine.

    `is_consequence`: it only tells that some other rank is gone or slow.
    """

    rank: int
    why: str
    traceback: str
    at_ns: int
    exit_code: int = int(ExitCode.CASE_FAILED)
    is_consequence: bool = False

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """The failure that an exception is."""
        lines = str(error).strip().splitlines() or [""]
        name = type(error).__name__
        why = lines[0] if isinstance(error, DilabenchError) else f"{name}: {lines[0]}" if lines[0] else name
        code = error.exit_code if isinstance(error, DilabenchError) else ExitCode.CASE_FAILED
        text = "".join(traceback.format_exception(error))
        return cls(rank, why, text, time.time_ns(), int(code), tells_of_another(why))


class FailureStore(Protocol):
    """Where ranks report their failures: any key-value store of torch.distributed."""

    def set(self, key: str, value: str) -> object: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


def report_failure(store: FailureStore, failure: Failure) -> None:
    """Write a failure into the store for the other ranks."""
    store.set(f"failure/{failure.rank}", json.dumps(asdict(failure)))


def reported_failures(store: FailureStore, size: int) -> list[Failure]:
    """The failures that ranks have reported so far."""
    keys = [f"failure/{rank}" for rank in range(size)]
    return [Failure(**json.loads(store.get(key))) for key in keys if store.check([key])]


def first_cause(failures: Sequence[Failure], died: Mapping[int, str] | None = None) -> RankFailedError:
    """The failure that the others follow from.

    A rank that reported a failure comes before one that died without a report (`died`: how, by rank), and both come
    before ranks that only missed a peer. Raises ValueError when there is no failure at all.
    """
    causes = sorted((one for one in failures if not one.is_consequence), key=lambda one: one.at_ns)
    if causes:
        return RankFailedError(causes[0].rank, causes[0].why, ExitCode(causes[0].exit_code))
    silent = {rank: how for rank, how in (died or {}).items() if rank not in {one.rank for one in failures}}
    if silent:
        rank = min(silent)
        return RankFailedError(rank, silent[rank])
    missed = min(failures, key=lambda one: one.at_ns, default=None)
    if missed is None:
        raise ValueError("no rank has failed")
    return RankFailedError(missed.rank, missed.why, ExitCode(missed.exit_code))
