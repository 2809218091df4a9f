"""Patterns that files may give: block masks as `.npy`, or as `.json` with lists of key blocks; and other arrays.

`numpy` is imported on use.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from pydantic import model_validator

from dilabench.atomic_file import OTHER_CACHE, cache_folder, file_chunks, read_file, write_bytes
from dilabench.errors import ConfigError, said
from dilabench.patterns.pattern import Pattern
from dilabench.validation import validated

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Mask = NDArray[np.bool_]

# How files of one array begin, and of several, which are refused.
ARRAYS = (b"\x93NUMPY", b"PK")


class Given(NamedTuple):
    """What a file may give to a pattern, with the fields `{what}_file` and `{what}_digest`.

    choice, value: the field that names how it is made otherwise, and its value for a file. both: the two in errors.
    """

    what: str
    choice: str
    value: str
    both: str


class GivenByFile(Pattern):
    """A pattern of which a file may give an array; it then fits one length only."""

    given: ClassVar[Given]

    @model_validator(mode="after")
    def _file_or_choice(self) -> Self:
        if self.has_fixed_length != (getattr(self, f"{self.given.what}_file") is not None):
            raise ValueError(f"{self.given.both} need each other; give both or neither")
        return self

    @classmethod
    def from_request(cls, fields: Mapping[str, Any]) -> Self:
        """A file replaces the choice. Raises ConfigError when it cannot be read."""
        request, (what, choice, value, _) = dict(fields), cls.given
        if request.get(f"{what}_file"):
            name, digest = named_file(request[f"{what}_file"], what)
            request = {choice: value, **request, f"{what}_file": name, f"{what}_digest": digest}
        return validated(cls, request)

    @property
    def has_fixed_length(self) -> bool:
        """Return True for a file, whose array has one size."""
        return bool(getattr(self, self.given.choice) == self.given.value)

    def files(self) -> tuple[tuple[Path, str], ...]:
        """The file, if there is one."""
        name, digest = (getattr(self, f"{self.given.what}_{part}") for part in ("file", "digest"))
        return ((Path(name), digest),) if name and digest else ()


def mask_digest(path: Path, what: str = "mask") -> str:
    """SHA-256 (16 hex digits) of the bytes of a plain file of `what`; raises ConfigError when it cannot be read."""
    digest = hashlib.sha256()
    try:
        for chunk in file_chunks(path):
            digest.update(chunk)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{what} file {str(path)!r} cannot be read: {reason}") from None
    return digest.hexdigest()[:16]


def named_file(name: str, what: str = "mask") -> tuple[str, str]:
    """The path and the digest of a file of `what` that a user names; a pipe's content is kept in the cache folder.

    Raises ConfigError when it cannot be read, EnvironmentNotReady when it cannot be kept.
    """
    # Methods of Path raise for a text that cannot be a file name.
    if os.path.exists(name) and not os.path.isfile(name):
        # It can be read once, and a request reads its mask for each length.
        name = _kept.get(name) or _kept.setdefault(name, _kept_from_pipe(Path(name), what))
    return name, mask_digest(Path(name), what)


# The files with what pipes sent to this process, by the name of the pipe.
_kept: dict[str, str] = {}


def _kept_from_pipe(path: Path, what: str) -> str:
    with _readable(path, what, ".npy or .json", "send another"):
        data = read_file(path, pipe=True)
    digest = hashlib.sha256(data).hexdigest()[:16]
    kept = cache_folder() / "masks" / f"{digest}{'.npy' if data.startswith(ARRAYS) else '.json'}"
    write_bytes(kept, data, way_out=OTHER_CACHE)
    return str(kept)


def with_kept_files(fields: Any) -> Any:
    """The JSON of a request with the name of the kept file for each pipe that was read: another process reads it."""
    if isinstance(fields, dict):
        return {name: with_kept_files(value) for name, value in fields.items()}
    if isinstance(fields, list):
        return [with_kept_files(value) for value in fields]
    return _kept.get(fields, fields) if isinstance(fields, str) else fields


# Folders of the records read so far, which hold copies of their masks.
_kept_in: list[Path] = []


def keep_mask(path: Path, digest: str, folder: Path) -> None:
    """Copy the mask file of a digest into a folder, so that a record can be read when the file is gone.

    Raises ConfigError when the file is gone or has changed, EnvironmentNotReady when the copy cannot be written.
    """
    _check_unchanged(path, digest)
    write_bytes(_copy(path, digest, folder), file_chunks(path))


def look_for_masks_in(folder: Path) -> None:
    """Let `mask_of_digest` look in this folder, too."""
    if folder not in _kept_in:
        _kept_in.append(folder)


def mask_of_digest(path: Path, digest: str, what: str = "mask") -> Path:
    """Return the file of `what`, or a stored copy if it is gone or has changed. Raises ConfigError if there is
    neither.
    """
    try:
        _check_unchanged(path, digest, what)
    except ConfigError:
        for folder in _kept_in:
            copy = _copy(path, digest, folder)
            with suppress(ConfigError):
                _check_unchanged(copy, digest)
                return copy
        raise
    return path


def _check_unchanged(path: Path, digest: str, what: str = "mask") -> None:
    if mask_digest(path, what) != digest:
        raise ConfigError(f"{what} file {str(path)!r} has changed since the request was made; start again")


def _copy(path: Path, digest: str, folder: Path) -> Path:
    return folder / f"{digest}{path.suffix}"


def read_mask_file(path: Path, blocks: int) -> Mask:
    """Read a block mask: `.npy` of bool or 0/1 integers, [n, n] or [heads, n, n]; or `.json`.

    JSON: a list of key blocks per row, [[0], [0, 1], ...], for all heads, or one such list per head.
    Raises ConfigError with the place of the mistake.
    """
    import numpy as np

    if path.suffix == ".json":
        with _readable(path, "mask", ".json", "give a list of key blocks for each row of blocks: [[0], [0, 1]]"):
            mask = _from_lists(json.loads(read_file(path)), blocks, path)
    else:
        with _readable(path, "mask", ".npy", "save bool [n, n] or [heads, n, n] with numpy.save, or give .json"):
            mask = _array(path)
    if mask.dtype != bool:
        if not np.issubdtype(mask.dtype, np.integer) or not np.isin(mask, (0, 1)).all():
            raise ConfigError(f"mask file {str(path)!r} holds {mask.dtype}; a block mask is bool, or integers 0 and 1")
        mask = mask.astype(bool)
    if mask.ndim == 2:
        mask = mask[None]
    if mask.ndim != 3:
        raise ConfigError(f"mask file {str(path)!r} has {mask.ndim} dimensions; it must be [n, n] or [heads, n, n]")
    return mask


def read_array(path: Path, digest: str | None, what: str, form: str) -> NDArray[Any]:
    """The one array of a `.npy` file of `what` with this digest, or of its stored copy; None: whatever it holds.

    Raises ConfigError when it cannot be read, with `form`: what to save.
    """
    with _readable(path, what, ".npy", f"save {form} with numpy.save"):
        return _array(path if digest is None else mask_of_digest(path, digest, what))


def _array(path: Path) -> NDArray[Any]:
    import numpy as np

    start = next(iter(file_chunks(path)), b"")[:16]
    if not start.startswith(ARRAYS):
        raise ValueError(f"it begins with {start!r}" if start else "it is empty")
    # Memory-mapped, because a header may claim any size; the file's actual size decides.
    mapped = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(mapped, np.ndarray):
        raise ValueError("it holds several arrays")
    return np.array(mapped)


@contextmanager
def _readable(path: Path, what: str, kind: str, way_out: str) -> Iterator[None]:
    """Turn errors while the file, which should be of this kind, is read into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{what} file {str(path)!r} cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError, MemoryError, RecursionError, OverflowError) as error:
        raise ConfigError(f"{what} file {str(path)!r} is not a valid {kind} file: {said(error)}; {way_out}") from None


