"""The cache folder: traced memory, tune files, compiled C++, the charting library. All of it can be made again."""

import functools
import hashlib
import logging
import os
import stat
import tempfile
from pathlib import Path

from dilabench.atomic_file import check_writable, read_file

CACHE_VARIABLE = "DILABENCH_CACHE"
COMPILED_VARIABLE = "DILABENCH_COMPILED"
OTHER_CACHE = f"set {CACHE_VARIABLE} to a folder that you can write, with free space, on a file system without noexec"
_DIGEST_BYTES = hashlib.sha256().digest_size

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """$DILABENCH_CACHE, else ~/.cache/dilabench; for a user without a home a private folder among temporary files."""
    base = os.environ.get(CACHE_VARIABLE)
    if base:
        return Path(base)
    try:
        return Path.home() / ".cache" / "dilabench"
    except RuntimeError:
        return _without_home()


def compiled_folder() -> Path:
    """The folder of C++ code compiled for this machine: $DILABENCH_COMPILED, else a part of the cache folder."""
    base = os.environ.get(COMPILED_VARIABLE)
    return Path(base) if base else cache_folder() / "cpu"


@functools.cache
def _without_home() -> Path:
    """A folder that only this user can write: code is loaded from it. One for this process if its name is taken."""
    path = Path(tempfile.gettempdir()) / f"dilabench-{os.geteuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        state = path.lstat()
        is_private = stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and not state.st_mode & 0o022
        return path if is_private else Path(tempfile.mkdtemp(prefix="dilabench-"))
    except OSError:
        # The code that writes to it reports the failure.
        return path


def why_not_writable(folder: Path) -> str | None:
    """Why no file can be written to a folder, which is created if missing; None if one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_writable(folder, 1 << 16)
    except OSError as error:
        return f"{str(folder)!r} cannot be written: {error.strerror or error}"
    return None


def with_digest(data: bytes) -> bytes:
    """The content of a cached file: `data`, then its SHA-256, which `read_checked` looks for."""
    return data + hashlib.sha256(data).digest()


def read_checked(path: Path) -> bytes | None:
    """The data of a file written `with_digest`; None if there is none, or if it is damaged, which is logged."""
    try:
        content = read_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        logger.warning("%s cannot be read (%s): it is made again", path, error.strerror or error)
        return None
    data = content[:-_DIGEST_BYTES]
    if with_digest(data) != content:
        logger.warning("%s is damaged (%d bytes, wrong digest): it is made again", path, len(content))
        return None
    return data
