"""What can go wrong, and the exit code each kind ends the command with.

DilabenchError
├── ConfigError        the request cannot be carried out as asked (2)
├── EnvironmentNotReady the machine lacks what the request needs (3)
└── PluginError        a plug-in is broken, misspelt or clashes (3)

Failures of one benchmark case are data (`dilabench.record.Failed`), not exceptions.
"""

import difflib
from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the command line; scripts and CI may rely on them."""

    OK = 0
    INTERNAL = 1
    BAD_REQUEST = 2
    ENVIRONMENT = 3
    CASE_FAILED = 4
    WRONG_OUTPUT = 5
    REGRESSION = 6
    INCONCLUSIVE = 7
    NOTHING_MEASURED = 8
    INTERRUPTED = 130


class DilabenchError(Exception):
    """Base of every error that is shown to the user as a message instead of a traceback."""

    exit_code: ExitCode = ExitCode.INTERNAL


class ConfigError(DilabenchError):
    """The request is wrong. The text names the value, the rule and a way out."""

    exit_code = ExitCode.BAD_REQUEST


class EnvironmentNotReady(DilabenchError):
    """The machine lacks what the request needs: a device, disk space, a writable folder."""

    exit_code = ExitCode.ENVIRONMENT


class PluginError(DilabenchError):
    """A plug-in is broken, names an unknown hook, or registers a name that is taken."""

    exit_code = ExitCode.ENVIRONMENT


def unknown_name(kind: str, name: str, known: Iterable[str], command: str = "dilabench list") -> ConfigError:
    """The error for a name that does not exist, with the nearest names that do and the command that lists them."""
    choices = sorted(known)
    near = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(choices) or 'none'}"
    return ConfigError(f"unknown {kind} {name!r}; {hint} (see `{command}`)")
