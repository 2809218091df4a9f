"""How commands end: a clear message and an exit code instead of a traceback, whatever ends them."""

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, ParamSpec

import typer

from dilabench.cli.terminal import output_lost, say, say_folded
from dilabench.errors import ConfigError, DilabenchError, EnvironmentNotReady, ExitCode, said

P = ParamSpec("P")

DEBUG_VARIABLE = "DILABENCH_DEBUG"
# An interrupt that a library kept to itself comes again so much later.
AGAIN_S = 0.05
# Ctrl-C, what a CI system and `kill` send, and a terminal that is closed.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAVING = b"ending: what was measured is being saved; once more ends at once, and --resume goes on from there\n"


def guarded(command: Callable[P, None], *, prints: bool = True) -> Callable[P, None]:
    """Wrap a command: errors meant for the user become one message on stderr, others a short text on where to report.

    `prints`: what it prints is what it is for, so that it fails where that cannot be written. DILABENCH_DEBUG=1 lets
    tracebacks through.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        code = ExitCode.OK
        try:
            command(*args, **kwargs)
        except typer.Exit as end:
            code = ExitCode(end.exit_code)
        except KeyboardInterrupt:
            raise stopped("interrupted", ExitCode.INTERRUPTED) from None
        # The outermost boundary: what arrives here and is no message for the user is a bug of dilabench.
        except Exception as error:
            if os.environ.get(DEBUG_VARIABLE):
                raise
            if isinstance(error, DilabenchError):
                raise stopped(f"error: {error}", error.exit_code) from None
            text = (
                f"internal error: {said(error)}\n"
                f"This is a bug in dilabench. Run again with {DEBUG_VARIABLE}=1 for the traceback and report it, "
                "with the output of `dilabench doctor`, in the project's issue tracker."
            )
            raise stopped(text, ExitCode.INTERNAL) from None
        if prints and code is ExitCode.OK and (lost := output_lost()):
            raise stopped(f"error: standard output cannot be written: {lost.strerror}", ExitCode.ENVIRONMENT)
        if code is not ExitCode.OK:
            raise typer.Exit(code)

    return run


def require_working_folder() -> None:
    """Raise EnvironmentNotReady where the working folder is gone."""
    try:
        os.getcwd()
    except OSError as error:
        where = os.environ.get("PWD", ".")
        raise EnvironmentNotReady(f"working folder {where!r} cannot be used: {error.strerror}; go to another") from None


def end_by_signals() -> None:
    """From now on, have every signal that asks for an end do what Ctrl-C does.

    What follows saves the results, so a second one waits. Signals that were ignored stay so (nohup). Where a library
    keeps exceptions to itself, as pydantic does for those of isinstance, the interrupt comes again.
    """
    came = last = 0
    in_hook = False
    other_hook = sys.unraisablehook

    def end(number: int, _frame: Any) -> None:
        nonlocal came, last
        last = number
        if in_hook:
            # What is raised in there is lost as well.
            later()
            return
        came += 1
        if came != 2:
            raise KeyboardInterrupt
        # Not `print`: the signal may have come while a line was being written.
        with contextlib.suppress(OSError):
            os.write(2, SAVING)

    def again(kept: "sys.UnraisableHookArgs") -> None:
        nonlocal came, in_hook
        if not issubclass(kept.exc_type, KeyboardInterrupt):
            other_hook(kept)
            return
        in_hook = True
        came -= 1
        later()
        in_hook = False

    def later() -> None:
        # The same signal: another may be ignored.
        threading.Timer(AGAIN_S, signal.pthread_kill, (threading.main_thread().ident, last)).start()

    sys.unraisablehook = again
    for one in ENDING:
        if signal.getsignal(one) not in (signal.SIG_IGN, None):
            signal.signal(one, end)


def ignore_signals() -> None:
    """Let no signal change the exit code of a command that has ended."""
    for one in ENDING:
        signal.signal(one, signal.SIG_IGN)


def stopped(message: str, code: ExitCode) -> typer.Exit:
    """Say on stderr why a command ends, and return how."""
    try:
        say_folded(message, "  ", err=True)
    except ConfigError:
        # The width that the environment asks for is none, which is what the message says.
        say(message, err=True)
    return typer.Exit(code)
