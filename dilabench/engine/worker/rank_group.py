"""P worker processes that compute one case together, with the interface of a single worker. No torch.

Every command goes to all ranks, whose answers become one: times and memory are the largest over ranks, verification is
the first that failed, other fields are rank 0's. If a rank fails or dies, the others wait for it in a collective. They
get a moment to report their own failures, then they are killed, and the first reason is reported.
"""

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from dilabench.engine.worker.client import Worker, WorkerFailure
from dilabench.engine.worker.launcher import Launcher, ThisMachine
from dilabench.engine.worker.protocol import CommandName, IsolatedResult, Prepared, RankState, Reply, WorkerSettings
from dilabench.record import Diagnostic, Note, Slot

GRACE_S = 5.0


def start_worker(key: str, settings: WorkerSettings, launcher: Launcher | None = None) -> Worker:
    """The worker of a key: one process here, or a group of N where the key ends in '@N', at a launcher (or here)."""
    _, _, ranks = key.partition("@")
    return GroupWorker(key, settings, int(ranks), launcher or ThisMachine()) if ranks else Worker(key, settings)


class GroupWorker(Worker):
    """`Worker` over several ranks."""

    def __init__(self, key: str, settings: WorkerSettings, size: int, launcher: Launcher) -> None:
        self.key = key
        self._launcher = launcher
        self._store = launcher.open_store()
        self._ranks: list[Worker] = []
        own = [
            settings.model_copy(update={"rank": rank, "world_size": size, "store": self._store}) for rank in range(size)
        ]
        with ThreadPoolExecutor(size) as threads:
            started = [
                threads.submit(launcher.start, f"{key}#{rank}", rank_settings) for rank, rank_settings in enumerate(own)
            ]
        self._ranks = [start.result() for start in started if start.exception() is None]
        for rank, start in enumerate(started):
            if (error := start.exception()) is not None:
                self.kill()
                if isinstance(error, WorkerFailure):
                    raise WorkerFailure(error.code, f"rank {rank}: {error.why}", died=True, traceback=error.traceback)
                raise error
        self.hello = self._ranks[0].hello

    @property
    def alive(self) -> bool:
        """Whether every rank is alive."""
        return bool(self._ranks) and all(worker.alive for worker in self._ranks)

    def ask(self, name: CommandName, handle: str = "", *, timeout_s: float, **arguments: Any) -> Reply:
        """Send a command to all ranks and merge their answers. Raises WorkerFailure with the first reason."""
        with ThreadPoolExecutor(len(self._ranks)) as threads:
            answers = [
                threads.submit(worker.ask, name, handle, timeout_s=timeout_s, **_arguments_of(rank, arguments))
                for rank, worker in enumerate(self._ranks)
            ]
            failures = self._wait(answers)
        states = [_state_of(answer) for answer in answers]
        if why := out_of_step(states):
            # From here on a rank could mistake a message of one call for a message of another.
            self._end()
        if failures:
            cause = _first_cause(failures, everyone=len(self._ranks) == len(failures))
            cause.died |= bool(why)
            raise cause
        if why:
            raise WorkerFailure("out_of_step", f"{why}; the ranks were ended", died=True)
        return _merged([answer.result() for answer in answers])

    def kill(self) -> None:
        """Kill all ranks and all that they started."""
        self._end()
        self._launcher.close_store(self._store)

    def _end(self) -> None:
        """End all ranks at the same time: one that outlives another sees its memory and its messages vanish."""
        with ThreadPoolExecutor(len(self._ranks) or 1) as threads:
            list(threads.map(lambda worker: worker.kill(), self._ranks))

    def _wait(self, answers: Sequence[Future[Reply]]) -> dict[int, tuple[float, WorkerFailure]]:
        """Wait until all ranks have answered, or a while after the first failure; (time, failure) by rank."""
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
                # These ranks wait for the failed one and would never end.
                self._end()
                wait(waiting)
                return failures
        if any(failure.died for _, failure in failures.values()) or 0 < len(failures) < len(answers):
            self._end()
        return failures


def out_of_step(states: Sequence[RankState | None]) -> str:
    """The disagreement of ranks on draws and calls, or on the messages of a pair; empty if none.

    Ranks that have not met have no state, and so have those that died.
    """
    known = {rank: state for rank, state in enumerate(states) if state is not None}
    if len({state.shared for state in known.values()}) > 1:
        return "ranks have made other calls or drawn other numbers than each other"
    for sender, its in known.items():
        for receiver, theirs in known.items():
            if sender == receiver or not its.sent or not theirs.received:
                continue
            sent, received = its.sent[receiver], theirs.received[sender]
            if sent != received:
                return (
                    f"rank {sender} has sent {sent[0]} messages of {sent[1]} bytes to rank {receiver}, which has "
                    f"received {received[0]} of {received[1]} bytes"
                )
    return ""


def _state_of(answer: Future[Reply]) -> RankState | None:
    error = answer.exception()
    if error is None:
        return answer.result().state
    return error.state if isinstance(error, WorkerFailure) else None


