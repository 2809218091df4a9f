"""The command line. One file per command; nothing here imports torch."""

import contextlib
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

# While code of a plug-in runs, `os` has another.
_exit = os._exit
# An interrupt that a library dropped comes again so much later.
AGAIN_S = 0.05
# How long an interrupted command that has ended waits for what libraries and plug-ins do at the exit.
MOST_S = 5
# Ctrl-C, what a CI system and `kill` send, and a terminal that is closed.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAVING = b"ending: a run saves what it has measured (--resume goes on from there); once more ends at once\n"

# Address space that numpy takes to load, and torch with the threads of its worker: with less they spin, or crash.
LEAST_ADDRESSES, LEAST_ADDRESSES_OF_TORCH = 256 << 20, 1 << 30
WITH_TORCH = frozenset({"run", "verify", "plan", "tune", "check", "calibrate"})


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line with `argv` (sys.argv without the program by default) and leave with its exit code."""
    import atexit
    import gc

    # Imports, and a record, are a great many small objects without cycles: to look for garbage among them takes a third
    # of the time.
    gc.set_threshold(100_000, 50, 100)
    # Until something can be lost, Ctrl-C just ends the process, as the other signals do.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    require_address_space(sys.argv[1:] if argv is None else argv)
    from dilabench.cli.app import app
    from dilabench.cli.terminal import own_streams
    from dilabench.errors import ExitCode, heed, interrupt_behind

    end_by_signals()
    own_streams()
    code: object = 1
    if argv is None:
        # Last of all exit handlers, for Python then gives signals their default back, and waits for finalisers of
        # plug-ins: a signal would replace the exit code.
        atexit.register(lambda: leave_at_once(code))
    try:
        app(args=spread(sys.argv[1:] if argv is None else argv), prog_name="dilabench")
    except SystemExit as leaving:
        code = leaving.code
        raise
    except BaseException as error:
        # Before a command has begun, or after its end.
        if (interrupt := interrupt_behind(error)) is None:
            raise
        heed(interrupt)
        code = ExitCode.INTERRUPTED
        raise SystemExit(code) from None
    finally:
        leave_by_signals(code)


def require_address_space(argv: Sequence[str]) -> None:
    """Exit with code 3 if `ulimit -v` leaves a command less than its libraries take to load; --help always works."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    least = LEAST_ADDRESSES_OF_TORCH if WITH_TORCH.intersection(argv[:1]) else LEAST_ADDRESSES
    if limit == resource.RLIM_INFINITY or limit >= least or {"-h", "--help", "--version"}.intersection(argv):
        return
    sys.stderr.write(
        f"error: the address space is limited to {limit >> 20} MiB, and this command takes at least {least >> 20} MiB; "
        "raise the limit (ulimit -v unlimited)\n"
    )
    raise SystemExit(3)


def end_by_signals() -> None:
    """Make SIGTERM and SIGHUP do what Ctrl-C does, from now on.

    The command then saves its results, so a second signal is ignored. Ignored signals stay ignored (nohup). A library
    may drop the interrupt: it then comes again a moment later. So it does inside `isinstance`, where pydantic takes it
    for a "no".
    """
    from dilabench.errors import Ended

    # Only there can handlers be set.
    main_thread = threading.get_ident()
    came = last = 0
    is_due_again = False
    other_hook = sys.unraisablehook

    def end(signaled: int, frame: FrameType | None) -> None:
        nonlocal came, last
        last = signaled
        if is_due_again:
            return
        if _asks_for_a_type(frame):
            later()
            return
        came += 1
        if came != 2:
            # No variable here may refer to it, for this frame is in its traceback.
            raise Ended.noticing(dropped)
        # Not `print`: the signal may have come while a line was being written.
        with contextlib.suppress(OSError):
            os.write(2, SAVING)

    def silent(unraisable: "sys.UnraisableHookArgs") -> None:
        if not issubclass(unraisable.exc_type, Ended):
            other_hook(unraisable)

    def dropped() -> None:
        nonlocal came
        if signal.getsignal(last) is end:
            later()
            # Also of a second signal, which came while the first was being lost.
            came = 0

    def later() -> None:
        nonlocal is_due_again
        if not is_due_again:
            is_due_again = True
            threading.Timer(AGAIN_S, once_more).start()

    def once_more() -> None:
        nonlocal is_due_again
        is_due_again = False
        # The same signal: another may be ignored.
        signal.pthread_kill(main_thread, last)

    sys.unraisablehook = silent
    for number in ENDING:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            signal.signal(number, end)


def _asks_for_a_type(frame: FrameType | None) -> bool:
    """Return True inside `isinstance` or `issubclass`, as far as they run Python code."""
    while frame is not None:
        if frame.f_code.co_name in {"__instancecheck__", "__subclasscheck__"}:
            return True
        frame = frame.f_back
    return False


def leave_at_once(code: object) -> None:
    """End the process with the exit code of a SystemExit, once what was printed is written."""
    for stream in (sys.stdout, sys.stderr):
        # A plug-in may have closed or replaced it.
        with contextlib.suppress(Exception):
            stream.flush()
    _exit(code if isinstance(code, int) else 0 if code is None else 1)


def leave_by_signals(code: object) -> None:
    """Make a signal end the process immediately, from now on: the command has ended, and its exit code is known.

    Python would wait for threads and exit handlers of libraries and plug-ins, for ever if they do not end. If a signal
    has come before, the wait is limited.
    """

    from dilabench.errors import ExitCode

    def leave(_number: int = 0, _frame: FrameType | None = None) -> None:
        leave_at_once(code)

    def wait() -> None:
        # Libraries may handle other signals.
        while os.read(signaled, 1)[0] not in (*ENDING, signal.SIGALRM):
            pass
        leave()

    for number in ENDING:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            signal.signal(number, leave)
    # The main thread may begin to wait for a lock in C just then, and run no handler.
    signaled, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=wait, daemon=True).start()
    if code == ExitCode.INTERRUPTED:
        signal.signal(signal.SIGALRM, leave)
        signal.alarm(MOST_S)


# Options that take several values after one name, as argparse's nargs="+" does.
SEVERAL_VALUES = frozenset({"--implementations", "--sequence-lengths", "--custom-lengths"})

_OPTION = re.compile(r"--?[A-Za-z]")


def spread(argv: Sequence[str]) -> list[str]:
    """`--implementations a b` becomes `--implementations a --implementations b`, and `--batch_size` `--batch-size`.

    Everything after a bare `--` is left alone.
    """
    spelt: list[str] = []
    repeated: str | None = None
    for index, word in enumerate(argv):
        if word == "--":
            return [*spelt, *argv[index:]]
        if _OPTION.match(word):
            name, equals, value = word.partition("=")
            name = name.replace("_", "-") if name.startswith("--") else name
            repeated = name if name in SEVERAL_VALUES and not equals else None
            spelt.append(name + equals + value)
        elif repeated and spelt[-1] != repeated:
            spelt += [repeated, word]
        else:
            spelt.append(word)
    return spelt
