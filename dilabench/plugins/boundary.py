"""The plug-in boundary: exceptions, wrong results, exits and prints of a plug-in affect only its own components.

All code of plug-ins that runs in the main process runs inside `guarded`: hooks, rules, suites, analyses, reporters,
formulas, patterns. Worker processes contain their own code (`dilabench.engine.worker.handlers`).
"""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO

from dilabench.errors import (
    ConfigError,
    DilabenchError,
    Ended,
    EnvironmentNotReady,
    PluginError,
    said,
    shortened,
    text_of,
)
from dilabench.validation import defined as defined
from dilabench.validation import shown as shown

PACKAGE = str(Path(__file__).parents[1])
_OF_SYNTAX = (SyntaxError, IndentationError, TabError)
# Frames of code that only calls a plug-in, or that a plug-in calls for dilabench.
_BETWEEN = ("/pluggy/", "/pydantic/", "/torch/", "/importlib/", "<frozen ", "/contextlib.py", "/dataclasses.py")


@dataclass(frozen=True, slots=True)
class Problem:
    """A plug-in, or a part of one, that could not be used, and why."""

    plugin: str
    why: str

    @property
    def text(self) -> str:
        """The message that users see."""
        return f"problem in plug-in {self.plugin!r}: {self.why}"


@dataclass(slots=True)
class _Outside:
    """The command's standard output while threads (`inside` of them) run code of plug-ins, whose prints go to stderr.

    One object for all threads, because contextlib.redirect_stdout would restore another thread's stderr. `original`:
    `sys.__stdout__`; `errors`: `sys.stderr` and `sys.__stderr__`. `running`: the current requests to plug-ins, the
    latest last; `watched`: the file from which `watch` reads them.
    """

    stream: TextIO
    original: TextIO | None = None
    errors: tuple[TextIO | None, TextIO | None] = (None, None)
    inside: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    running: list[str] = field(default_factory=list)
    watched: int | None = None

    def enter(self, running: str) -> None:
        """Called before code of a plug-in runs."""
        with self.lock:
            if not self.inside:
                self.stream, self.original = sys.stdout, sys.__stdout__
                self.errors = sys.stderr, sys.__stderr__
                sys.stdout = sys.__stdout__ = sys.stderr  # type: ignore[misc, assignment]
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
                sys.stdout, sys.__stdout__ = self.stream, self.original  # type: ignore[misc, assignment]
                sys.stderr, sys.__stderr__ = self.errors  # type: ignore[misc, assignment]
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


# A limit of the process that a plug-in lowers is dilabench's as well: open files, a file's size, memory, processes.
_LIMITS = {name: getattr(resource, name) for name in ("RLIMIT_NOFILE", "RLIMIT_FSIZE", "RLIMIT_AS", "RLIMIT_NPROC")}


def _limits() -> list[tuple[int, int]]:
    return [resource.getrlimit(number) for number in _LIMITS.values()]


def _restored(recursion: int, limits: Sequence[tuple[int, int]]) -> str | None:
    """Restore limits of the process that are lower now. Returns what was; None for nothing.

    Raises OSError for a limit that stays low.
    """
    # First, because a call needs it.
    if (lowered := sys.getrecursionlimit()) < recursion:
        sys.setrecursionlimit(recursion)
        return f"it set the recursion limit to {lowered}, which is {recursion} again"
    if (present := _limits()) == limits:
        return None
    for (name, number), before, now in zip(_LIMITS.items(), limits, present, strict=True):
        if any(map(_is_lower, now, before)):
            try:
                resource.setrlimit(number, before)
            except ValueError:
                raise OSError(f"it set {name} to {now[0]}, which cannot be undone") from None
            return f"it set {name} to {now[0]}, which is {before[0]} again"
    return None


def _is_lower(limit: int, before: int) -> bool:
    return limit != resource.RLIM_INFINITY and (before == resource.RLIM_INFINITY or limit < before)


@contextlib.contextmanager
def guarded(plugin: str, what: str = "", *, refuses: bool = True) -> Iterator[None]:
    """Run code of a plug-in: any exception, sys.exit() included, becomes a PluginError with file and line.

    `what` names the request. Its prints go to stderr, because stdout may carry JSON. If it `refuses`, its ConfigError
    and EnvironmentNotReady are for the user. Ctrl-C passes through and names the interrupted request. A lowered limit
    of the process is a PluginError, too, or EnvironmentNotReady if it cannot be restored.
    """
    running = f"while plug-in {plugin!r} was {f'running: {what}' if what else 'loaded'}"
    raised: BaseException | None = None
    interrupt: BaseException | None = None
    _outside.enter(running)
    recursion, limits = sys.getrecursionlimit(), _limits()
    try:
        yield
    # A plug-in may raise anything.
    except BaseException as error:  # noqa: BLE001
        raised = error
    try:
        lowered = _restored(recursion, limits)
        # Python 3.11 raises it in a class body as the cause of a RuntimeError.
        interrupt = raised.__cause__ if type(raised) is RuntimeError else raised
        if interrupt is not None and _is_users(interrupt):
            interrupt.args = interrupt.args or (running,)
            raise interrupt
        if raised is not None or lowered is not None:
            raise _error_of(raised, lowered, plugin, what, refuses) from raised
    except OSError as error:
        raise EnvironmentNotReady(f"plug-in {plugin!r}: {error}; DILABENCH_DISABLE_PLUGINS=1 leaves it out") from raised
    finally:
        _outside.leave(running)
        # They refer to this frame.
        raised = interrupt = None


def _error_of(
    error: BaseException | None, lowered: str | None, plugin: str, what: str, refuses: bool
) -> DilabenchError:
    """The error about what a plug-in raised or lowered. Its exception may be of a class whose methods fail or exit."""
    kind = type(error)
    texts = [lowered] if lowered else []
    if error is not None:
        for refusal in (ConfigError, EnvironmentNotReady) if refuses else ():
            if issubclass(kind, refusal):
                return refusal(text_of(error))
        if issubclass(kind, PluginError) and (named := vars(error).get("plugin")) is not None:
            return PluginError(vars(error)["why"], named)
        text = shortened(text_of(error)) if issubclass(kind, DilabenchError) else said(error)
        texts.insert(0, text + place(error))
    return PluginError("; ".join([f"{what}: {texts[0]}" if what else texts[0], *texts[1:]]), plugin)


def _is_users(error: BaseException) -> bool:
    """Return True for an interrupt by a signal: commands raise their own class then; elsewhere it is not known."""
    plain = issubclass(type(error), KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return plain or issubclass(type(error), Ended)


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
    if type(error) in _OF_SYNTAX and (name := getattr(error, "filename", None)):
        return f" ({name}:{getattr(error, 'lineno', None)})"
    # Not `error.__traceback__`, which a class may define; and without the lines, for which a loader may be called.
    innermost = BaseException.__dict__["__traceback__"].__get__(error)
    frames = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(innermost)]
    theirs = [
        frame for frame in frames if not frame[0].startswith(PACKAGE) and not any(part in frame[0] for part in _BETWEEN)
    ]
    if not theirs and not also_ours:
        return ""
    home = str(Path(theirs[0][0]).parent) if theirs else PACKAGE
    inside = [frame for frame in frames if frame[0].startswith(home)]
    return " ({}:{})".format(*inside[-1]) if inside else ""
