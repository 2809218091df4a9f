"""Files of a run: rows streamed line by line, the record written in one step, readable however a run ended. No torch.

A run's folder is `<UTC time>-<suite>-<run id>/`. It holds `rows.jsonl` (a header line, then a line per finished case),
once the run has ended `run.json` (the RunRecord), and in `masks/` copies of the mask files that its workloads name.
"""

import contextlib
import fcntl
import io
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from dilabench.atomic_file import (
    OTHER_FOLDER,
    check_writable,
    file_chunks,
    limited,
    open_to_append,
    read_file,
    uncompressed,
    write_bytes,
)
from dilabench.errors import ConfigError, EnvironmentNotReady
from dilabench.metadata import CUT_SHORT
from dilabench.patterns.mask_files import keep_mask, look_for_masks_in
from dilabench.record import SCHEMA_VERSION, Measured, Row, RunHeader, RunRecord, Skipped
from dilabench.report.json import SUMMARY, is_as_written, to_text
from dilabench.store.archive import is_past, read_row_by_row, read_whole
from dilabench.store.migrations import migrated, migrated_row, newer_tool
from dilabench.validation import OverLimitError, check_rows, counted_chunks, describe, read_json
from dilabench.workload.spec import Workload

RECORD_NAME = "run.json"
ROWS_NAME = "rows.jsonl"
MASKS_NAME = "masks"
# Keys that every version of a record has.
MARKS = ("schema_version", "run_id")
# A test write of this size detects a nearly full disk before the measurement instead of after it.
RESERVE_BYTES = 1 << 20


