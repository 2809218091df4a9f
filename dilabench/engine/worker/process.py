"""A worker process on this machine: how it is started, what it printed last, how it ended. No torch.

Workers are forked from a server that has torch loaded (and CUDA untouched), so a fresh process costs milliseconds.
"""

import atexit
import contextlib
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from types import ModuleType
from typing import Any

from dilabench.engine.temporary_folder import temporary_folder
from dilabench.machine import group_folders

SERVER_MODULES = ["dilabench.engine.worker.server"]
# The warning of multiprocessing's tracker about leaked semaphores.
SILENT = "ignore:resource_tracker"
# Python gives a process its name before it imports the script of its parent.
WORKER_NAME = "dilabench worker"
TAIL_CHARACTERS = 2000
END_TIMEOUT_S = 5.0
# How long threads of GNU OpenMP wait for each other before they sleep. Its default of 300,000 spins takes several
# milliseconds: if another program has a core, each parallel operation then takes a time slice, and verification takes
# ten times as long. With 5,000, a tenth of a millisecond, calls on an idle machine took the same time within 1 %;
# without any, up to 25 % more.
OPENMP_TURNS = "5000"
OPENMP_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


@dataclass(frozen=True, slots=True)
class Ending:
    """How a worker process exited: the reason as text, whether the OOM killer ended it, and its last output."""

    how: str
    out_of_memory: bool
    output: str


class Child:
    """A process that runs `target(*arguments, path of its log)`; not yet started."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        self._folder = contextlib.ExitStack()
        self._log = self._folder.enter_context(temporary_folder("worker")) / "output.log"
        self._oom_kills = _oom_kills()
        self._process: Any = worker_context().Process(  # type: ignore[attr-defined]
            target=target, args=(*arguments, str(self._log)), daemon=False, name=WORKER_NAME
        )

    def start(self) -> None:
        """Start the process."""
        warm_server()
        with _without_main(), _child_environment():
            self._process.start()

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return bool(self._process.is_alive())

    @property
    def sentinel(self) -> int:
        """Ready (`multiprocessing.connection.wait`) when it has ended."""
        return int(self._process.sentinel)

    @property
    def output(self) -> str:
        """The last lines that the process printed."""
        try:
            return self._log.read_bytes()[-TAIL_CHARACTERS:].decode(errors="replace").strip()
        except OSError:
            return ""

    def wait(self, timeout_s: float) -> None:
        """Wait until the process has ended, at most `timeout_s` seconds."""
        self._process.join(timeout=timeout_s)

    def ending(self) -> Ending:
        """How the process ended; waits for one that is about to end."""
        self.wait(END_TIMEOUT_S)
        return Ending(describe_exit(self._process.exitcode), _oom_kills() > self._oom_kills, self.output)

    def kill(self) -> None:
        """Kill the process and all that it started."""
        process = self._process
        if process.pid is not None:
            if process.is_alive():
                # The worker leads its own process group; before that it is in the group of its parent.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
            process.join()
        self._folder.close()


def worker_context() -> BaseContext:
    """The way processes are made: forked from a server with torch loaded, else spawned."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(SERVER_MODULES)
    return context


def warm_server() -> None:
    """Start the server that workers are forked from, without waiting for it."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        from multiprocessing import forkserver, resource_tracker

        worker_context()
        # If it cannot be started, the first worker says so.
        with contextlib.suppress(OSError), _without_main(), _child_environment():
            # It would be started with the server, and end what `_without_interrupts` began. Workers are killed, and it
            # frees what libraries in them left, without a word.
            with _environment({"PYTHONWARNINGS": ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), SILENT)))}):
                resource_tracker.ensure_running()
            with _without_interrupts():
                forkserver.ensure_running()
            atexit.register(end_server)


def end_server() -> None:
    """End the server that workers are forked from, if there is one; the next worker starts another.

    Otherwise it would load torch after the end of a command, and keep the command's output open.
    """
    from multiprocessing import forkserver

    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            # Until then the next worker would be requested from it. `forkserver` itself notices that it has ended.
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def _forget_server() -> None:
    """In a forked process: it can neither wait for the server of its parent nor may it end it, and has one itself."""
    module = sys.modules.get("multiprocessing.forkserver")
    if module is not None:
        server = module._forkserver
        if server._forkserver_alive_fd is not None:
            os.close(server._forkserver_alive_fd)
        server.__init__()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_server)


# One process at a time is started: the second would mistake the first one's stand-in for the program.
_hiding = threading.Lock()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide the program that was started: workers do not need it, and would run a script again, guard or not."""
    with _hiding:
        program = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = program


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes that start inside are deaf to Ctrl-C, which a terminal sends to all of a command: it is for the command
    to end them. The server hears it until its modules are loaded, and would print a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _child_environment() -> Iterator[None]:
    """Processes that start inside do not import from the working folder, and their threads wait for `OPENMP_TURNS`,
    unless the user's environment says.
    """
    changes = {"PYTHONSAFEPATH": "1"}
    if not any(name in os.environ for name in OPENMP_WAITING):
        changes[OPENMP_WAITING[0]] = OPENMP_TURNS
    with _environment(changes):
        yield


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def describe_exit(code: int | None) -> str:
    """An exit code as text: the signal's name, or the code."""
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
    """How often the kernel's out-of-memory killer has struck in this process's control groups; 0 if none says."""
    kills = 0
    for file in {folder / name for folder in group_folders() for name in ("memory.events", "memory.oom_control")}:
        with contextlib.suppress(OSError):
            found = re.search(r"^oom_kill (\d+)$", file.read_text(errors="replace"), re.MULTILINE)
            kills += int(found[1]) if found else 0
    return kills
