"""Atomic writes of the store's files: a reader sees a whole file or none. No torch."""

import os
from contextlib import AbstractContextManager
from pathlib import Path

from dilabench import atomic_file
from dilabench.atomic_file import write_bytes
from dilabench.errors import EnvironmentNotReady

STORE_VARIABLE = "DILABENCH_STORE"
DEFAULT_STORE = Path("benchmark_results") / "store"


def store_root() -> Path:
    """The store's folder: $DILABENCH_STORE, else benchmark_results/store under the working folder."""
    return Path(os.environ.get(STORE_VARIABLE) or DEFAULT_STORE)


def write_whole(path: Path, data: bytes, *, replace: bool) -> bool:
    """Write a file atomically; without `replace` an existing file stays, and False is returned.

    Raises EnvironmentNotReady when the disk is full or the folder cannot be written; nothing is left behind then.
    """
    return write_bytes(path, data, replace=replace, way_out=_way_out())


def unreadable(path: Path, error: OSError) -> EnvironmentNotReady:
    """The error for a file or folder of the store that the system does not let this user read."""
    reason = error.strerror or error
    return EnvironmentNotReady(
        f"{str(path)!r} cannot be read: {reason}; get access to it, or set {STORE_VARIABLE} to another folder"
    )


def locked(path: Path) -> AbstractContextManager[None]:
    """`atomic_file.locked` for a file of the store."""
    return atomic_file.locked(path, _way_out())


def _way_out() -> str:
    return f"set {STORE_VARIABLE} to a folder that you can write, or free some space"
