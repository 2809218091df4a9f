"""Finished runs, one immutable compressed file each: `runs/<UTC date>-<run id>.json.gz`. No torch.

Everything else in the store can be rebuilt from them.
"""

import gc
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

from pydantic import ValidationError

from dilabench.atomic_file import limited, read_file
from dilabench.errors import ConfigError, DilabenchError
from dilabench.record import SCHEMA_VERSION, Measured, Row, RunRecord, Slot
from dilabench.report.json import SUMMARY
from dilabench.store.files import store_root, unreadable, write_whole
from dilabench.store.migrations import migrated
from dilabench.validation import check_counts, check_depth, describe, parsed, read_json

SUFFIX = ".json.gz"
_RUN_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,127}", re.ASCII)
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\+[1-9]\d{0,5})?" + re.escape(SUFFIX), re.ASCII)
_STAMP = re.compile(r"^\d{8}T\d{6}Z-|^undated-")

_FIRST_ROW = re.compile(rb'(?<!\\)"rows"\s*:\s*\[\s*(?=\{\s*"planned"\s*:)')
_PLANNED = b'"planned"'
_SLOT_FIELDS = set(Slot.model_fields)


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
        data = gzip.compress(record.model_dump_json().encode(), mtime=0)
        versions = {
            version: name for name in self.names() for run, version in [run_and_version(name)] if run == record.run_id
        }
        for name in versions.values():
            if self._holds(name, data):
                return name
        version = max(versions, default=0) + 1
        while True:
            suffix = "" if version == 1 else f"+{version}"
            path = self.folder / f"{stamp(record.started_at)}-{record.run_id}{suffix}{SUFFIX}"
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


def stamp(started_at: str) -> str:
    """A time of ISO 8601 as UTC in a file's name; 'undated' for one that cannot be read."""
    moment = moment_of(started_at)
    return moment.strftime("%Y%m%dT%H%M%SZ") if moment else "undated"


def moment_of(text: str | None) -> datetime | None:
    """A time of ISO 8601, taken as UTC if it names no zone; None if it cannot be read."""
    try:
        moment = datetime.fromisoformat(text or "")
        return moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def run_and_version(name: str) -> tuple[str, int]:
    """The run's id and which of its parts this is: '20260102T030405Z-abc+2.json.gz' -> ('abc', 2)."""
    stem, _, version = _STAMP.sub("", name).removesuffix(SUFFIX).partition("+")
    return stem, int(version) if re.fullmatch(r"[1-9]\d{0,5}", version, re.ASCII) else 1


def read_row_by_row(text: bytes) -> RunRecord | None:
    """The record that a JSON text holds, if it is of the current version and its rows begin with "planned".

    None if it differs in any way from what dilabench writes: reading it as a whole then finds the cause.
    Raises ValueError for more rows or values than a record may have.

    The text is one record exactly if each part is valid JSON and so is the text with an empty list of rows.
    """
    check_counts(text)
    found = _FIRST_ROW.search(text)
    if found is None:
        return None
    # The objects made here have no cycles, so the garbage collector would scan them repeatedly without effect.
    collects = gc.isenabled()
    gc.disable()
    try:
        *inner, (last, rest) = pairwise([*_starts(text, found.end()), len(text)])
        tail = text[last:rest].decode()
        _, end = json.JSONDecoder().raw_decode(tail)
        header = read_json(text[: found.end()] + tail[end:].encode())
        if header.get("rows") != [] or header.get("schema_version") != SCHEMA_VERSION:
            return None
        rows = [_row(text[start:stop].rstrip().removesuffix(b",")) for start, stop in inner]
        rows.append(_row(tail[:end].encode()))
        return RunRecord.model_validate({**header, "rows": rows})
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    finally:
        if collects:
            gc.enable()


def _starts(text: bytes, first: int) -> Iterator[int]:
    """The start of each row: `{` after a comma and before "planned". Texts inside a row only make it no JSON."""
    yield first
    place = text.find(_PLANNED, first) + len(_PLANNED)
    while (place := text.find(_PLANNED, place)) >= 0:
        start = text.rfind(b"{", first, place)
        if not text[start + 1 : place].strip() and text[max(0, start - 32) : start].rstrip().endswith(b","):
            yield start
        place += len(_PLANNED)


def _row(text: bytes) -> Row:
    document = parsed(text)
    # The samples: of fixed depth, and the largest part of a row.
    timings = document["outcome"].pop("timings", None)
    check_depth(document)
    if timings is not None:
        document["outcome"]["timings"] = timings
    # Figures of `report --json`, which follow from the samples.
    document.pop(SUMMARY, None)
    row = Row.model_validate(document)
    for timing in row.outcome.timings if isinstance(row.outcome, Measured) else ():
        for slot in timing.slots:
            # pydantic keeps a set of names for each, larger than a slot's samples; most name all fields.
            if len(slot.model_fields_set) == len(_SLOT_FIELDS):
                object.__setattr__(slot, "__pydantic_fields_set__", _SLOT_FIELDS)
    return row


def read_compressed(path: Path) -> RunRecord:
    """A record from a compressed file, older schema versions included.

    Raises ConfigError naming the file when it is missing, cut short, or no record, EnvironmentNotReady when this user
    may not read it.
    """
    try:
        packed = gzip.GzipFile(fileobj=io.BytesIO(read_file(path)))
        text = b"".join(limited(iter(lambda: packed.read(1 << 20), b"")))
        if (record := read_row_by_row(text)) is not None:
            return record
        document = read_json(text)
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
        raise ConfigError(f"run file {str(path)!r} is not a run record: {describe(error, RunRecord)[:300]}") from None


def sound_records(archive: Archive, names: list[str]) -> Iterator[tuple[str, RunRecord | DilabenchError]]:
    """Each name with its record, or with the error that says why there is none."""
    for name in names:
        try:
            yield name, archive.load(name)
        except DilabenchError as error:
            yield name, error
