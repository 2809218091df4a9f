"""How commands end: a clear message and an exit code instead of a traceback."""

import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec

import typer

from dilabench.cli.terminal import discard
from dilabench.errors import DilabenchError, ExitCode

P = ParamSpec("P")

DEBUG_VARIABLE = "DILABENCH_DEBUG"


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Wrap a command: errors meant for the user become one message on stderr, others a short text on where to report.

    DILABENCH_DEBUG=1 lets the traceback through.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        if os.environ.get(DEBUG_VARIABLE):
            command(*args, **kwargs)
            return
        try:
            command(*args, **kwargs)
        except DilabenchError as error:
            raise _stop(f"error: {error}", error.exit_code) from None
        except KeyboardInterrupt:
            raise _stop("interrupted", ExitCode.INTERRUPTED) from None
        except BrokenPipeError:
            # The reading end of the pipe (`head`, say) was closed.
            discard(sys.stdout)
            raise typer.Exit(ExitCode.OK) from None
        except typer.Exit:
            raise
        # The outermost boundary: whatever arrives here is a bug of dilabench.
        except Exception as error:  # noqa: BLE001
            text = (
                f"internal error: {type(error).__name__}: {error}\n"
                f"This is a bug in dilabench. Run again with {DEBUG_VARIABLE}=1 for the traceback and report it, "
                "with the output of `dilabench doctor`, in the project's issue tracker."
            )
            raise _stop(text, ExitCode.INTERNAL) from None

    return run


def _stop(message: str, code: ExitCode) -> typer.Exit:
    typer.echo(message, err=True)
    return typer.Exit(code)
