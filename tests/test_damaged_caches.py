"""Files that can be made again, damaged in ten ways: each is dropped and made anew with one line, never an error."""

import logging
import os
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dilabench import atomic_file as cache
from dilabench.choice import measured
from dilabench.choice.measured import TunedCell, read_tune_file, remember
from dilabench.machine import Machine
from dilabench.predict.memory import plan
from dilabench.record import MemoryPlan
from dilabench.report.html import page
from dilabench.store import index
from dilabench.store.archive import Archive
from dilabench.workload.spec import WorkloadRequest

pytestmark = pytest.mark.faults


def _replace(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _link_to_zeros(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _change(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no UTF-8": _change(lambda data: b"\xff\xfe" + data),
    "a byte that is none": _change(lambda data: data[:20] + b"\xff" + data[21:]),
    "NUL bytes": _change(lambda data: bytes(len(data))),
    "text": _replace(b"#!/bin/sh\necho no\n"),
    "JSON of another kind": _replace(b'{"a": [1, null]}\n["b", 3]\n'),
    "deep JSON": _replace(b"[" * 200_000 + b"\n"),
    "a number that is none": _replace(b'["key", {"inputs_bytes": 1e999}]\n'),
    "cut at the start": _change(lambda data: data[16:]),
    "a pipe": _fifo,
    "a link to zeros": _link_to_zeros,
}
WHOLE = pytest.mark.parametrize("damage", DAMAGES)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path))
    caplog.set_level(logging.WARNING)
    return tmp_path


@WHOLE
def test_traced_memory(damage, caplog):
    found = MemoryPlan(inputs_bytes=7, workspace_bytes=1).model_dump(mode="json")
    path = plan._file()
    first = plan.TraceCache()
    assert first.get("key") is None
    first.put("key", found, lasting=True)
    assert plan.TraceCache().get("key") == found
    DAMAGES[damage](path)
    again = plan.TraceCache()
    assert again.get("key") is None
    (line,) = caplog.messages
    assert str(path) in line
    assert "is rebuilt" in line
    again.put("key", found, lasting=True)
    assert plan.TraceCache().get("key") == found
    assert len(caplog.messages) == 1


@WHOLE
def test_a_tune_file(damage, folder, caplog):
    machine, path = Machine(device="cpu"), folder / "tune" / "cpu.json"
    workload = WorkloadRequest(seq_len=96).resolve("float32", 1)
    cell = TunedCell(workload=workload, implementation="strided", median_ns=5)
    remember(path, machine, [cell])
    assert read_tune_file(path).cells == (cell,)
    measured._tune_file.cache_clear()
    DAMAGES[damage](path)
    assert read_tune_file(path) is None
    assert read_tune_file(path) is None
    assert [str(path) in line for line in caplog.messages] == [True]
    remember(path, machine, [cell])
    assert read_tune_file(path).cells == (cell,)


@WHOLE
def test_the_history(damage, tmp_path, make_row, make_record):
    archive = Archive(tmp_path)
    archive.add(make_record([make_row("strided")], run_id="run1"))

    def runs(tell):
        with index.HistoryIndex(archive, tell) as opened:
            return [run.run_id for run in opened.runs()], [cell.case_id for cell in opened.cases()]

    expected = runs(pytest.fail)
    DAMAGES[damage](tmp_path / index.FILENAME)
    messages = []
    assert runs(messages.append) == expected
    assert len(messages) == 1, messages
    assert "rebuilt from the run files" in messages[0]
    assert runs(pytest.fail) == expected


@pytest.mark.parametrize("damage", ["a pipe", "a link to zeros"])
@pytest.mark.parametrize("suffix", ["-journal", "-wal", "-shm"])
def test_a_file_that_sqlite_opens_beside_the_history(suffix, damage, tmp_path, make_row, make_record):
    archive = Archive(tmp_path)
    archive.add(make_record([make_row("strided")], run_id="run1"))
    with index.HistoryIndex(archive, pytest.fail):
        pass
    beside = tmp_path / f"{index.FILENAME}{suffix}"
    beside.touch()
    DAMAGES[damage](beside)
    messages = []
    with index.HistoryIndex(archive, messages.append) as opened:
        assert [run.run_id for run in opened.runs()] == ["run1"]
    assert len(messages) == 1, messages


@pytest.mark.parametrize("statement", ["DROP TABLE cells", "ALTER TABLE runs DROP COLUMN status", "DROP TABLE runs"])
def test_a_history_of_other_tables(statement, tmp_path, make_row, make_record):
    archive = Archive(tmp_path)
    archive.add(make_record([make_row("strided")], run_id="run1"))
    with index.HistoryIndex(archive, pytest.fail):
        pass
    with sqlite3.connect(tmp_path / index.FILENAME) as connection:
        connection.execute(statement)
    connection.close()
    messages = []
    with index.HistoryIndex(archive, messages.append) as opened:
        assert [cell.implementation for cell in opened.cases()] == ["strided"]
    assert len(messages) == 1, messages


@WHOLE
def test_the_charting_library(damage, folder, caplog, monkeypatch):
    bundles = []
    bundler = SimpleNamespace(javascript_bundle=lambda _text: bundles.append(1) or "draw()")
    monkeypatch.setitem(sys.modules, "vl_convert", bundler)
    monkeypatch.setattr(page, "version", lambda _name: "1")
    assert [page.chart_library() for _ in range(2)] == ["draw()"] * 2
    (kept,) = folder.iterdir()
    DAMAGES[damage](kept)
    assert [page.chart_library() for _ in range(2)] == ["draw()"] * 2
    assert len(bundles) == 2
    (line,) = caplog.messages
    assert str(kept) in line


class TestWithoutHome:
    """A user id that has no entry, and no $HOME."""

    @pytest.fixture(autouse=True)
    def nobody(self, tmp_path, monkeypatch):
        monkeypatch.delenv(cache.CACHE_VARIABLE)
        monkeypatch.setattr(Path, "home", self._unknown)
        monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
        cache._without_home.cache_clear()
        yield
        cache._without_home.cache_clear()

    @staticmethod
    def _unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    def test_a_private_folder_among_temporary_files(self, tmp_path):
        found = cache.cache_folder()
        assert found == tmp_path / f"dilabench-{os.geteuid()}"
        assert found.stat().st_mode & 0o777 == 0o700
        assert cache.why_not_writable(found) is None

    @pytest.mark.parametrize("kind", ["link", "file", "others may write", "of another user"])
    def test_a_name_that_is_taken(self, kind, tmp_path, monkeypatch):
        taken = tmp_path / f"dilabench-{os.geteuid()}"
        if kind == "link":
            (tmp_path / "theirs").mkdir()
            taken.symlink_to(tmp_path / "theirs")
        elif kind == "file":
            taken.write_text("")
        else:
            taken.mkdir(mode=0o700)
        if kind == "others may write":
            taken.chmod(0o777)
        elif kind == "of another user":
            state = os.stat_result((*taken.lstat()[:4], os.geteuid() + 1, *taken.lstat()[5:]))
            monkeypatch.setattr(Path, "lstat", lambda _path: state)
        found = cache.cache_folder()
        assert found != taken or cache.why_not_writable(found)
