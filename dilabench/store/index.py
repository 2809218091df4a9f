"""A SQLite index of the archive, for queries over many runs. It is a cache that can always be rebuilt. No torch.

`store_run` adds a run to it if it can; opening it brings it up to date. A kill, a full disk or two simultaneous writers
cannot damage it, and an unreadable index is rebuilt.
"""

import contextlib
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dilabench.comparison.comparison import searchable
from dilabench.comparison.fingerprint import machine_key
from dilabench.errors import DilabenchError
from dilabench.record import Measured, Row, RunRecord
from dilabench.store.archive import Archive, run_and_version, sound_records

FILENAME = "history.sqlite"
VERSION = 6
WAIT_S = 20.0
BRIEF_WAIT_S = 1.0
# Errors that a record with an unknown pattern or impossible numbers raises.
UNUSABLE = (DilabenchError, ArithmeticError, ValueError)
SCHEMA = """
CREATE TABLE runs (file TEXT PRIMARY KEY, version INTEGER, run_id TEXT, suite TEXT, device TEXT, machine TEXT,
    started_at TEXT, git TEXT, status TEXT, measured INTEGER, rows INTEGER);
CREATE TABLE cells (file TEXT, case_id TEXT, name TEXT, implementation TEXT, backend TEXT, title TEXT, status TEXT,
    why TEXT, timer TEXT, median_ns REAL, low_ns REAL, high_ns REAL, samples INTEGER, sessions INTEGER,
    peak_bytes INTEGER, PRIMARY KEY (file, case_id));
CREATE INDEX cells_by_case ON cells (case_id);
CREATE INDEX runs_by_id ON runs (run_id, version);
CREATE INDEX runs_by_date ON runs (started_at, file);
"""
RUN_FIELDS = "file, run_id, suite, device, machine, started_at, git, status, measured, rows"
CASE_FIELDS = (
    "case_id, implementation, backend, title, status, why, timer, median_ns, low_ns, high_ns, samples, "
    "sessions, peak_bytes"
)
# A resumed run replaces its first part.
NEWEST = "NOT EXISTS (SELECT 1 FROM runs later WHERE later.run_id = runs.run_id AND later.version > runs.version)"
# As for `archive.is_past`: a date in the future is no newest one.
AHEAD = "(started_at > strftime('%Y-%m-%dT%H:%M:%S', 'now', '+1 day'))"
BY_DATE = f"ORDER BY {AHEAD} DESC, started_at, file"


@dataclass(frozen=True, slots=True)
class RunEntry:
    """One run of the archive. machine: key of its hard fingerprint; git: short commit, with '+' when changed.

    status: the record's, or 'incomplete' if a length has no row.
    """

    file: str
    run_id: str
    suite: str
    device: str
    machine: str
    started_at: str
    git: str
    status: str
    measured: int
    rows: int


@dataclass(frozen=True, slots=True)
class CaseEntry:
    """One case in one run; times (ns) are None unless it was measured."""

    run: RunEntry
    case_id: str
    implementation: str
    backend: str | None
    title: str
    status: str
    why: str | None
    timer: str | None
    median_ns: float | None
    low_ns: float | None
    high_ns: float | None
    samples: int
    sessions: int
    peak_bytes: int | None


class HistoryIndex:
    """The index of an archive, up to date as of its opening. Use it as a context manager."""

    def __init__(self, archive: Archive, tell: Callable[[str], None], *, rebuild: bool = False) -> None:
        self._archive = archive
        self._tell = tell
        self._path = archive.root / FILENAME
        # SQLite opens the others along with it.
        self._files = [self._path.with_name(FILENAME + suffix) for suffix in ("", "-journal", "-wal", "-shm")]
        self._connection = self._opened(rebuild)

    def __enter__(self) -> "HistoryIndex":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def runs(self, limit: int | None = None) -> list[RunEntry]:
        """The runs, oldest first; with a limit, the newest ones."""
        # In two parts, each of which the index of dates answers.
        parts = [
            f"SELECT * FROM (SELECT {RUN_FIELDS} FROM runs WHERE {NEWEST} AND {when} "
            "ORDER BY started_at DESC, file DESC LIMIT :limit)"
            for when in (f"NOT {AHEAD}", AHEAD)
        ]
        query = " UNION ALL ".join(parts) + " LIMIT :limit"
        entries = self._connection.execute(query, {"limit": -1 if limit is None else limit})
        return [RunEntry(*row) for row in entries][::-1]

    def cases(self, words: Sequence[str] = ()) -> Iterator[CaseEntry]:
        """The cases of all runs whose name holds all the words, oldest first."""
        runs = {run.file: run for run in self.runs()}
        where = " AND ".join(["instr(cells.name, ?) > 0"] * len(words)) or "1"
        query = (
            f"SELECT file, {CASE_FIELDS} FROM cells JOIN (SELECT file, started_at FROM runs) USING (file) "
            f"WHERE {where} {BY_DATE}, cells.rowid"
        )
        for file, *fields in self._connection.execute(query, [word.lower() for word in words]):
            if file in runs:
                yield CaseEntry(runs[file], *fields)

    def _opened(self, rebuild: bool) -> sqlite3.Connection:
        try:
            if rebuild:
                self._path.unlink(missing_ok=True)
            if any(map(_is_pipe_or_device, self._files)):
                raise sqlite3.DatabaseError("it is no plain file")
            return self._up_to_date(str(self._path))
        except (sqlite3.Error, OSError) as error:
            if not _is_damaged(error):
                # The disk is full or read-only, or the file stays locked: an index in memory gives the same answers.
                self._tell(f"the index {str(self._path)!r} cannot be written ({error}); made one in memory")
            else:
                self._tell(f"the index {str(self._path)!r} was unreadable ({error}); rebuilt from the run files")
                with contextlib.suppress(sqlite3.Error, OSError):
                    for path in self._files:
                        path.unlink(missing_ok=True)
                    return self._up_to_date(str(self._path))
        return self._up_to_date(":memory:")

    def _up_to_date(self, place: str) -> sqlite3.Connection:
        if place != ":memory:" and not self._archive.root.is_dir():
            place = ":memory:"
        connection = sqlite3.connect(place, timeout=WAIT_S, isolation_level=None)
        # Invalid UTF-8 must not raise in the query that reads it.
        connection.text_factory = partial(str, encoding="utf-8", errors="replace")
        try:
            connection.execute("BEGIN IMMEDIATE")
            _check(connection)
            self._refresh(connection)
            connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        return connection

    def _refresh(self, connection: sqlite3.Connection) -> None:
        """Add the files that are new, drop those that no longer exist."""
        known = {file for (file,) in connection.execute("SELECT file FROM runs")}
        present = self._archive.names()
        for file in known.difference(present):
            for table in ("runs", "cells"):
                connection.execute(f"DELETE FROM {table} WHERE file = ?", (file,))
        added = [name for name in present if name not in known]
        for file, record in sound_records(self._archive, added):
            if isinstance(record, DilabenchError):
                self._tell(str(record))
                continue
            try:
                _add(connection, file, record)
            except UNUSABLE as error:
                # This file is skipped, the others are shown.
                self._tell(f"run file {file!r} is skipped: {error}")