class RunFolder:
    """The folder of a run: `start` makes it, `row` is on disk when it returns, `finish` writes the record."""

    def __init__(self, path: Path, *, resumed: bool = False) -> None:
        self.path = path
        self._resumed = resumed
        self._stream: io.FileIO | None = None

    def _open(self, waiting: Callable[[str], None]) -> None:
        """Open and lock the rows until the run ends, so that no other process resumes it meanwhile."""
        path = self.path / ROWS_NAME
        self._stream = open_to_append(path)
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting(f"run {str(self.path)!r} still goes; waiting for its end")
            fcntl.flock(self._stream, fcntl.LOCK_EX)

    @classmethod
    def create(cls, base: Path, suite: str, run_id: str) -> "RunFolder":
        """A new folder under `base`. Raises EnvironmentNotReady when it cannot be made or written to."""
        moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        folder = cls(base / f"{moment}-{suite}-{run_id}")
        with _refused(folder.path):
            folder.path.mkdir(parents=True)
            _probe(folder.path)
        return folder

    @classmethod
    def resume(cls, run: Path, waiting: Callable[[str], None] = lambda _: None) -> "RunFolder":
        """The folder of a run to continue, given as folder or as one of its files.

        The folder stays locked until it is closed. A run that is still running is waited for, and `waiting` receives a
        message; only its end shows which rows it has.
        """
        path = run if run.is_dir() else run.parent
        if not (path / ROWS_NAME).exists():
            raise ConfigError(f"{str(run)!r} cannot be resumed: there is no {ROWS_NAME}; name the folder of a run")
        with _refused(path):
            _probe(path)
            folder = cls(path, resumed=True)
            folder._open(waiting)
        return folder

    def start(self, header: RunHeader) -> None:
        """Write the header line; a resumed run keeps its own, without a line that its death cut short."""
        path = self.path / ROWS_NAME
        with _refused(path):
            if self._stream is None:
                self._open(lambda _: None)
            if self._resumed:
                _end_last_line(path)
                # The rows are now newer than this record; `finish` writes it again.
                (self.path / RECORD_NAME).unlink(missing_ok=True)
            else:
                self._append({"header": header.model_dump(mode="json")})

    def keep_masks(self, workloads: Iterable[Workload]) -> None:
        """Copy the mask files of the patterns: reports need them even if the originals are deleted."""
        for path, digest in {file for workload in workloads for file in workload.pattern.files()}:
            keep_mask(path, digest, self.path / MASKS_NAME)

    def row(self, row: Row) -> None:
        """Append a row and sync it to disk. Raises EnvironmentNotReady if that fails; earlier rows stay intact."""
        with _refused(self.path / ROWS_NAME, self._how_to_go_on):
            self._append({"row": row.model_dump(mode="json")})

    def finish(self, record: RunRecord) -> None:
        """Write run.json in one step and close the stream. Raises EnvironmentNotReady if that fails; rows stay."""
        self.close()
        way_out = self._how_to_go_on if self.can_be_resumed else OTHER_FOLDER
        write_bytes(self.path / RECORD_NAME, to_text(record).encode(), way_out=way_out)

    def close(self) -> None:
        """Close the stream of a run that ends without a record; what was written stays."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    @property
    def _how_to_go_on(self) -> str:
        return f"the rows so far are kept: free some space and continue with --resume {self.path}"

    @property
    def can_be_resumed(self) -> bool:
        """Return True if there is a file that `resume` finds."""
        return (self.path / ROWS_NAME).exists()

    def discard_if_empty(self) -> None:
        """Remove the folder of a run that wrote nothing but copies of masks."""
        if self.path.is_dir() and {entry.name for entry in self.path.iterdir()} <= {MASKS_NAME}:
            shutil.rmtree(self.path)

    def _append(self, line: dict[str, Any]) -> None:
        assert self._stream is not None, "start() comes first"
        data = (json.dumps(line, separators=(",", ":")) + "\n").encode()
        size = os.fstat(self._stream.fileno()).st_size
        try:
            written = self._stream.write(data)
            if written != len(data):
                raise OSError(28, "No space left on device")
            os.fsync(self._stream.fileno())
        except OSError:
            # A partial line would corrupt the next one.
            os.ftruncate(self._stream.fileno(), size)
            raise


def folder_of_run(text: str, base: Path) -> Path:
    """The folder or file of a run that a text means: a path, the id of a run under `base`, or 'latest', the newest.

    Raises ConfigError when there is none.
    """
    if text != "latest" and os.path.exists(text):
        return Path(text)
    # Their names begin with the time.
    folders = (path.parent for path in base.glob(f"*/{ROWS_NAME}"))
    runs = sorted(folders, key=lambda folder: (is_past(folder.name), folder.name))
    matching = runs if text == "latest" else [path for path in runs if path.name.endswith(f"-{text}")]
    if not runs:
        raise ConfigError(
            f"run {text!r} does not exist, and {str(base)!r} has no runs; `dilabench run quick` makes one there; for a "
            "run elsewhere name its folder"
        )
    if not matching:
        raise ConfigError(
            f"run {text!r} does not exist, nor is it the id of one of the {len(runs)} runs in {str(base)!r}; name the "
            "folder of a run, or with -o the folder that its folder is in"
        )
    return matching[-1]


def read_record(run: Path) -> RunRecord:
    """Return the record of a run, given as folder, run.json, run.json.xz or rows.jsonl.

    Without run.json it is built from the rows.

    Older schema versions load. Raises ConfigError when there is no run, or one that cannot be read or is too new.
    """
    path = run
    if os.path.isdir(run):
        path = run / RECORD_NAME if os.path.exists(run / RECORD_NAME) else run / ROWS_NAME
    # Methods of Path raise for a folder that may not be entered.
    if os.path.isdir(path.parent / MASKS_NAME):
        look_for_masks_in(path.parent / MASKS_NAME)
    if path.name.endswith(".jsonl"):
        header, rows = read_rows(path)
        return RunRecord.model_validate({**header.model_dump(), "rows": rows, "status": "interrupted"})
    # A pipe can be read only once.
    plain = os.path.isfile(path)
    data = None if plain else _data(path, pipe=path == run)
    try:
        if (record := read_row_by_row([data] if data is not None else _chunks(path))) is not None:
            return record
        data = _data(path) if data is None else data
        _decoded(data, path)
        document = read_whole([data])
    except OverLimitError as error:
        raise _over_limit(path, error) from None
    except ValueError as error:
        beside = path.parent / ROWS_NAME
        way_out = f"name {str(beside)!r}, which has its rows" if beside.is_file() else "copy it again from its source"
        raise ConfigError(f"{str(path)!r} is not a run record, or was cut: {error}; {way_out}") from None
    if not isinstance(document, dict) or not document.keys() & MARKS:
        raise ConfigError(
            f"{str(path)!r} is JSON, but no run record: it has none of {', '.join(MARKS)}, so no run of dilabench "
            f"wrote it; name a run's folder or its {RECORD_NAME}"
        )
    listed = document.get("rows")
    for row in listed if isinstance(listed, list) else ():
        # The output of `report --json` is accepted, too; its figures follow from the samples.
        if isinstance(row, dict):
            row.pop(SUMMARY, None)
    if document.get("schema_version") != SCHEMA_VERSION:
        document = migrated(document, path)
    return _validated(RunRecord, document, path)


def is_edited(run: Path, record: RunRecord) -> bool:
    """Whether the text of a run's run.json, which is `record`, is not the one whose digest it carries.

    A record of a version without digests, and one that was built from rows, count as unchanged.
    """
    path = run / RECORD_NAME if os.path.isdir(run) else run
    # A pipe can be read only once.
    return record.digest is not None and os.path.isfile(path) and not is_as_written(_chunks(path))


def read_rows(run: Path) -> tuple[RunHeader, tuple[Row, ...]]:
    """Header and rows of a rows.jsonl, the latest row of each case. A truncated last line is skipped.

    Raises ConfigError when there is no header or another line cannot be read.
    """
    path = run / ROWS_NAME if os.path.isdir(run) else run
    header: RunHeader | None = None
    version = SCHEMA_VERSION
    rows: dict[str, Row] = {}
    for number, line in _lines(path):
        if isinstance(line.get("header"), dict):
            if header is None:
                version = str(line["header"].get("schema_version", version))
                header = _validated(RunHeader, migrated(line["header"], path), path)
        elif "row" in line:
            row = _validated(Row, migrated_row(line["row"], version, path), path, number, header)
            rows[row.case.case_id] = row
            try:
                check_rows(len(rows))
            except OverLimitError as error:
                raise _over_limit(path, error) from None
    if header is None:
        raise ConfigError(f"{str(path)!r} has no header line, so it cannot be resumed or reported; start a new run")
    return header, tuple(rows.values())


def refuse_other_rows(run: Path, record: RunRecord) -> None:
    """Raise ConfigError if a run's rows.jsonl and its record have different rows: one was edited or truncated."""
    folder = run if os.path.isdir(run) else run.parent
    if not os.path.exists(folder / ROWS_NAME) or not os.path.exists(folder / RECORD_NAME):
        return
    streamed = {row.case.case_id: row for row in read_rows(folder)[1]}
    for row in record.rows:
        if streamed.pop(row.case.case_id, None) != row:
            where = f"{row.case.implementation} on {row.case.workload.label()}"
            raise ConfigError(
                f"run {str(run)!r}: {RECORD_NAME} and {ROWS_NAME} differ on {where}; one of them was edited or "
                "truncated: copy the run again from its source"
            )
    # A resumed run plans the rows that the budget skipped again, and a newer dilabench may have dropped them.
    if lacking := sum(not _is_open(row) for row in streamed.values()):
        raise ConfigError(f"run {str(run)!r}: {RECORD_NAME} lacks {lacking} of the rows in {ROWS_NAME}; it was edited")


