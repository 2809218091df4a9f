"""The plug-in boundary: what a plug-in raises, returns wrongly, exits with or prints costs its own thing only.

All code of plug-ins that runs in the main process runs inside `guarded`: hooks, rules, suites, analyses, reporters,
formulas, patterns. What runs in worker processes is held by them (`dilabench.engine.worker.handlers`).
"""

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from dilabench.errors import ConfigError, DilabenchError, EnvironmentNotReady, PluginError, said
from dilabench.validation import defined as defined
from dilabench.validation import shown as shown

PACKAGE = str(Path(__file__).parents[1])
# Frames of what only calls a plug-in, or is called by it on our behalf.
_BETWEEN = ("/pluggy/", "/pydantic/", "/importlib/", "<frozen ", "/contextlib.py", "/dataclasses.py")


@dataclass(frozen=True, slots=True)
class Problem:
    """A plug-in, or a part of one, that could not be used, and why."""

    plugin: str
    why: str


@dataclass(slots=True)
class _Outside:
    """Standard output of the command while threads (`inside` of them) run code of plug-ins, whose prints go to stderr.

    One for all threads: what each puts back on leaving (as contextlib.redirect_stdout does) may be another's stderr.
    """

    stream: TextIO
    inside: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


_outside = _Outside(sys.stdout)


@contextlib.contextmanager
def guarded(plugin: str, what: str = "") -> Iterator[None]:
    """Run code of a plug-in: whatever it raises, sys.exit() included, becomes a PluginError with file and line.

    `what` says what it was asked for. What it prints goes to stderr, for stdout may carry JSON. Refusals that are meant
    for the user (ConfigError, EnvironmentNotReady) and Ctrl-C pass.
    """
    with _outside.lock:
        if not _outside.inside:
            _outside.stream, sys.stdout = sys.stdout, sys.stderr
        _outside.inside += 1
    try:
        yield
    except (KeyboardInterrupt, GeneratorExit, ConfigError, EnvironmentNotReady):
        raise
    # A plug-in may raise anything.
    except BaseException as error:
        if isinstance(error, PluginError):
            if error.plugin is not None:
                raise
            text = error.why
        else:
            text = (str(error) if isinstance(error, DilabenchError) else said(error)) + _place(error)
        raise PluginError(f"{what}: {text}" if what else text, plugin) from error
    finally:
        with _outside.lock:
            _outside.inside -= 1
            if not _outside.inside:
                sys.stdout = _outside.stream


def answered(plugin: str, what: str, function: Callable[..., Any], *arguments: Any, kind: Any) -> Any:
    """What a plug-in's function answers. Raises PluginError when it fails, or answers with what is no `kind`.

    `kind` is a type or a tuple of types, as for isinstance.
    """
    with guarded(plugin, what):
        answer = function(*arguments)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(answer, kinds) or (isinstance(answer, bool) and bool not in kinds):
            wanted = " or ".join("None" if one is type(None) else one.__name__ for one in kinds)
            raise PluginError(f"{defined(function)} returned {shown(answer)}; it must return {wanted}")
        return answer


def standard_output() -> TextIO:
    """Standard output as it is outside of the boundary: what a command says goes here whatever other threads do."""
    with _outside.lock:
        return _outside.stream if _outside.inside else sys.stdout


def _place(error: BaseException) -> str:
    """Where it went wrong: the innermost line in the folder of the plug-in, whose frame is the first that is not ours.

    Without such a frame, the innermost line.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    frames = [(one.filename, one.lineno) for one in traceback.extract_tb(error.__traceback__)]
    theirs = [one for one in frames if not one[0].startswith(PACKAGE) and not any(part in one[0] for part in _BETWEEN)]
    home = str(Path(theirs[0][0]).parent) if theirs else PACKAGE
    inside = [one for one in frames if one[0].startswith(home)]
    return " ({}:{})".format(*inside[-1]) if inside else ""