def store_run(archive: Archive, record: RunRecord) -> str:
    """Store a record, and add it to the index. Returns its file's name; raises as `Archive.add`.

    The first `history` then need not read the runs. If the index is locked or damaged, it does.
    """
    file, path = archive.add(record), archive.root / FILENAME
    with contextlib.suppress(sqlite3.Error, OSError, *UNUSABLE):
        if not _is_pipe_or_device(path):
            with closing(sqlite3.connect(path, timeout=BRIEF_WAIT_S, isolation_level=None)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                _check(connection)
                _add(connection, file, record)
                connection.execute("COMMIT")
    return file


def _add(connection: sqlite3.Connection, file: str, record: RunRecord) -> None:
    """Add a run and its rows; raises one of UNUSABLE before anything is added."""
    # Its statistics take a while to load.
    from dilabench.comparison.view import locate_rows

    locate_rows(record.rows)
    cells = [(file, row.case.case_id, searchable(row.case), *_row_fields(row)) for row in record.rows]
    _insert(connection, "runs", [_run_fields(file, record)])
    _insert(connection, "cells", cells)


def _is_pipe_or_device(path: Path) -> bool:
    """Return True for what SQLite might read for ever; it refuses a folder."""
    return path.exists() and not (path.is_file() or path.is_dir())


def _is_damaged(error: Exception) -> bool:
    """Return True for a file that is no database, or one whose tables or columns differ from `SCHEMA`."""
    if not isinstance(error, sqlite3.OperationalError):
        return isinstance(error, sqlite3.Error)
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR


def _check(connection: sqlite3.Connection) -> None:
    """Empty an index of another version or a damaged one; the run files have all data."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == VERSION:
        with closing(connection.execute("PRAGMA quick_check")) as answer:
            (state,) = answer.fetchone()
        if state != "ok":
            raise sqlite3.DatabaseError(state)
        connection.execute(f"SELECT version, {RUN_FIELDS} FROM runs LIMIT 0")
        connection.execute(f"SELECT file, name, {CASE_FIELDS} FROM cells LIMIT 0")
        return
    for table in ("runs", "cells"):
        connection.execute(f"DROP TABLE IF EXISTS {table}")
    for statement in SCHEMA.split(";"):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {VERSION}")


def _insert(connection: sqlite3.Connection, table: str, rows: Sequence[tuple[object, ...]]) -> None:
    for row in rows:
        connection.execute(f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * len(row))})", row)


def _run_fields(file: str, record: RunRecord) -> tuple[object, ...]:
    _, version = run_and_version(file)
    moment, git = record.started, record.environment.git
    return (
        file,
        version,
        record.run_id,
        record.suite,
        record.device,
        machine_key(record),
        moment.isoformat(timespec="seconds") if moment else "",
        f"{git.sha[:10]}{'+' if git.dirty else ''}" if git else "",
        "incomplete" if record.status == "complete" and _is_incomplete(record) else record.status,
        sum(isinstance(row.outcome, Measured) for row in record.rows),
        len(record.rows),
    )


def _is_incomplete(record: RunRecord) -> bool:
    """Return True if a length has no row, as the verdict of its command says."""
    from dilabench.comparison.view import lengths_without_rows

    return bool(lengths_without_rows(record))


def _row_fields(row: Row) -> tuple[object, ...]:
    from dilabench.comparison.view import peak_of, view_of
    from dilabench.report.columns import implementation_text, workload_title

    case, outcome = row.case, row.outcome
    title = workload_title(case) + implementation_text(case).removeprefix(case.implementation)
    names = (case.implementation, case.backend, title, outcome.status)
    if not isinstance(outcome, Measured):
        return (*names, outcome.why, *(None,) * 4, 0, 0, None)
    peak, view = peak_of(row), view_of(row)
    if view is None:
        return (*names, None, *(None,) * 4, 0, 0, peak)
    interval = (view.interval.low, view.interval.high) if view.interval else (None, None)
    times = (view.timing.timer, view.median_ns, *interval)
    return (*names, None, *times, view.samples, view.sessions, peak)
