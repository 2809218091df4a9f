"""The plug-in boundary: exceptions, wrong results, exits and prints of a plug-in affect only its own components.

All code of plug-ins that runs in the main process runs inside `guarded`: hooks, rules, suites, analyses, reporters,
formulas, patterns. Worker processes contain their own code (`dilabench.engine.worker.handlers`).
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO

from dilabench.errors import ConfigError, DilabenchError, Ended, EnvironmentNotReady, PluginError, said
from dilabench.validation import defined as defined
from dilabench.validation import shown as shown

PACKAGE = str(Path(__file__).parents[1])
# Frames of code that only calls a plug-in, or that a plug-in calls for dilabench.
_BETWEEN = ("/pluggy/", "/pydantic/", "/torch/", "/importlib/", "<frozen ", "/contextlib.py", "/dataclasses.py")


@dataclass(frozen=True, slots=True)
class Problem:
    """A plug-in, or a part of one, that could not be used, and why."""

    plugin: str
    why: str

    @property
    def text(self) -> str:
        """What users are told."""
        return f"problem in plug-in {self.plugin!r}: {self.why}"


@dataclass(slots=True)
class _Outside:
    """The command's standard output while threads (`inside` of them) run code of plug-ins, whose prints go to stderr.

    One object for all threads, because contextlib.redirect_stdout would restore another thread's stderr. `running`:
    the current requests to plug-ins, the latest last; `watched`: the file from which `watch` reads them.
    """

    stream: TextIO
    inside: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    running: list[str] = field(default_factory=list)
    watched: int | None = None

    def enter(self, running: str) -> None:
        """Called before code of a plug-in runs."""
        with self.lock:
            if not self.inside:
                self.stream, sys.stdout = sys.stdout, sys.stderr
                os._exit = _exit_instead
            self.inside += 1
            self.running.append(running)
            self._write()

    def leave(self, running: str) -> None:
        """After it."""
        with self.lock:
            self.inside -= 1
            self.running.remove(running)
            self._write()
            if not self.inside:
                sys.stdout = self.stream
                os._exit = _exit

    def _write(self) -> None:
        if self.watched is not None:
            text = self.running[-1] if self.running else ""
            os.pwrite(self.watched, text.encode(errors="backslashreplace")[:_LONGEST].ljust(_LONGEST, b"\0"), 0)


_exit, _process = os._exit, os.getpid()
_LONGEST = 300
_WATCH = f"""
import os
os.read(0, 1)
text = os.pread(1, {_LONGEST}, 0).rstrip(b"\\0")
if text:
    os.write(2, b"error: the process ended " + text + b", which ended or crashed it; "
        b"DILABENCH_DISABLE_PLUGINS=1 leaves plug-ins out\\n")
"""
_outside = _Outside(sys.stdout)


def _exit_instead(status: int) -> NoReturn:
    """`os._exit` while code of a plug-in runs: an error of that plug-in. Processes that it forked exit normally."""
    if os.getpid() != _process:
        _exit(status)
    raise SystemExit(f"os._exit({status})")


def watch() -> None:
    """Start a process that outlives this one: if this one ends inside a plug-in's code, it prints which, on stderr.

    For ends without an exception: a segmentation fault, a signal that cannot be caught, exit() in C.
    """
    if _outside.watched is not None:
        return
    # If no temporary file or process can be created, plug-ins work without the watch.
    with contextlib.suppress(OSError, ValueError):
        with tempfile.TemporaryFile() as file:
            running = os.dup(file.fileno())
        ending, _alive = os.pipe()
        command = [sys.executable, "-I", "-S", "-c", _WATCH]
        watcher = subprocess.Popen(command, stdin=ending, stdout=running, start_new_session=True)
        # It is never waited for.
        watcher.returncode = 0
        os.close(ending)
        _outside.watched = running


@contextlib.contextmanager
def guarded(plugin: str, what: str = "") -> Iterator[None]:
    """Run code of a plug-in: any exception, sys.exit() included, becomes a PluginError with file and line.

    `what` names the request. Its prints go to stderr, because stdout may carry JSON. Refusals for the user
    (ConfigError, EnvironmentNotReady) and Ctrl-C pass through; the latter names the interrupted request.
    """
    running = f"while plug-in {plugin!r} was {f'running: {what}' if what else 'loaded'}"
    _outside.enter(running)
    try:
        yield
    except (GeneratorExit, ConfigError, EnvironmentNotReady):
        raise
    # A plug-in may raise anything.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and _is_users(error):
            error.args = error.args or (running,)
            raise
        if isinstance(error, PluginError):
            if error.plugin is not None:
                raise
            text = error.why
        else:
            text = (str(error) if isinstance(error, DilabenchError) else said(error)) + place(error)
        raise PluginError(f"{what}: {text}" if what else text, plugin) from error
    finally:
        _outside.leave(running)


def _is_users(interrupt: KeyboardInterrupt) -> bool:
    """Return True if a signal caused it: commands raise their own class then; elsewhere it cannot be determined."""
    return isinstance(interrupt, Ended) or signal.getsignal(signal.SIGINT) is signal.default_int_handler


def answered(plugin: str, what: str, function: Callable[..., Any], *arguments: Any, kind: Any) -> Any:
    """Call a plug-in's function. Raises PluginError if it fails, or returns a value that is no `kind`.

    `kind` is a type or a tuple of types, as for isinstance.
    """
    with guarded(plugin, what):
        answer = function(*arguments)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(answer, kinds) or (isinstance(answer, bool) and bool not in kinds):
            wanted = " or ".join("None" if type_ is type(None) else type_.__name__ for type_ in kinds)
            raise PluginError(f"{defined(function)} returned {shown(answer)}; it must return {wanted}")
        return answer


def standard_output() -> TextIO:
    """Standard output outside of the boundary, for a command's output even while other threads run plug-ins."""
    with _outside.lock:
        return _outside.stream if _outside.inside else sys.stdout


def place(error: BaseException, *, also_ours: bool = True) -> str:
    """' (file:line)' of the innermost line in the plug-in's folder, the folder of the first frame outside dilabench.

    Without such a frame, the innermost line of dilabench, or '' if not `also_ours`.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    theirs = [
        frame for frame in frames if not frame[0].startswith(PACKAGE) and not any(part in frame[0] for part in _BETWEEN)
    ]
    if not theirs and not also_ours:
        return ""
    home = str(Path(theirs[0][0]).parent) if theirs else PACKAGE
    inside = [frame for frame in frames if frame[0].startswith(home)]
    return " ({}:{})".format(*inside[-1]) if inside else ""