def _from_lists(content: Any, blocks: int, path: Path) -> Mask:
    import numpy as np

    if not isinstance(content, list) or not content:
        raise ConfigError(f"mask file {str(path)!r} must hold a list with one list of key blocks per row of blocks")
    per_head = isinstance(content[0], list) and bool(content[0]) and isinstance(content[0][0], list)
    heads = content if per_head else [content]
    if not all(isinstance(rows, list) for rows in heads):
        raise ConfigError(f"mask file {str(path)!r}: some heads are lists of rows and others are not")
    mask = np.zeros((len(heads), len(heads[0]), blocks), dtype=bool)
    for place, key in _entries(heads, path):
        if place[1] >= mask.shape[1]:
            raise ConfigError(f"mask file {str(path)!r}: head {place[0]} has more rows than head 0 ({mask.shape[1]})")
        if not isinstance(key, int) or isinstance(key, bool) or not 0 <= key < blocks:
            raise ConfigError(
                f"mask file {str(path)!r}, head {place[0]}, row {place[1]}: key block {key!r} is not in 0..{blocks - 1}"
            )
        mask[(*place, key)] = True
    return mask


def _entries(heads: list[Any], path: Path) -> Iterator[tuple[tuple[int, int], Any]]:
    for head, rows in enumerate(heads):
        for row, keys in enumerate(rows):
            if not isinstance(keys, list):
                raise ConfigError(
                    f"mask file {str(path)!r}, head {head}, row {row}: {keys!r} is not a list of key blocks"
                )
            for key in keys:
                yield (head, row), key
