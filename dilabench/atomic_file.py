"""Files that others read or wait for: written so that nobody sees half of one, or locked."""

import errno
import os
import stat
import tempfile
from pathlib import Path

from dilabench.errors import EnvironmentNotReady

OTHER_FOLDER = "choose another folder with -o"


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of UTF-8 text, over any file that is there."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes, *, replace: bool = True, way_out: str = OTHER_FOLDER) -> bool:
    """Write a file in one step: a full disk or a kill leaves the old file or none.

    Without `replace` an existing file stays, and the answer is False. Raises EnvironmentNotReady, which ends with
    `way_out`, when the folder cannot be made or written; nothing is left behind then.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=".part")
        temporary = Path(name)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # A temporary file keeps others out; this one is meant to be read like any other.
        temporary.chmod(0o644)
        if replace:
            temporary.replace(path)
        else:
            # A link fails where the name is taken; a rename would take another writer's file away.
            os.link(temporary, path)
        return True
    except OSError as error:
        if isinstance(error, FileExistsError) and path.is_file():
            return False
        raise EnvironmentNotReady(f"{str(path)!r} cannot be written: {error.strerror or error}; {way_out}") from error
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
