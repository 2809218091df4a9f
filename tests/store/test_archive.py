"""Run files of the store: immutable, whole, and none hurt by another."""

import errno
import gzip
import os

import pytest

from dilabench.atomic_file import read_file
from dilabench.errors import ConfigError, EnvironmentNotReady
from dilabench.record import SCHEMA_VERSION, moment_of
from dilabench.store.archive import Archive, read_compressed, sound_records, stamp
from dilabench.store.run_files import folder_of_run


@pytest.fixture
def archive(tmp_path):
    return Archive(tmp_path / "store")


def test_a_record_comes_back(archive, make_row, make_record):
    record = make_record([make_row()], run_id="abcd1234")
    name = archive.add(record)
    assert name == "20260102T030405Z-abcd1234.json.gz"
    assert archive.load(name) == record


def test_the_same_record_is_one_file(archive, make_row, make_record):
    record = make_record([make_row()])
    assert archive.add(record) == archive.add(record)
    assert len(archive.names()) == 1


def test_a_resumed_run_gets_a_file_of_its_own_and_counts_from_then_on(archive, make_row, make_record):
    first = make_record([make_row()], status="interrupted")
    whole = make_record([make_row(), make_row("gather")])
    before = archive.add(first)
    path = archive.folder / before
    bytes_before = path.read_bytes()
    after = archive.add(whole)
    assert after == "20260102T030405Z-aaaa+2.json.gz"
    assert path.read_bytes() == bytes_before
    assert archive.newest() == [after]
    assert archive.add(first) == before


def test_a_second_part_that_the_clock_dates_earlier_still_counts(archive, make_row, make_record):
    """The host's clock was set back between the two parts."""
    archive.add(make_record([make_row()], started_at="2026-05-01T00:00:00+00:00"))
    second = archive.add(make_record([make_row(), make_row("gather")], started_at="2026-04-01T00:00:00+00:00"))
    assert archive.newest() == [second]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("2026-01-02T03:04:05+00:00", "20260102T030405Z"),
        ("2026-01-02T03:04:05+02:00", "20260102T010405Z"),
        ("2026-01-02T03:04:05", "20260102T030405Z"),
        ("yesterday", "undated"),
        ("0001-01-01T00:00:00+23:00", "undated"),
        ("", "undated"),
    ],
)
def test_any_time_gives_a_name(text, name):
    assert stamp(moment_of(text)) == name
    assert (moment_of(text) is None) is (name == "undated")


@pytest.mark.parametrize("run_id", ["../escape", "", "a/b", ".hidden", "x" * 200])
def test_an_id_that_is_no_file_name_is_refused(archive, make_record, run_id):
    with pytest.raises(ConfigError, match="no file name"):
        archive.add(make_record([], run_id=run_id))


@pytest.mark.parametrize("text", ["latest", "bb", "20260103", "20260103T000000Z-bbbb"])
def test_ways_to_name_a_run(archive, make_record, text):
    archive.add(make_record([], run_id="aaaa", started_at="2026-01-02T00:00:00+00:00"))
    name = archive.add(make_record([], run_id="bbbb", started_at="2026-01-03T00:00:00+00:00"))
    assert archive.find(text) == [name]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: b"not gzip",
        lambda data: data[:20] + bytes([data[20] ^ 0xFF]) + data[21:],
        lambda data: gzip.compress(b"[1, 2]"),
        lambda data: gzip.compress(b'{"schema_version": "1.0"}'),
        lambda data: gzip.compress(b"{"),
        lambda data: gzip.compress(b"\xff\xfe"),
    ],
    ids=["half", "one byte short", "empty", "not gzip", "bit flip", "a list", "no fields", "cut JSON", "not text"],
)
def test_a_damaged_file_is_named_and_hurts_no_other(archive, make_row, make_record, damage):
    good = archive.add(make_record([make_row()], run_id="good"))
    bad = archive.add(make_record([make_row()], run_id="bad"))
    path = archive.folder / bad
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError, match=bad):
        archive.load(bad)
    answers = dict(sound_records(archive, archive.names()))
    assert answers[good].run_id == "good"
    assert isinstance(answers[bad], ConfigError)


