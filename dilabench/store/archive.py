"""Finished runs, one immutable compressed file each: `runs/<UTC date>-<run id>.json.gz`. No torch.

Everything else in the store can be rebuilt from them.
"""

import functools
import gc
import gzip
import io
import json
import marshal
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

import dilabench.plugins.manager  # noqa: F401 (which finds the kinds of pattern of plug-ins)
from dilabench import atomic_file
from dilabench.atomic_file import limited, read_file, write_bytes
from dilabench.errors import ConfigError, DilabenchError, EnvironmentNotReady
from dilabench.record import SCHEMA_VERSION, Check, Optimizations, Row, RunRecord
from dilabench.report.json import SUMMARY
from dilabench.store.migrations import has_current_rows, migrated, newer_tool
from dilabench.validation import (
    MAX_KEYS,
    OverLimitError,
    check_rows,
    check_shape,
    counted_chunks,
    describe,
    parsed,
    read_json,
)
from dilabench.workload.spec import Workload, WorkloadRequest

STORE_VARIABLE = "DILABENCH_STORE"
DEFAULT_STORE = Path("benchmark_results") / "store"
SUFFIX = ".json.gz"
_RUN_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,127}", re.ASCII)
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\+[1-9]\d{0,5})?" + re.escape(SUFFIX), re.ASCII)
_STAMP = re.compile(r"^\d{8}T\d{6}Z-|^undated-")

_FIRST_ROW = re.compile(rb'(?<!\\)"rows"\s*:\s*\[\s*(?=\{\s*"planned"\s*:)')
_PLANNED = b'"planned"'
# A text with more before its first row, or more space before one, is read as a whole.
_MOST_HEADER = 4 << 20
_MOST_SPACE = 64


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


class Archive:
    """The runs of a store. Files are only added, never changed; a damaged one does not affect the others."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = store_root() if root is None else root

    @property
    def folder(self) -> Path:
        """The folder of the run files."""
        return self.root / "runs"

    def add(self, record: RunRecord) -> str:
        """Store a record and return its file's name; the same record twice is one file.

        A resumed run has the id of its first part: it gets a separate file, `<id>+2`, which replaces the first.
        Raises ConfigError for an id that is no file name, EnvironmentNotReady when it cannot be written.
        """
        if not _RUN_ID.fullmatch(record.run_id):
            raise ConfigError(f"run id {record.run_id!r} is no file name; use letters, digits, '-', '_' and '.'")
        data = gzip.compress(record.model_copy(update={"digest": None}).model_dump_json().encode(), mtime=0)
        versions = {
            version: name for name in self.names() for run, version in [run_and_version(name)] if run == record.run_id
        }
        for name in versions.values():
            if self._holds(name, data):
                return name
        version = max(versions, default=0) + 1
        while True:
            suffix = "" if version == 1 else f"+{version}"
            path = self.folder / f"{stamp(record.started)}-{record.run_id}{suffix}{SUFFIX}"
            if write_whole(path, data, replace=False) or self._holds(path.name, data):
                return path.name
            version += 1

    def _holds(self, name: str, data: bytes) -> bool:
        try:
            return read_file(self.folder / name) == data
        except OSError:
            # The file may belong to another user.
            return False

    def names(self) -> list[str]:
        """Return the files' names by date; names without a date, or with one in the future, come first.

        Raises EnvironmentNotReady when the folder cannot be read.
        """
        try:
            with os.scandir(self.folder) as entries:
                # Folders, pipes and foreign files are no runs.
                names = [entry.name for entry in entries if _FILE.fullmatch(entry.name) and entry.is_file()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise unreadable(self.folder, error) from None
        return sorted(names, key=_by_date)

    def newest(self) -> list[str]:
        """Return the names, except parts that a later part of the same run replaces."""
        latest: dict[str, tuple[int, str]] = {}
        for name in self.names():
            run, version = run_and_version(name)
            latest[run] = max(latest.get(run, (0, "")), (version, name))
        return sorted((name for _, name in latest.values()), key=_by_date)

    def load(self, name: str) -> RunRecord:
        """The record of a file; see `read_compressed`."""
        return read_compressed(self.folder / name)

    def find(self, text: str) -> list[str]:
        """Names of the runs that a text means: 'latest', a file's name, or the beginning of a run's id or date."""
        names = self.newest() if text else []
        if text == "latest":
            return names[-1:]
        exact = [name for name in self.names() if text in (name, name.removesuffix(SUFFIX))]
        return exact or [name for name in names if name.startswith(text) or _STAMP.sub("", name).startswith(text)]


def _by_date(name: str) -> tuple[bool, str]:
    return is_past(name), name


def is_past(name: str) -> bool:
    """Return True if a name begins with a time no later than tomorrow, so the clock of the run was not ahead."""
    return (
        name[:15].replace("T", "").isdigit() and name[:15] <= f"{datetime.now(UTC) + timedelta(days=1):%Y%m%dT%H%M%S}"
    )


def stamp(moment: datetime | None) -> str:
    """A time in UTC in a file's name; 'undated' if it is not known."""
    return moment.strftime("%Y%m%dT%H%M%SZ") if moment else "undated"


