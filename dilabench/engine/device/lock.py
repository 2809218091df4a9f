"""One run at a time per device: file locks that name their holder. No torch."""

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from dilabench.atomic_file import open_lock
from dilabench.engine.progress import Progress
from dilabench.errors import EnvironmentNotReady
from dilabench.machine import Machine
from dilabench.units import format_seconds

FOLDER_VARIABLE = "DILABENCH_LOCK_DIR"
POLL_S = 0.5
DEFAULT_WAIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Lock:
    """A lock file and its device."""

    path: Path
    device: str


def locks_of(machine: Machine, gpus: Sequence[int] = (0,)) -> tuple[Lock, ...]:
    """The locks of a run on some GPUs of the machine (positions in `machine.gpus`), or of the host's processor.

    Several locks are always taken in this order, which depends on the GPUs alone, so that no two runs deadlock.
    """
    folder = Path(os.environ.get(FOLDER_VARIABLE) or tempfile.gettempdir())
    if not machine.used_gpus:
        return (Lock(folder / "dilabench-cpu.lock", "the device"),)
    found: dict[Path, Lock] = {}
    for index in gpus:
        if index < len(machine.gpus):
            gpu = machine.gpus[index]
            path = folder / f"dilabench-gpu-{gpu.uuid_hash or index}.lock"
            found.setdefault(path, Lock(path, f"GPU {index} ({gpu.name})"))
    return tuple(found[path] for path in sorted(found))


@contextlib.contextmanager
def device_lock(
    machine: Machine,
    run_id: str,
    progress: Progress,
    *,
    gpus: Sequence[int] = (0,),
    wait_s: float = DEFAULT_WAIT_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Hold the locks of `gpus`, or of the processor, waiting for other runs that have them.

    The system releases the locks when the process ends, however it ends. Raises EnvironmentNotReady naming the device
    and its holder when it is not released within `wait_s` seconds, all devices together, or for an unusable file.
    """
    started = clock()
    with contextlib.ExitStack() as held:
        for lock in locks_of(machine, gpus):
            # The file stays: removing it would let two runs lock two files of one name.
            file = held.enter_context(_open(lock.path))
            _acquire(file, lock, progress, wait_s, lambda: clock() - started, sleep)
            _sign(file, run_id)
        yield


def _sign(file: TextIO, run_id: str) -> None:
    """Write into the lock file which run and process hold it."""
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    file.seek(0)
    file.truncate()
    json.dump({"pid": os.getpid(), "run_id": run_id, "since": since}, file)
    file.flush()


def _open(path: Path) -> TextIO:
    try:
        # Links are not followed: the folder is everybody's, and the file is overwritten.
        descriptor = open_lock(path, os.O_NOFOLLOW)
    except OSError as error:
        raise EnvironmentNotReady(
            f"lock file {str(path)!r} cannot be opened: {error.strerror}; "
            f"set {FOLDER_VARIABLE} to a folder that you can write"
        ) from error
    with contextlib.suppress(PermissionError):
        # Other users of the machine must be able to lock it, independent of the umask.
        os.fchmod(descriptor, 0o666)
    return os.fdopen(descriptor, "r+", encoding="utf-8")


def _acquire(
    file: TextIO,
    lock: Lock,
    progress: Progress,
    wait_s: float,
    waited_s: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = _holder(file)
        if waited_s() >= wait_s:
            raise EnvironmentNotReady(
                f"{lock.device} is in use by {holder} (lock {lock.path}), which did not end within "
                f"{format_seconds(wait_s)}; two runs at the same time would disturb each other: wait for it or end it"
            )
        progress.waiting(f"{lock.device} is in use by {holder}")
        sleep(POLL_S)


def _holder(file: TextIO) -> str:
    file.seek(0)
    try:
        facts = json.loads(file.read())
        return f"run {facts['run_id']} (process {facts['pid']}, since {facts['since']})"
    except (ValueError, KeyError, TypeError, RecursionError):
        return "another run"
