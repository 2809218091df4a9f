"""Files that others read or wait for: written so that nobody sees half of one, or locked."""

import errno
import os
import stat
import tempfile
from pathlib import Path

from dilabench.errors import EnvironmentNotReady


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text to `path` in one step: a full disk or a kill leaves the old file or none.

    Raises EnvironmentNotReady when the folder cannot be made or written.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=f".{path.name}-", encoding="utf-8", newline="\n", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # NamedTemporaryFile keeps others out; a report is meant to be read like any other file.
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        raise EnvironmentNotReady(
            f"{str(path)!r} cannot be written: {error.strerror or error}; choose another folder with -o"
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def open_lock(path: Path, flags: int = 0) -> int:
    """A descriptor of a lock file, to read and write, which is made where there is none; it is not locked yet.

    Raises OSError when it cannot be opened or is no plain file: a pipe of that name would be waited for, for ever.
    """
    flags |= os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        # In everybody's folder, Linux refuses to "create" a file that another user has (fs.protected_regular).
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a plain file")
    return descriptor
