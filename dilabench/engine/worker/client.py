"""Worker processes as the runner sees them: send a command, wait for the answers, say why one died. No torch."""

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from typing import Any, Protocol, Self, cast

from dilabench.engine.temporary_folder import temporary_folder
from dilabench.engine.worker.main import serve
from dilabench.engine.worker.process import Child, worker_context
from dilabench.engine.worker.protocol import REPLY, Command, ReplyT, WorkerSettings
from dilabench.engine.worker.replies import Hello, RankState, Reply, Trouble, TroubleCode, out_of_step
from dilabench.errors import said

START_TIMEOUT_S = 180.0
# Other ranks may report their own failures for this long after the first one's.
GRACE_S = 5.0
# While the answer of one rank is waited for, the others are looked at so often.
LOOK_S = 0.5


class WorkerFailure(Exception):  # noqa: N818 (it is the failure that the row tells of)
    """A command did not end well. `died`: the process has ended, and every case prepared in it is lost."""

    def __init__(
        self,
        code: TroubleCode,
        why: str,
        *,
        died: bool = False,
        traceback: str | None = None,
        state: RankState | None = None,
    ) -> None:
        super().__init__(why)
        self.code: TroubleCode = code
        self.why = why
        self.died = died
        self.traceback = traceback
        self.state = state


def answered(reply: Reply) -> Reply:
    """The answer to a command. Raises WorkerFailure for a reply that tells of trouble."""
    if isinstance(reply, Trouble):
        raise WorkerFailure(reply.code, reply.why, died=reply.fatal, traceback=reply.traceback, state=reply.state)
    return reply


def no_answer(doing: str, timeout_s: float) -> str:
    """The reason of a worker that was ended because it did not answer."""
    return f"no answer to {doing!r} within {timeout_s:.3g} s (a hang, or far too slow); the worker was ended"


