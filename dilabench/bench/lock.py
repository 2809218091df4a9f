"""One run at a time per device: a file lock that says who holds it. No torch."""

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from dilabench.bench.progress import Progress
from dilabench.errors import EnvironmentNotReady
from dilabench.machine import Machine
from dilabench.units import format_seconds

FOLDER_VARIABLE = "DILABENCH_LOCK_DIR"
POLL_S = 0.5
DEFAULT_WAIT_S = 1800.0


def lock_path(machine: Machine) -> Path:
    """The lock file: one per GPU that the run can see first, or one for the host's processor."""
    folder = Path(os.environ.get(FOLDER_VARIABLE) or tempfile.gettempdir())
    key = "cpu"
    if machine.device == "cuda" and machine.gpus:
        key = f"gpu-{machine.gpus[0].uuid_hash or 0}"
    return folder / f"dilabench-{key}.lock"


@contextlib.contextmanager
def device_lock(
    machine: Machine,
    run_id: str,
    progress: Progress,
    *,
    wait_s: float = DEFAULT_WAIT_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Hold the device's lock, waiting for another run that has it. The lock goes with the process, however it dies.

    Raises EnvironmentNotReady naming the holder when it does not let go in `wait_s` seconds, or for an unusable file.
    """
    path = lock_path(machine)
    file = _open(path)
    try:
        _acquire(file, path, progress, wait_s, clock, sleep)
        file.seek(0)
        file.truncate()
        json.dump(
            {"pid": os.getpid(), "run_id": run_id, "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}, file
        )
        file.flush()
        yield
    finally:
        # The file stays: removing it would let two runs lock two files of one name.
        file.close()


def _open(path: Path) -> TextIO:
    try:
        descriptor = _descriptor(path)
    except OSError as error:
        raise EnvironmentNotReady(
            f"lock file {str(path)!r} cannot be opened: {error.strerror}; "
            f"set {FOLDER_VARIABLE} to a folder that you can write"
        ) from error
    with contextlib.suppress(PermissionError):
        # Other users of the machine must be able to lock it, whatever this one's umask is.
        os.fchmod(descriptor, 0o666)
    return os.fdopen(descriptor, "r+", encoding="utf-8")


def _descriptor(path: Path) -> int:
    # Links are not followed: the folder is everybody's, and the file is overwritten.
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        # In such a folder, Linux refuses to "create" a file that another user has (fs.protected_regular).
        return os.open(path, flags)
    except FileNotFoundError:
        return os.open(path, flags | os.O_CREAT, 0o666)


def _acquire(
    file: TextIO,
    path: Path,
    progress: Progress,
    wait_s: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    started = clock()
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = _holder(file)
        if clock() - started >= wait_s:
            raise EnvironmentNotReady(
                f"the device is in use by {holder} (lock {path}), which did not end within {format_seconds(wait_s)}; "
                "two runs at once would disturb each other: wait for it or end it"
            )
        progress.waiting(f"the device is in use by {holder}; waiting for it")
        sleep(POLL_S)


def _holder(file: TextIO) -> str:
    file.seek(0)
    try:
        facts = json.loads(file.read())
        return f"run {facts['run_id']} (process {facts['pid']}, since {facts['since']})"
    except (ValueError, KeyError, TypeError):
        return "another run"