def completed_rows(run: Path, header: RunHeader | None = None) -> tuple[Row, ...]:
    """Rows that `--resume` keeps: all, failed ones too, except those that the budget skipped or an interrupt cut short.

    With the header of the run that continues, another device or machine is refused: times would not compare.
    """
    old, rows = read_rows(run if run.is_dir() else run.parent)
    if header is not None:
        _same_place(old, header)
    return tuple(row for row in rows if not _is_open(row))


def _is_open(row: Row) -> bool:
    if isinstance(row.outcome, Measured):
        return any(note.code == CUT_SHORT.key for note in row.outcome.notes)
    return isinstance(row.outcome, Skipped) and row.outcome.code == "budget"


def _same_place(old: RunHeader, new: RunHeader) -> None:
    ours, theirs = new.environment.fingerprint_hard, old.environment.fingerprint_hard
    for field in sorted(ours.keys() & theirs.keys()):
        if ours[field] != theirs[field]:
            raise ConfigError(
                f"run {old.run_id} cannot continue here: its {field} was {theirs[field]!r}, now it is {ours[field]!r}; "
                "start a new run"
            )


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        data = b"".join(counted_chunks([_data(path)]))
    except OverLimitError as error:
        raise _over_limit(path, error) from None
    lines = _decoded(data, path).split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            document = read_json(line)
        except ValueError:
            # The last line was being written when the run died.
            if number == len(lines):
                continue
            raise ConfigError(f"{str(path)!r} line {number} cannot be read; remove it and resume") from None
        if isinstance(document, dict):
            yield number, document


def _end_last_line(path: Path) -> None:
    """Close a last line that lacks only its line feed, and remove one that the death of the run cut short."""
    data = read_file(path)
    last = data[data.rfind(b"\n") + 1 :]
    if not last:
        return
    try:
        read_json(last)
    except ValueError:
        os.truncate(path, len(data) - len(last))
    else:
        with open_to_append(path) as file:
            file.write(b"\n")


def _over_limit(path: Path, error: OverLimitError) -> ConfigError:
    return ConfigError(f"{str(path)!r} cannot be read: {error}")


def _data(path: Path, *, pipe: bool = False) -> bytes:
    if path.suffix == ".xz":
        return b"".join(_chunks(path))
    try:
        return read_file(path, pipe=pipe)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None


def _chunks(path: Path) -> Iterator[bytes]:
    """The parts of a file, uncompressed if its name ends in .xz."""
    try:
        chunks = file_chunks(path)
        yield from limited(uncompressed(chunks)) if path.suffix == ".xz" else chunks
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None


def _decoded(data: bytes, path: Path) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise _unreadable(path, "not UTF-8 text") from None


def _unreadable(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"run {str(path)!r} cannot be read: {reason}; name a run's folder or its {RECORD_NAME}")


@contextlib.contextmanager
def _refused(path: Path, way_out: str = OTHER_FOLDER) -> Iterator[None]:
    """Turn an OSError inside the block into EnvironmentNotReady with the path and a way out."""
    try:
        yield
    except OSError as error:
        raise EnvironmentNotReady(f"{str(path)!r} cannot be written: {error.strerror or error}; {way_out}") from error


def _probe(folder: Path) -> None:
    """Check that a file of some size can be written. A folder that was created only for this is removed if not."""
    try:
        check_writable(folder, RESERVE_BYTES)
    except OSError:
        if not any(folder.iterdir()):
            folder.rmdir()
        raise


ModelT = TypeVar("ModelT", bound=BaseModel)


def _validated(
    model: type[ModelT], document: Any, path: Path, line: int | None = None, header: RunHeader | None = None
) -> ModelT:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        place = f" line {line}" if line else ""
        why = describe(error, model)[:500] + newer_tool(vars(header) if header else document)
        raise ConfigError(f"{str(path)!r}{place} is not what dilabench writes: {why}") from None
