"""Worker processes as the runner sees them: send a command, wait for its answer, say why one died. No torch."""

import contextlib
import json
import re
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from dilabench.engine.worker.main import serve
from dilabench.engine.worker.process import Child, worker_context
from dilabench.engine.worker.protocol import Command, CommandName, Hello, RankState, Reply, TroubleCode, WorkerSettings
from dilabench.errors import said

START_TIMEOUT_S = 180.0


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


class Worker:
    """One process that prepares cases and answers commands about them, one at a time."""

    def __init__(self, key: str, settings: WorkerSettings) -> None:
        self.key = key
        # One thread asks and another may end the whole group; the file descriptor must be closed only once.
        self._ending = threading.Lock()
        self._connection, theirs = worker_context().Pipe()
        self._child = Child(serve, theirs, settings.model_dump_json())
        try:
            self._start()
            theirs.close()
            hello = self._receive("start", START_TIMEOUT_S).hello
        except BaseException:
            self.kill()
            raise
        assert hello is not None
        self.hello: Hello = hello

    @property
    def alive(self) -> bool:
        """Whether the process exists and its pipe is open."""
        return not self._connection.closed and self._child.alive

    def ask(self, name: CommandName, handle: str = "", *, timeout_s: float, **arguments: Any) -> Reply:
        """Send a command and wait for its answer.

        Raises WorkerFailure when the command raised, the process died, or no answer came in `timeout_s` seconds.
        """
        command = Command(name=name, handle=handle, timeout_s=timeout_s, arguments=arguments)
        try:
            self._connection.send_bytes(command.model_dump_json().encode())
        except (OSError, ValueError):
            raise self._death(name) from None
        reply = self._receive(name, timeout_s)
        if reply.trouble is not None:
            trouble = reply.trouble
            traceback = _joined(trouble.traceback, self._child.output)
            if trouble.fatal:
                self.kill()
            raise WorkerFailure(trouble.code, trouble.why, died=trouble.fatal, traceback=traceback, state=reply.state)
        return reply

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

    def _receive(self, doing: str, timeout_s: float) -> Reply:
        connection = self._connection
        ready = wait([connection, self._child.sentinel], timeout=max(0.0, timeout_s))
        if not ready:
            output = self._child.output
            self.kill()
            why = f"no answer to {doing!r} within {timeout_s:.3g} s (a hang, or far too slow); the worker was ended"
            raise WorkerFailure("timeout", why, died=True, traceback=_joined(None, output))
        try:
            # A dead process may have answered before it died.
            if connection not in ready and not connection.poll():
                raise EOFError
            return Reply.model_validate(json.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            raise self._death(doing) from None

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
        if self._over:
            raise WorkerFailure("crash", "the command was ended", died=True)
        return worker

    @contextlib.contextmanager
    def fresh(self, key: str) -> Any:
        """A new worker; it is ended when the block is left."""
        worker = self._start(key, self.settings)
        try:
            yield worker
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
