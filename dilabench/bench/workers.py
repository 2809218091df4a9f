"""Worker processes as the runner sees them: ask, wait, and learn why one died. No torch.

Workers are forked from a server that has torch loaded (and CUDA untouched), so a fresh process costs milliseconds.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from dilabench.bench.commands import Command, CommandName, Hello, Reply, WorkerSettings
from dilabench.bench.worker import serve

SERVER_MODULES = ["__main__", "dilabench.bench.desk"]
START_TIMEOUT_S = 180.0
TAIL_CHARACTERS = 2000


class WorkerFailure(Exception):  # noqa: N818 (it is the failure that the row tells of)
    """A command did not end well. `died`: the process is gone, and every case that was prepared in it with it."""

    def __init__(
        self,
        why: str,
        *,
        died: bool = False,
        timed_out: bool = False,
        out_of_memory: bool = False,
        unusable: bool = False,
        traceback: str | None = None,
    ) -> None:
        super().__init__(why)
        self.why = why
        self.died = died
        self.timed_out = timed_out
        self.out_of_memory = out_of_memory
        self.unusable = unusable
        self.traceback = traceback


class Worker:
    """One process that prepares cases and answers commands about them, one at a time."""

    def __init__(self, key: str, settings: WorkerSettings) -> None:
        self.key = key
        self.handles: set[str] = set()
        descriptor, log = tempfile.mkstemp(prefix="dilabench-worker-", suffix=".log")
        os.close(descriptor)
        self._log = Path(log)
        self._oom_kills = _oom_kills()
        context = worker_context()
        self._connection, theirs = context.Pipe()
        self._process: Any = context.Process(  # type: ignore[attr-defined]
            target=serve, args=(theirs, settings.model_dump_json(), str(self._log)), daemon=False
        )
        try:
            self._process.start()
            theirs.close()
            hello = self._receive("start", START_TIMEOUT_S).hello
        except BaseException:
            self.kill()
            raise
        assert hello is not None
        self.hello: Hello = hello

    @property
    def alive(self) -> bool:
        """The process exists and its pipe is open."""
        return self._process.is_alive() and not self._connection.closed

    def ask(self, name: CommandName, handle: str = "", *, timeout_s: float, **arguments: Any) -> Reply:
        """Send a command and wait for its answer.

        Raises WorkerFailure when the command raised, the process died, or no answer came in `timeout_s` seconds.
        """
        command = Command(name=name, handle=handle, arguments=arguments)
        try:
            self._connection.send_bytes(command.model_dump_json().encode())
        except (OSError, ValueError):
            raise self._death(name) from None
        reply = self._receive(name, timeout_s)
        if reply.trouble is not None:
            trouble = reply.trouble
            if trouble.fatal:
                self.kill()
            raise WorkerFailure(
                trouble.why,
                died=trouble.fatal,
                out_of_memory=trouble.out_of_memory,
                unusable=trouble.unusable,
                traceback=self._with_tail(trouble.traceback),
            )
        return reply

    def close(self) -> None:
        """Let the process end by itself, or end it."""
        with contextlib.suppress(OSError):
            self._connection.close()
        self._process.join(timeout=2.0)
        self.kill()

    def kill(self) -> None:
        """End the process and everything it started, at once."""
        process = self._process
        if process.pid is not None:
            if process.is_alive():
                # The worker leads a process group of its own; before it has made it, it is alone.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
            process.join()
        self._connection.close()
        self._log.unlink(missing_ok=True)

    def _receive(self, doing: str, timeout_s: float) -> Reply:
        connection: Connection = self._connection
        ready = wait([connection, self._process.sentinel], timeout=max(0.0, timeout_s))
        if not ready:
            tail = self._with_tail(None)
            self.kill()
            why = f"no answer to {doing!r} within {timeout_s:.3g} s (a hang, or far too slow); the worker was ended"
            raise WorkerFailure(why, died=True, timed_out=True, traceback=tail)
        try:
            # A dead process may have answered before it died.
            if connection not in ready and not connection.poll():
                raise EOFError
            return Reply.model_validate(json.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            raise self._death(doing) from None

    def _death(self, doing: str) -> WorkerFailure:
        self._process.join(timeout=5.0)
        exit_code = self._process.exitcode
        tail = self._with_tail(None)
        self.kill()
        if _oom_kills() > self._oom_kills:
            why = f"out of memory: the system ended the worker process during {doing!r}"
            return WorkerFailure(why, died=True, out_of_memory=True, traceback=tail)
        return WorkerFailure(
            f"the worker process died during {doing!r}: {describe_exit(exit_code)}", died=True, traceback=tail
        )

    def _with_tail(self, traceback: str | None) -> str | None:
        try:
            output = self._log.read_bytes()[-TAIL_CHARACTERS:].decode(errors="replace").strip()
        except OSError:
            output = ""
        parts = [traceback, f"last output of the worker:\n{output}" if output else None]
        return "\n".join(part for part in parts if part) or None


class WorkerPool:
    """Resident workers by key. A worker that died is replaced when its key is next asked for."""

    def __init__(self, settings: WorkerSettings, start: Callable[[str, WorkerSettings], Worker] | None = None) -> None:
        self.settings = settings
        self._start = start or Worker
        self._resident: dict[str, Worker] = {}

    def resident(self, key: str) -> Worker:
        """The worker of a key, started when there is none alive."""
        worker = self._resident.get(key)
        if worker is None or not worker.alive:
            if worker is not None:
                worker.kill()
            worker = self._resident[key] = self._start(key, self.settings)
        return worker

    @contextlib.contextmanager
    def fresh(self, key: str) -> Any:
        """A worker that nothing ran in before, ended afterwards."""
        worker = self._start(key, self.settings)
        try:
            yield worker
        finally:
            worker.kill()

    def close(self) -> None:
        """End all workers."""
        for worker in self._resident.values():
            worker.kill()
        self._resident.clear()


def worker_context() -> BaseContext:
    """The way processes are made: forked from a server with torch loaded, else started anew."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(SERVER_MODULES)
    return context


def warm_server() -> None:
    """Start the server that workers are forked from, without waiting for it."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        from multiprocessing import forkserver

        worker_context()
        forkserver.ensure_running()


def describe_exit(code: int | None) -> str:
    """An exit code in words: the signal's name, or what it was."""
    if code is None:
        return "it closed its pipe and does not end"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    meaning = {"SIGKILL": " (kill -9 or the system's out-of-memory killer)", "SIGSEGV": " (segmentation fault)"}
    return f"killed by {name}{meaning.get(name, '')}"


def _oom_kills() -> int:
    """How often the kernel's out-of-memory killer has struck in this control group; 0 where it is not told."""
    try:
        text = Path("/sys/fs/cgroup/memory.events").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill "))