def run_and_version(name: str) -> tuple[str, int]:
    """The run's id and which of its parts this is: '20260102T030405Z-abc+2.json.gz' -> ('abc', 2)."""
    stem, _, version = _STAMP.sub("", name).removesuffix(SUFFIX).partition("+")
    return stem, int(version) if re.fullmatch(r"[1-9]\d{0,5}", version, re.ASCII) else 1


def read_row_by_row(chunks: Iterable[bytes]) -> RunRecord | None:
    """The record in the parts of a JSON text, if it is of the current version and its rows begin with "planned".

    None if it differs in any way from what dilabench writes: reading it as a whole then finds the cause.
    Raises ValueError for more rows or values than a record may have, and what `chunks` raises.

    The text is one record exactly if each part is valid JSON and so is the text with an empty list of rows. No more of
    the text than a row and a chunk is in memory at a time.
    """
    # The objects made here have no cycles, so the garbage collector would scan them repeatedly without effect.
    collects = gc.isenabled()
    gc.disable()
    try:
        return _read_rows(counted_chunks(chunks))
    except OverLimitError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    finally:
        if collects:
            gc.enable()


def _read_rows(chunks: Iterator[bytes]) -> RunRecord | None:
    text = bytearray()
    while (found := _FIRST_ROW.search(text)) is None:
        chunk = next(chunks, None)
        if chunk is None or len(text) > _MOST_HEADER:
            return None
        text += chunk
    head = bytes(text[: found.end()])
    del text[: found.end()]
    reader = _RowReader()
    rows: list[Row] = []
    for row in _row_texts(text, chunks):
        check_rows(len(rows) + 2)
        rows.append(reader.read(row))
    tail = text.decode()
    _, end = json.JSONDecoder().raw_decode(tail)
    header = read_json(head + tail[end:].encode())
    if header.get("rows") != [] or not has_current_rows(header.get("schema_version")):
        return None
    rows.append(reader.read(tail[:end].encode()))
    return RunRecord.model_validate({**header, "schema_version": SCHEMA_VERSION, "rows": rows})


