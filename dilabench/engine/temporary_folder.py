"""Temporary folders that end with their process: the next run removes the folders of a killed run."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "dilabench-tmp-"
# A younger one may not have its lock yet.
LEAST_AGE_S = 60.0


@contextlib.contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """A separate folder, removed at the end. A lock shows that its process lives, also across containers."""
    path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-"))
    held = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_SH)
        yield path
    finally:
        os.close(held)
        shutil.rmtree(path, ignore_errors=True)


def remove_left_over() -> None:
    """Remove this user's temporary folders whose processes were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > LEAST_AGE_S and _is_free(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_free(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