class WorkerProcess:
    """One process on this machine. Commands are sent to it one at a time, and each answer is taken later.

    Its first answer, `hello`, comes unasked.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        # One thread asks and another may end the whole group; the file descriptor must be closed only once.
        self._ending = threading.Lock()
        self._connection, theirs = worker_context().Pipe()
        self._child = Child(serve, theirs, settings.model_dump_json())
        try:
            self._start()
            theirs.close()
        except BaseException:
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        """Whether the process exists and its pipe is open."""
        return not self._connection.closed and self._child.alive

    def send(self, command: Command[Any]) -> None:
        """Send a command; a process that has died says so when its answer is taken."""
        with contextlib.suppress(OSError, ValueError):
            self._connection.send_bytes(command.model_dump_json().encode())

    def arrived(self, within_s: float = 0.0) -> bool:
        """Whether an answer is there, or comes within some seconds; True if none will come, because it has died."""
        try:
            return bool(wait([self._connection, self._child.sentinel], timeout=max(0.0, within_s)))
        except (OSError, ValueError):
            # Another thread has ended the process.
            return True

    def take(self, doing: str) -> Reply:
        """The answer that has arrived. Raises WorkerFailure when the command raised or the process died."""
        try:
            # A dead process may have answered before it died.
            if not self._connection.poll():
                raise EOFError
            reply = REPLY.validate_json(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise self._death(doing) from None
        try:
            return answered(reply)
        except WorkerFailure as failure:
            failure.traceback = _joined(failure.traceback, self._child.output)
            if failure.died:
                self.kill()
            raise

    def late(self, doing: str, timeout_s: float) -> WorkerFailure:
        """End a process that has not answered, and return the failure."""
        output = self._child.output
        self.kill()
        return WorkerFailure("timeout", no_answer(doing, timeout_s), died=True, traceback=_joined(None, output))

    def _start(self) -> None:
        try:
            self._child.start()
        # EOFError: the server ended when it could not fork.
        except (OSError, EOFError) as error:
            why = (
                f"no worker process could be started: {said(error)}; the machine may be short of processes or memory "
                "(see ulimit -u, or the limits of the container)"
            )
            raise WorkerFailure("crash", why, died=True) from error

    def kill(self) -> None:
        """Kill the process and all that it started."""
        with self._ending:
            self._child.kill()
            self._connection.close()

    def _death(self, doing: str) -> WorkerFailure:
        ending = self._child.ending()
        self.kill()
        traceback = _joined(None, ending.output)
        if ending.out_of_memory:
            why = f"out of memory: the system ended the worker process during {doing!r}"
            return WorkerFailure("out_of_memory", why, died=True, traceback=traceback)
        why = f"the worker process died during {doing!r}: {ending.how}"
        if raised := _RAISED.findall(ending.output):
            why += f" ({raised[-1]})"
        return WorkerFailure("crash", why, died=True, traceback=traceback)


class RankProcess(Protocol):
    """The worker process of one rank, here or at another process of torchrun (`WorkerProcess`)."""

    @property
    def alive(self) -> bool: ...
    def send(self, command: Command[Any]) -> None: ...
    def arrived(self, within_s: float = 0.0) -> bool: ...
    def take(self, doing: str) -> Reply: ...
    def late(self, doing: str, timeout_s: float) -> WorkerFailure: ...
    def kill(self) -> None: ...


class Launcher(Protocol):
    """Starts the worker process of a rank, and has a store for several ranks to meet at.

    `gpus_here`: which of the machine's GPUs (positions in `Machine.gpus`) on this host a group of that size uses.
    """

    def gpus_here(self, ranks: int) -> Sequence[int]: ...
    def open_store(self) -> str: ...
    def close_store(self, store: str) -> None: ...
    def start(self, settings: WorkerSettings) -> RankProcess: ...


class ThisMachine:
    """Every rank on this machine, rank r on its GPU r; they meet at a file."""

    def __init__(self) -> None:
        self._folders: dict[str, contextlib.ExitStack] = {}

    def gpus_here(self, ranks: int) -> Sequence[int]:
        """GPU r for rank r, in order."""
        return range(ranks)

    def open_store(self) -> str:
        """The path of a file in a new temporary folder."""
        # gloo would otherwise look the host's name up, which not every machine can.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        folder = contextlib.ExitStack()
        store = str(folder.enter_context(temporary_folder("ranks")) / "store")
        self._folders[store] = folder
        return store

    def close_store(self, store: str) -> None:
        """Remove the file and its folder."""
        if store in self._folders:
            self._folders.pop(store).close()

    def start(self, settings: WorkerSettings) -> RankProcess:
        """Start a worker process on this machine."""
        gpu = settings.rank if settings.world_size > 1 else settings.gpu
        return WorkerProcess(settings.model_copy(update={"gpu": gpu}))


class Worker:
    """The processes that prepare cases and answer commands about them, one at a time: one, or one for each of N ranks.

    `key`: ends in '@N' for N ranks. `launcher`: where they run, by default on this machine. `hello`: the first words of
    rank 0, once they have met. Raises WorkerFailure if one cannot be started.

    If a rank fails or dies, the others wait for it in a collective: they get a moment to report their own failures,
    then they are killed, and the first reason is reported.
    """

    def __init__(self, key: str, settings: WorkerSettings, launcher: Launcher | None = None) -> None:
        self.key = key
        self.hello: Hello
        size = int(key.partition("@")[2] or 1)
        self._launcher = launcher or ThisMachine()
        self._store = self._launcher.open_store() if size > 1 else ""
        self._ranks: list[RankProcess] = []
        try:
            for rank in range(size):
                own = {"rank": rank, "world_size": size, "store": self._store}
                self._ranks.append(self._launcher.start(settings.model_copy(update=own)))
        except BaseException:
            self.kill()
            raise

    def meet(self) -> Self:
        """Wait for the first words of the processes, before anything is asked.

        Raises WorkerFailure if a process does not start, or is ended meanwhile.
        """
        try:
            hello = self._answers("start", START_TIMEOUT_S)[0]
        except BaseException:
            self.kill()
            raise
        assert isinstance(hello, Hello)
        self.hello = hello
        return self

    @property
    def alive(self) -> bool:
        """Whether every process exists and can be reached."""
        return bool(self._ranks) and all(process.alive for process in self._ranks)

    def ask(self, command: Command[ReplyT], handle: str = "", *, timeout_s: float) -> ReplyT:
        """Send a command about a case to all ranks and merge their answers.

        Raises WorkerFailure when the command raised, a process died, or no answer came in `timeout_s` seconds.
        """
        command = command.model_copy(update={"handle": handle, "timeout_s": timeout_s})
        for rank, process in enumerate(self._ranks):
            process.send(command.for_rank(rank))
        # The answer to a command is of the command's kind.
        replies = cast("list[ReplyT]", self._answers(command.name, timeout_s))
        return replies[0] if len(replies) == 1 else replies[0].merged(replies)

    def kill(self) -> None:
        """Kill the processes and all that they started."""
        self._end()
        if self._store:
            self._launcher.close_store(self._store)

    def _end(self) -> None:
        """End all ranks at the same time: one that outlives another sees its memory and its messages vanish."""
        with ThreadPoolExecutor(len(self._ranks) or 1) as threads:
            list(threads.map(lambda process: process.kill(), self._ranks))

    def _answers(self, doing: str, timeout_s: float) -> list[Reply]:
        """The answers of all ranks. Raises WorkerFailure with the cause if one fails or is late."""
        replies: dict[int, Reply] = {}
        failures: dict[int, tuple[float, WorkerFailure]] = {}
        waiting = dict(enumerate(self._ranks))
        deadline = time.monotonic() + timeout_s
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            next(iter(waiting.values())).arrived(min(left_s, LOOK_S) if len(self._ranks) > 1 else left_s)
            for rank in [rank for rank, process in waiting.items() if process.arrived()]:
                try:
                    replies[rank] = waiting.pop(rank).take(doing)
                except WorkerFailure as failure:
                    if not failures:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
                    failures[rank] = time.monotonic(), failure
        if waiting and not failures:
            failures = {rank: (time.monotonic(), process.late(doing, timeout_s)) for rank, process in waiting.items()}
        states = {rank: reply.state for rank, reply in replies.items()}
        states |= {rank: failure.state for rank, (_, failure) in failures.items()}
        why = out_of_step([states.get(rank) for rank in range(len(self._ranks))])
        if why or 0 < len(failures) < len(self._ranks) or any(failure.died for _, failure in failures.values()):
            # From here on a rank could mistake a message of one call for a message of another.
            self._end()
        if failures:
            cause = _first_cause(failures, everyone=len(self._ranks) == len(failures))
            cause.died |= bool(why)
            raise cause
        if why:
            raise WorkerFailure("out_of_step", f"{why}; the ranks were ended", died=True)
        return [replies[rank] for rank in range(len(self._ranks))]


def _first_cause(failures: dict[int, tuple[float, WorkerFailure]], everyone: bool) -> WorkerFailure:
    """The failure that caused the others, with its rank; without a rank when every rank reports the same."""

    def order(item: tuple[int, tuple[float, WorkerFailure]]) -> tuple[bool, bool, float]:
        at, failure = item[1]
        return failure.code == "peer_lost", failure.code == "timeout", at

    rank, (_, cause) = min(failures.items(), key=order)
    same = everyone and len({failure.why for _, failure in failures.values()}) == 1
    why = cause.why if same else f"rank {rank}: {cause.why}"
    return WorkerFailure(cause.code, why, died=not same or cause.died, traceback=cause.traceback)


# The last line of a traceback.
_RAISED = re.compile(r"^[\w.]*(?:Error|Exception): .*$", re.MULTILINE)


def _joined(traceback: str | None, output: str) -> str | None:
    parts = [traceback, f"last output of the worker:\n{output}" if output else None]
    return "\n".join(part for part in parts if part) or None


class WorkerPool:
    """Resident workers by key. A worker that died is replaced at the next request for its key."""

    def __init__(self, settings: WorkerSettings, start: Callable[[str, WorkerSettings], Worker] | None = None) -> None:
        self.settings = settings
        self._start = start or Worker
        self._resident: dict[str, Worker] = {}
        self._over = False

    def resident(self, key: str) -> Worker:
        """The worker of a key, started if none is alive. Raises WorkerFailure once `end` was called."""
        worker = self._resident.get(key)
        if worker is None or not worker.alive:
            if worker is not None:
                worker.kill()
            worker = self._resident[key] = self._start(key, self.settings)
            if self._over:
                worker.kill()
            worker.meet()
        if self._over:
            raise WorkerFailure("crash", "the command was ended", died=True)
        return worker

    @contextlib.contextmanager
    def fresh(self, key: str) -> Any:
        """A new worker; it is ended when the block is left."""
        worker = self._start(key, self.settings)
        try:
            yield worker.meet()
        finally:
            worker.kill()

    def end(self) -> None:
        """End all workers, also one that another thread is starting, and start no new ones."""
        self._over = True
        self.close()

    def close(self) -> None:
        """End all workers; `resident` starts new ones."""
        # A list, for another thread may be starting one.
        for worker in list(self._resident.values()):
            worker.kill()
        self._resident.clear()