def _row_texts(text: bytearray, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The rows but the last, which stays in `text` with all that follows. `text` begins with the first row.

    A row begins at each `{` behind a comma that "planned" follows. Texts inside a row only make it no JSON.
    """
    place = text.find(_PLANNED) + len(_PLANNED)
    while True:
        found = text.find(_PLANNED, place)
        if found < 0:
            place = max(place, len(text) - len(_PLANNED))
            chunk = next(chunks, None)
            if chunk is None:
                return
            text += chunk
            continue
        start = text.rfind(b"{", max(0, found - _MOST_SPACE), found)
        place = found + len(_PLANNED)
        before = text[max(0, start - _MOST_SPACE) : max(0, start)].rstrip()
        if start >= 0 and before.endswith(b",") and not text[start + 1 : found].strip():
            yield bytes(text[:start]).rstrip().removesuffix(b",")
            del text[:start]
            place -= start


class _RowReader:
    """Reads rows. Parts that rows share are in memory once: requests, workloads, checks, pydantic's names."""

    def __init__(self) -> None:
        self._parts: dict[tuple[type[BaseModel], bytes], BaseModel] = {}
        self._names: dict[frozenset[str] | type[BaseModel], set[str]] = {}

    def read(self, text: bytes) -> Row:
        """The row in a JSON text. Raises one of several errors for what dilabench does not write."""
        document = parsed(text)
        if text.count(b":") > MAX_KEYS:
            check_shape(document)
        # Figures of `report --json`, which follow from the samples.
        document.pop(SUMMARY, None)
        planned = document["planned"]
        if (asked := planned.get("requested_workload")) is not None:
            planned["requested_workload"] = self._shared(WorkloadRequest, asked)
        case = planned["case"]
        case["workload"] = self._shared(Workload, case["workload"])
        # The rest of a row has no fields of any depth.
        case["optimizations"] = self._shared(Optimizations, case.get("optimizations", {}))
        verification = document["outcome"].get("verification")
        if verification and isinstance(checks := verification["checks"], list):
            # Most checks without a figure are alike.
            verification["checks"] = [
                self._shared(Check, check) if check.get("error") is None else check for check in checks
            ]
        row = Row.model_validate(document)
        self._share_names(row)
        return row

    def _shared(self, kind: type[BaseModel], document: Any) -> BaseModel:
        """The model of a part of a row, the same one for equal parts."""
        # It differs wherever the JSON does. Version 2 does not depend on which objects are the same.
        key = kind, marshal.dumps(document, 2)
        model = self._parts.get(key)
        if model is None:
            check_shape(document)
            model = self._parts[key] = kind.model_validate(document)
            self._share_names(model)
        return model

    def _share_names(self, outer: BaseModel) -> None:
        """Let a model and those in it share pydantic's sets of the names that they were given.

        These sets take half of a row's memory.
        """
        models = [outer]
        for model in models:
            kind, given, values = type(model), model.__pydantic_fields_set__, model.__dict__
            # Mostly all fields are given.
            key = kind if len(given) == len(values) else frozenset(given)
            known = self._names.get(key)
            if known is given:
                # A part that an earlier row has, too.
                continue
            if known is None:
                self._names[key] = given
            else:
                # As `model_construct` does, which copies the values, too. A frozen model lets no attribute be set.
                object.__setattr__(model, "__pydantic_fields_set__", known)
            for name in _fields_of_models(kind):
                value = values[name]
                # `hasattr` is many times as fast as pydantic's `isinstance`.
                inner = value if type(value) is tuple else (value,)
                models += [part for part in inner if hasattr(part, "__pydantic_fields_set__")]


@functools.cache
def _fields_of_models(kind: type[BaseModel]) -> tuple[str, ...]:
    return tuple(name for name, field in kind.model_fields.items() if _names_a_model(field.annotation))


def _names_a_model(annotation: Any) -> bool:
    """Return True if the type of a field is a model, or has one in it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return True
    return any(map(_names_a_model, get_args(annotation)))


def read_whole(chunks: Iterable[bytes]) -> Any:
    """The JSON document in the parts of a text. Raises ValueError for what is none, and as `read_row_by_row`."""
    document = read_json(b"".join(counted_chunks(chunks)))
    if isinstance(document, dict) and isinstance(rows := document.get("rows"), list):
        check_rows(len(rows))
    return document


def read_compressed(path: Path) -> RunRecord:
    """A record from a compressed file, older schema versions included.

    Raises ConfigError naming the file when it is missing, cut short, or no record, EnvironmentNotReady when this user
    may not read it.
    """
    try:
        packed = read_file(path)
        if (record := read_row_by_row(_unpacked(packed))) is not None:
            return record
        document = read_whole([b"".join(_unpacked(packed))])
    except FileNotFoundError:
        raise ConfigError(f"run file {str(path)!r} does not exist; see `dilabench history`") from None
    except (gzip.BadGzipFile, EOFError, zlib.error, ValueError) as error:
        raise ConfigError(
            f"run file {str(path)!r} is damaged ({error}); remove it, other runs are not touched"
        ) from None
    except OSError as error:
        raise unreadable(path, error) from None
    if not isinstance(document, dict):
        raise ConfigError(f"run file {str(path)!r} is not a run record: it holds no object")
    try:
        return RunRecord.model_validate(migrated(document, path))
    except ValidationError as error:
        why = describe(error, RunRecord)[:300] + newer_tool(document)
        raise ConfigError(f"run file {str(path)!r} is not a run record: {why}") from None


def _unpacked(packed: bytes) -> Iterator[bytes]:
    """The parts of a compressed text; raises OSError after more than `most_bytes`."""
    file = gzip.GzipFile(fileobj=io.BytesIO(packed))
    return limited(iter(lambda: file.read(1 << 20), b""))


def sound_records(archive: Archive, names: list[str]) -> Iterator[tuple[str, RunRecord | DilabenchError]]:
    """Each name with its record, or with the error that says why there is none."""
    for name in names:
        try:
            yield name, archive.load(name)
        except DilabenchError as error:
            yield name, error
