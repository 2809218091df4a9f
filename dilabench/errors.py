"""The errors of dilabench, and the exit code of each kind.

DilabenchError
├── ConfigError        the request cannot be carried out as asked (2)
├── EnvironmentNotReady the machine lacks what the request needs (3)
├── NothingToMeasure   no row of the request can run on this machine (8)
└── PluginError        a plug-in is broken, misspelt or clashes (3)

Failures of one benchmark case are data (`dilabench.record.Failed`), not exceptions.
"""

import difflib
from collections.abc import Callable, Iterable, Sequence
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
    INCOMPLETE = 9
    INTERRUPTED = 130


# The verdict with exit code 5 if no output is wrong.
IMPOSSIBLE_TIME = "A TIME CANNOT BE TRUE"

# The exit code of a command with several steps: the first of these that one step had.
GRAVEST_FIRST = (
    ExitCode.INTERRUPTED,
    ExitCode.WRONG_OUTPUT,
    ExitCode.CASE_FAILED,
    ExitCode.REGRESSION,
    ExitCode.INCONCLUSIVE,
    ExitCode.ENVIRONMENT,
    ExitCode.NOTHING_MEASURED,
    ExitCode.INCOMPLETE,
)


def exit_code_for(
    *,
    interrupted: bool = False,
    wrong: bool = False,
    failed: bool = False,
    slower: bool = False,
    undecided: bool = False,
    broken: bool = False,
    nothing: bool = False,
    incomplete: bool = False,
) -> ExitCode:
    """The exit code of a command: the gravest condition that holds; OK if none does.

    wrong: an output, or a time that cannot be true. failed: a case, in another way. slower: a time, or a peak that is
    larger. broken: a plug-in, or the environment. nothing: no case was measured, verified or compared. incomplete: none
    of some length was measured.
    """
    holds = (interrupted, wrong, failed, slower, undecided, broken, nothing, incomplete)
    return next((code for code, true in zip(GRAVEST_FIRST, holds, strict=True) if true), ExitCode.OK)


def gravest(codes: Iterable[ExitCode]) -> ExitCode:
    """The gravest of several exit codes; OK for none."""
    found = set(codes)
    return next((code for code in GRAVEST_FIRST if code in found), ExitCode.OK)


class DilabenchError(Exception):
    """Base of every error that is shown to the user as a message instead of a traceback."""

    exit_code: ExitCode = ExitCode.INTERNAL


class ConfigError(DilabenchError):
    """The request is wrong. The text names the value, the rule and a way out."""

    exit_code = ExitCode.BAD_REQUEST


class EnvironmentNotReady(DilabenchError):
    """The machine lacks what the request needs: a device, disk space, a writable folder."""

    exit_code = ExitCode.ENVIRONMENT


class NothingToMeasure(DilabenchError):
    """No row of the request can run on this machine. The text names the rows and what each of them needs."""

    exit_code = ExitCode.NOTHING_MEASURED


class PluginError(DilabenchError):
    """A plug-in is broken, names an unknown hook, or registers a name that is taken. `plugin` is its name, if known."""

    exit_code = ExitCode.ENVIRONMENT

    def __init__(self, why: str, plugin: str | None = None) -> None:
        super().__init__(why if plugin is None else f"plug-in {plugin!r}: {why}")
        self.why, self.plugin = why, plugin


class Ended(KeyboardInterrupt):
    """A signal asked the command to end, where a plain KeyboardInterrupt may be some code's own.

    `dropped` is called if it is dropped before `heed`: by a library that catches everything, or in C.
    """

    dropped: Callable[[], None] | None = None

    @classmethod
    def noticing(cls, dropped: Callable[[], None]) -> "Ended":
        """One that calls `dropped`."""
        ended = cls()
        ended.dropped = dropped
        return ended

    def __del__(self) -> None:
        if self.dropped is not None:
            self.dropped()


def heed(interrupt: KeyboardInterrupt) -> None:
    """Say that an interrupt is acted upon, so that it does not come again."""
    if isinstance(interrupt, Ended):
        interrupt.dropped = None


def interrupt_behind(error: BaseException) -> KeyboardInterrupt | None:
    """The interrupt that an exception is, or stands for: Python 3.11 raises a RuntimeError for it in `__set_name__`."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, Ended):
        seen = seen.__cause__
    return seen if isinstance(seen, Ended) else error if isinstance(error, KeyboardInterrupt) else None


# A longer text of an exception is no help in a message.
MOST_LETTERS = 2000


def encodable(text: str) -> str:
    """The text with lone surrogates, which UTF-8 lacks, escaped."""
    # A subclass of str may have its own `encode`.
    return str.encode(text, errors="backslashreplace").decode()


def type_name(value: object) -> str:
    """The name of a value's type, whatever its metaclass says."""
    name: str = type.__dict__["__name__"].__get__(type(value))
    return name


def text_of(error: BaseException) -> str:
    """The text of an exception in valid UTF-8, also if its `__str__` fails or exits."""
    try:
        return encodable(str(error))
    # Its `__str__` is foreign code.
    except BaseException as second:
        if issubclass(type(second), Ended):
            raise
        return f"(its text cannot be printed: its __str__ raised {type_name(second)})"


def shortened(text: str, most: int = MOST_LETTERS) -> str:
    """The text, or its beginning and its length if it has more than `most` letters."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} letters)"


def interruption(error: KeyboardInterrupt) -> str:
    """'interrupted', and what was running, if the boundary of plug-ins has said."""
    return f"interrupted {text_of(error)}".rstrip()


def first_line(error: BaseException) -> str:
    """The first line of an exception's text; empty if it has none."""
    return shortened((text_of(error).strip().splitlines() or [""])[0])


def said(error: BaseException) -> str:
    """Type and text of an exception, on one line; only the type if it has no text."""
    text = shortened(" ".join(text_of(error).split()))
    return f"{type_name(error)}: {text}" if text else type_name(error)


def listed(words: Sequence[str], last: str) -> str:
    """'a', 'a or b', 'a, b or c'."""
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


# A longer list is no help inside a sentence.
MOST_SHOWN = 40


def unknown_name(
    kind: str, name: str, known: Iterable[str], command: str = "dilabench list", left_out: Iterable[str] = ()
) -> ConfigError:
    """The error for a name that does not exist, with the nearest names that do and the command that lists them.

    `left_out` are plug-ins that could not be used, for the name may be one of theirs.
    """
    choices = sorted(known)
    near = difflib.get_close_matches(name, choices, n=3, cutoff=0.6)
    known_names = f"known: {', '.join(choices) or 'none'}"
    if len(choices) > MOST_SHOWN:
        known_names = f"{len(choices)} are known, those of a plug-in once its package is installed"
    hint = f"did you mean {listed(near, 'or')}?" if near else known_names
    lacking = ", ".join(dict.fromkeys(map(repr, left_out)))
    missing = f"; ignored because it is broken: plug-in {lacking}" if lacking else ""
    return ConfigError(f"unknown {kind} {name!r}; {hint}{missing} (see `{command}`)")
