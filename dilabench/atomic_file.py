"""Files that other processes use: read within limits, written atomically, or locked.

The last part is the cache folder: traced memory, tune files, compiled C++, the charting library. All of it can be made
again.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import io
import logging
import os
import select
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from dilabench.errors import EnvironmentNotReady
from dilabench.units import format_bytes, parse_count

OTHER_FOLDER = "choose another folder with -o"
_RETRY_S = 0.05
# Errors of file systems without hard links.
_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
# Largest size of a file that is read whole, unpacked. The largest known record has a third of it.
LIMIT_VARIABLE = "DILABENCH_MAX_FILE"
MOST_BYTES = 512 << 20
# So long a pipe may be silent.
SILENCE_S = 10.0
_CHUNK = 1 << 20


def read_file(path: Path, *, pipe: bool = False) -> bytes:
    """The bytes of a plain file or, with `pipe`, of any file that ends; raises OSError as `file_chunks`."""
    # A plain file is read in one piece, which needs its memory once.
    return b"".join(file_chunks(path, pipe=pipe, size=most_bytes()))


def file_chunks(path: Path, *, pipe: bool = False, size: int = _CHUNK) -> Iterator[bytes]:
    """The parts of a file of `size` bytes, or less.

    Raises OSError with the reason: no plain file, more bytes than `most_bytes`, or a pipe that is silent for SILENCE_S.
    """
    with os.fdopen(_opened(path, os.O_RDONLY, pipe=pipe), "rb", buffering=0) as file:
        state = os.fstat(file.fileno())
        # A buffer of the whole size is made first.
        first = min(size, max(_CHUNK, state.st_size + 1))
        yield from limited(_chunks(file, first, waiting=not stat.S_ISREG(state.st_mode)))


def open_to_append(path: Path) -> io.FileIO:
    """A plain file, created if missing, to append to without a buffer; raises OSError, for a pipe or device, too."""
    # For writing only, a pipe without a reader has another error.
    return os.fdopen(_opened(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "ab", buffering=0)


def _opened(path: Path, flags: int, *, pipe: bool = False) -> int:
    """The descriptor of a plain file or, with `pipe`, of anything but a folder; raises OSError for others."""
    # Without O_NONBLOCK a pipe without a writer would be waited for, for ever.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or (pipe and not stat.S_ISDIR(mode)):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    raise OSError(errno.EINVAL, "it is no plain file")


def check_writable(folder: Path, size: int) -> None:
    """Write this many bytes to an unnamed file in a folder; raises OSError if that fails."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(size))
        file.flush()
        os.fsync(file.fileno())


def most_bytes() -> int:
    """$DILABENCH_MAX_FILE in bytes (MOST_BYTES by default)."""
    text = os.environ.get(LIMIT_VARIABLE)
    return parse_count(text, LIMIT_VARIABLE) if text else MOST_BYTES


def limited(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The chunks; raises OSError after more than `most_bytes`."""
    limit, size = most_bytes(), 0
    for chunk in chunks:
        size += len(chunk)
        if size > limit:
            raise OSError(errno.EFBIG, f"it has over {format_bytes(limit)}; {LIMIT_VARIABLE}=4G, say, reads more")
        yield chunk


def uncompressed(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The content of an xz file in parts of at most 1 MiB; raises OSError if it is none, or was cut."""
    # Few files are compressed.
    import lzma

    reader = lzma.LZMADecompressor()
    try:
        for chunk in chunks:
            yield reader.decompress(chunk, _CHUNK)
            while not (reader.eof or reader.needs_input):
                yield reader.decompress(b"", _CHUNK)
    except (lzma.LZMAError, EOFError) as error:
        raise OSError(errno.EINVAL, f"no xz file: {error}") from None
    if not reader.eof or reader.unused_data:
        raise OSError(errno.EINVAL, "no xz file: more follows its end" if reader.eof else "the xz file was cut")


def _chunks(file: io.FileIO, size: int, waiting: bool) -> Iterator[bytes]:
    while True:
        if waiting and not select.select([file], [], [], SILENCE_S)[0]:
            raise TimeoutError(errno.ETIMEDOUT, f"it sent no data within {SILENCE_S:g} s")
        chunk = file.read(size)
        if not chunk:
            return
        yield chunk
        size = _CHUNK


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of UTF-8 text, over any file that is there."""
    write_bytes(path, text.encode())


def write_bytes(
    path: Path, data: bytes | Iterable[bytes], *, replace: bool = True, way_out: str = OTHER_FOLDER
) -> bool:
    """Write a file in one step, from bytes or their parts: a full disk or a kill leaves the old file or none.

    Without `replace` an existing file stays, and the answer is False. Raises EnvironmentNotReady, which ends with
    `way_out`, if the folder cannot be made or written; then no file remains.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=".part")
        temporary = Path(name)
        with os.fdopen(descriptor, "wb") as file:
            file.writelines((data,) if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
        # A temporary file keeps others out; this one is meant to be read like any other.
        temporary.chmod(0o644)
        if replace:
            temporary.replace(path)
        else:
            _put_in_place(temporary, path)
        return True
    except OSError as error:
        if isinstance(error, FileExistsError) and path.is_file():
            return False
        raise EnvironmentNotReady(f"{str(path)!r} cannot be written: {error.strerror or error}; {way_out}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _put_in_place(temporary: Path, path: Path) -> None:
    """Give a file its name; raises FileExistsError if the name is taken, by a faster writer, say."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        # The process that creates the empty file owns the name.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
        temporary.replace(path)


def open_lock(path: Path, flags: int = 0) -> int:
    """A descriptor of a lock file, to read and write, which is created if missing; it is not locked yet.

    Raises OSError if it cannot be opened or is no plain file: a pipe would block for ever.
    """
    flags |= os.O_RDWR
    try:
        # In everybody's folder, Linux refuses to "create" a file that another user has (fs.protected_regular).
        return _opened(path, flags)
    except FileNotFoundError:
        return _opened(path, flags | os.O_CREAT)


@contextlib.contextmanager
def locked(path: Path, way_out: str, timeout_s: float | None = None) -> Iterator[None]:
    """Hold the lock file next to `path` while it is read, changed and written; others wait.

    After `timeout_s` seconds, and with such a limit on a file system without locks, continue without the lock. Raises
    EnvironmentNotReady, which ends with `way_out`, when the lock file cannot be made.
    """
    lock = path.with_name(f".{path.name}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(open_lock(lock), "r+")
    except OSError as error:
        raise EnvironmentNotReady(f"{str(lock)!r} cannot be written: {error.strerror or error}; {way_out}") from error
    with file:
        if timeout_s is None:
            fcntl.flock(file, fcntl.LOCK_EX)
        else:
            _try_lock(file.fileno(), timeout_s)
        yield


def _try_lock(descriptor: int, timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return
            time.sleep(_RETRY_S)
        except OSError:
            return
        else:
            return


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
    """Why no file can be written to a folder, or to its nearest parent if it is missing; None if one can."""
    try:
        whole = folder.absolute()
        check_writable(next(path for path in (whole, *whole.parents) if os.path.lexists(path)), 1 << 16)
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