def _arguments_of(rank: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Only rank 0 writes a trace."""
    return arguments if rank == 0 else {name: value for name, value in arguments.items() if name != "trace"}


def _first_cause(failures: dict[int, tuple[float, WorkerFailure]], everyone: bool) -> WorkerFailure:
    """The failure that caused the others, with its rank; without a rank when every rank reports the same."""

    def order(item: tuple[int, tuple[float, WorkerFailure]]) -> tuple[bool, bool, float]:
        at, failure = item[1]
        return failure.code == "peer_lost", failure.code == "timeout", at

    rank, (_, cause) = min(failures.items(), key=order)
    same = everyone and len({failure.why for _, failure in failures.values()}) == 1
    why = cause.why if same else f"rank {rank}: {cause.why}"
    return WorkerFailure(cause.code, why, died=not same or cause.died, traceback=cause.traceback)


def _merged(replies: Sequence[Reply]) -> Reply:
    """All ranks' replies as one: times and memory the largest, verification the first that failed."""
    first = replies[0]
    changes: dict[str, Any] = {"notes": _merged_notes([reply.notes for reply in replies])}
    if first.prepared is not None:
        changes["prepared"] = _slowest([reply.prepared for reply in replies if reply.prepared is not None])
    if first.warmed_up is not None:
        warmed = [reply.warmed_up for reply in replies if reply.warmed_up is not None]
        unusable = [rank_warmed for rank_warmed in warmed if rank_warmed.unusable]
        notes = _merged_notes([rank_warmed.notes for rank_warmed in warmed])
        # A timer that one rank cannot use is used by none.
        changes["warmed_up"] = unusable[0] if unusable else first.warmed_up.model_copy(update={"notes": notes})
    if first.slot is not None:
        slots = [reply.slot for reply in replies if reply.slot is not None]
        changes["slot"] = _slowest_samples(slots)
        changes["counters"] = _largest([reply.counters for reply in replies])
    if first.diagnostics:
        parts = zip(*(reply.diagnostics for reply in replies), strict=True)
        changes["diagnostics"] = tuple(_slowest_diagnostic(part) for part in parts)
    if first.memory is not None:
        changes["memory"] = max(
            (reply.memory for reply in replies if reply.memory is not None), key=lambda memory: memory.peak_bytes
        )
    if first.isolated is not None:
        changes["isolated"] = _merged_isolated([reply.isolated for reply in replies if reply.isolated is not None])
    if first.verification is not None:
        wrong = next((reply for reply in replies if reply.verification and not reply.verification.passed), first)
        rank = replies.index(wrong)
        changes["verification"] = wrong.verification
        changes["why"] = f"rank {rank}: {wrong.why}" if wrong is not first else first.why
    return first.model_copy(update=changes)


def _merged_notes(ranks: Sequence[tuple[Note, ...]]) -> tuple[Note, ...]:
    """One note of each code: the one that observed most, with its rank unless all ranks say the same."""
    by_code: dict[str, dict[int, Note]] = {}
    for rank, notes in enumerate(ranks):
        for note in notes:
            by_code.setdefault(note.code, {}).setdefault(rank, note)
    merged = []
    for noted in by_code.values():
        rank, note = max(noted.items(), key=lambda item: (item[1].observed or 0.0, -item[0]))
        same = len(noted) == len(ranks) and len({rank_note.message for rank_note in noted.values()}) == 1
        merged.append(note if same else note.model_copy(update={"message": f"rank {rank}: {note.message}"}))
    return tuple(merged)


def _merged_isolated(results: Sequence[IsolatedResult]) -> IsolatedResult:
    """An isolated case: times, peak bytes and counters the largest over ranks, verification the first that failed."""
    first = results[0]
    changes: dict[str, Any] = {
        "setup_ns": _largest([result.setup_ns for result in results]),
        "counters": _largest([result.counters for result in results]),
    }
    if slots := [result.slot for result in results if result.slot is not None]:
        changes["slot"] = _slowest_samples(slots)
    if measured := [result.memory for result in results if result.memory is not None]:
        changes["memory"] = max(measured, key=lambda memory: memory.peak_bytes)
    failed = [result for result in results if result.verification is not None and not result.verification.passed]
    if failed:
        changes |= {"verification": failed[0].verification, "why": f"rank {results.index(failed[0])}: {failed[0].why}"}
    return first.model_copy(update=changes)


def _slowest(prepared: Sequence[Prepared]) -> Prepared:
    return Prepared(
        setup_ns=_largest([rank_prepared.setup_ns for rank_prepared in prepared]),
        call_ns=max(rank_prepared.call_ns for rank_prepared in prepared),
    )


def _slowest_samples(slots: Sequence[Slot]) -> Slot:
    throttle = tuple(dict.fromkeys(reason for slot in slots for reason in slot.throttle))
    times = _times([slot.samples_ns for slot in slots])
    enqueue = _longest([slot.enqueue_ns for slot in slots])
    return slots[0].model_copy(update={**times, "enqueue_ns": enqueue, "throttle": throttle})


def _slowest_diagnostic(ranks: Sequence[Diagnostic]) -> Diagnostic:
    return ranks[0].model_copy(update=_times([diagnostic.samples_ns for diagnostic in ranks]))


def _times(ranks: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """Sample by sample the slowest rank, because ranks start each one together; and the samples of each rank."""
    return {"samples_ns": _longest(ranks), "rank_samples_ns": tuple(ranks)}


def _longest(ranks: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(max(column) for column in zip(*ranks, strict=True))


def _largest(several: Sequence[dict[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(name for counts in several for name in counts)
    return {name: max(counts.get(name, 0) for counts in several) for name in names}
