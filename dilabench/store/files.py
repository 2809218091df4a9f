"""Files of the store, written so that a reader sees the whole of one or none of it. No torch."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from dilabench.atomic_file import open_lock, write_bytes
from dilabench.errors import EnvironmentNotReady

STORE_VARIABLE = "DILABENCH_STORE"
DEFAULT_STORE = Path("benchmark_results") / "store"


def store_root() -> Path:
    """The store's folder: $DILABENCH_STORE, else benchmark_results/store under the working folder."""
    return Path(os.environ.get(STORE_VARIABLE) or DEFAULT_STORE)


def write_whole(path: Path, data: bytes, *, replace: bool) -> bool:
    """Write a file in one step; without `replace` an existing file stays, and the answer is False.

    Raises EnvironmentNotReady when the disk is full or the folder cannot be written; nothing is left behind then.
    """
    return write_bytes(path, data, replace=replace, way_out=_way_out())


def unreadable(path: Path, error: OSError) -> EnvironmentNotReady:
    """The error for a file or folder of the store that the system does not let this user read."""
    reason = error.strerror or error
    return EnvironmentNotReady(
        f"{str(path)!r} cannot be read: {reason}; get access to it, or set {STORE_VARIABLE} to another folder"
    )


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file beside `path` while it is read, changed and written; others wait.

    Raises EnvironmentNotReady when the lock file cannot be made.
    """
    lock = path.with_name(f".{path.name}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(open_lock(lock), "r+")
    except OSError as error:
        raise EnvironmentNotReady(
            f"{str(lock)!r} cannot be written: {error.strerror or error}; {_way_out()}"
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _way_out() -> str:
    return f"set {STORE_VARIABLE} to a folder that you can write, or free some space"