def test_a_newer_schema_is_refused_by_its_version(archive, make_record):
    path = archive.folder / archive.add(make_record([]))
    ours = f'"{SCHEMA_VERSION}"'.encode()
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(ours, b'"9.0"', 1)))
    with pytest.raises(ConfigError, match=r"'9\.0'"):
        read_compressed(path)


def no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("broken", ["fsync", "link"])
def test_a_full_disk_leaves_nothing_behind(archive, make_row, make_record, monkeypatch, broken):
    kept = archive.add(make_record([make_row()], run_id="kept"))
    monkeypatch.setattr(os, broken, no_space)
    with pytest.raises(EnvironmentNotReady, match=r"No space left.*DILABENCH_STORE"):
        archive.add(make_record([make_row()], run_id="lost"))
    assert [path.name for path in archive.folder.iterdir()] == [kept]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_store_on_a_file_system_without_hard_links(archive, make_row, make_record, monkeypatch, code):
    def no_link(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", no_link)
    record = make_record([make_row()], run_id="abcd1234")
    assert archive.add(record) == archive.add(record)
    assert archive.load(*archive.names()) == record
    assert [path.name for path in archive.folder.iterdir()] == archive.names()


def test_a_store_that_cannot_be_written_is_said_so(tmp_path, make_record):
    (tmp_path / "store").write_text("a file where the folder should be")
    with pytest.raises(EnvironmentNotReady, match="DILABENCH_STORE"):
        Archive(tmp_path / "store").add(make_record([]))


def test_temporary_files_are_no_runs(archive, make_record):
    name = archive.add(make_record([]))
    (archive.folder / ".killed.part").write_bytes(b"half")
    (archive.folder / "notes.txt").write_text("mine")
    assert archive.names() == [name]


def test_where_the_store_is(monkeypatch, tmp_path):
    monkeypatch.setenv("DILABENCH_STORE", str(tmp_path))
    assert Archive().root == tmp_path
    monkeypatch.delenv("DILABENCH_STORE")
    assert str(Archive().root) == "benchmark_results/store"


def test_a_file_that_may_not_be_read_is_not_called_damaged(archive, make_row, make_record, monkeypatch):
    good = archive.add(make_record([make_row()], run_id="good"))
    barred = archive.add(make_record([make_row()], run_id="barred"))

    def refuse(path):
        if path.name == barred:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read_file(path)

    monkeypatch.setattr("dilabench.store.archive.read_file", refuse)
    with pytest.raises(EnvironmentNotReady, match=rf"{barred}' cannot be read: Permission denied; .*DILABENCH_STORE"):
        archive.load(barred)
    answers = dict(sound_records(archive, archive.names()))
    assert answers[good].run_id == "good"
    assert isinstance(answers[barred], EnvironmentNotReady)


def test_a_folder_that_may_not_be_listed(archive, make_record, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    for question in (archive.names, lambda: archive.find("latest"), lambda: archive.add(make_record([]))):
        with pytest.raises(EnvironmentNotReady, match="runs' cannot be read: Permission denied"):
            question()


def test_no_text_means_no_run(archive, make_record):
    """An empty variable of a script must not stand for the only run there is."""
    archive.add(make_record([]))
    assert archive.find("") == []


def test_a_record_that_another_process_kept_meanwhile_is_one_file(archive, make_row, make_record, monkeypatch):
    record = make_record([make_row()])
    name = archive.add(record)
    monkeypatch.setattr(Archive, "names", lambda self: [])
    assert archive.add(record) == name


def test_a_run_of_a_clock_that_was_ahead_is_not_the_latest(archive, make_row, make_record, tmp_path):
    today = archive.add(make_record([make_row()], run_id="today"))
    ahead = archive.add(make_record([make_row()], run_id="ahead", started_at="2090-01-02T03:04:05+00:00"))
    assert archive.names() == [ahead, today]
    assert archive.find("latest") == [today]
    for name in (ahead, today):
        folder = tmp_path / name.removesuffix(".json.gz")
        folder.mkdir()
        (folder / "rows.jsonl").touch()
    assert folder_of_run("latest", tmp_path).name.endswith("today")
