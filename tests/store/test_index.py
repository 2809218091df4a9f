"""The index is a cache: whatever happens to it, the answers are those of the run files."""

import contextlib
import sqlite3
from pathlib import Path

import pytest

from dilabench.record import Optimizations, Skipped
from dilabench.store.archive import Archive, run_and_version
from dilabench.store.index import FILENAME, HistoryIndex, store_run


@pytest.fixture
def archive(tmp_path, make_row, make_record):
    archive = Archive(tmp_path)
    for day in (1, 2):
        rows = [
            make_row("strided", ns=day * 1e6),
            make_row("fused", outcome=Skipped(code="unsupported", why="needs cuda")),
        ]
        archive.add(make_record(rows, run_id=f"run{day}", started_at=f"2026-01-0{day}T00:00:00+00:00"))
    return archive


@pytest.fixture
def told():
    return []


def ids(archive, told, **options):
    with HistoryIndex(archive, told.append, **options) as index:
        return [run.run_id for run in index.runs()]


def test_runs_and_cells_in_the_order_of_time(archive, told):
    with HistoryIndex(archive, told.append) as index:
        assert [(run.run_id, run.measured, run.rows) for run in index.runs()] == [("run1", 1, 2), ("run2", 1, 2)]
        assert [run.run_id for run in index.runs(limit=1)] == ["run2"]
        first, second = index.cases(["STRIDED", "fp32"])
        assert (first.run.run_id, second.run.run_id) == ("run1", "run2")
        assert first.median_ns == pytest.approx(1e6, rel=0.01)
        assert first.low_ns < first.median_ns < first.high_ns
        assert (first.samples, first.sessions, first.peak_bytes) == (100, 1, 2**24)
        skipped = next(iter(index.cases(["fused"])))
        assert (skipped.status, skipped.why, skipped.median_ns) == ("skipped", "needs cuda", None)
    assert told == []


def entries(archive, told):
    with HistoryIndex(archive, told.append) as index:
        return index.runs(), list(index.cases())


def test_a_run_is_in_the_index_as_soon_as_it_is_stored(archive, told, make_row, make_record, monkeypatch):
    ids(archive, told)
    rows = [make_row("strided"), make_row("fused", outcome=Skipped(code="unsupported", why="needs cuda"))]
    name = store_run(archive, make_record(rows, run_id="run3", started_at="2026-01-03T00:00:00+00:00"))
    assert name in archive.names()
    with monkeypatch.context() as patch:
        patch.setattr(Archive, "load", lambda *_: pytest.fail("a run file was read"))
        stored = entries(archive, told)
    (archive.root / FILENAME).unlink()
    assert stored == entries(archive, told)
    assert told == []


@pytest.mark.parametrize("trouble", ["no index", "damaged", "locked", "another version", "impossible samples"])
def test_a_run_is_stored_whatever_the_index_is(archive, told, make_row, make_record, monkeypatch, trouble):
    monkeypatch.setattr("dilabench.store.index.BRIEF_WAIT_S", 0.01)
    path, row = archive.root / FILENAME, make_row("strided")
    if trouble != "no index":
        ids(archive, told)
    if trouble == "damaged":
        path.write_bytes(b"no database" * 100)
    if trouble == "another version":
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA user_version = 1")
    if trouble == "impossible samples":
        timing = row.outcome.timings[0]
        slot = timing.slots[0].model_copy(update={"samples_ns": (0, 1)})
        timings = (timing.model_copy(update={"slots": (slot,)}),)
        row = row.model_copy(update={"outcome": row.outcome.model_copy(update={"timings": timings})})
    holder = sqlite3.connect(path, isolation_level=None)
    if trouble == "locked":
        holder.execute("BEGIN IMMEDIATE")
    assert store_run(archive, make_record([row], run_id="run3", started_at="2026-01-03T00:00:00+00:00"))
    holder.close()
    assert ids(archive, told) == ["run1", "run2", "run3"][: 2 if trouble == "impossible samples" else 3]


def test_cases_that_differ_in_anything_have_titles_that_do(archive, told, make_row, make_record):
    plain = make_row("gather")
    pooled, spread = (
        plain.model_copy(
            update={"planned": plain.planned.model_copy(update={"case": plain.case.model_copy(update=one)})}
        )
        for one in ({"optimizations": Optimizations(buffer_pool_bytes=2**30)}, {"world_size": 2})
    )
    archive.add(make_record([plain, pooled, spread], run_id="many", started_at="2026-02-01T00:00:00+00:00"))
    with HistoryIndex(archive, told.append) as index:
        titles = [cell.title for cell in index.cases(["gather"])]
    shape = "1x96 H2 D24 fp32 causal · dense · forward"
    assert titles == [shape, f"{shape} +pool 1G", f"{shape} · 2 devices"]


def test_new_files_are_taken_in_and_lost_ones_dropped(archive, told, make_row, make_record):
    assert ids(archive, told) == ["run1", "run2"]
    archive.add(make_record([make_row()], run_id="run0", started_at="2025-01-01T00:00:00+00:00"))
    (archive.folder / archive.names()[1]).unlink()
    assert ids(archive, told) == ["run0", "run2"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b"this is no database at all, but long enough to look like one" * 20),
        lambda path: path.write_bytes(path.read_bytes()[:5000]),
        lambda path: path.write_bytes(path.read_bytes()[:4096] + bytes(len(path.read_bytes()) - 4096)),
    ],
    ids=["another file", "cut short", "pages of zeros"],
)
def test_an_unreadable_index_is_made_anew_with_a_message(archive, told, spoil):
    ids(archive, told)
    spoil(archive.root / FILENAME)
    assert ids(archive, told) == ["run1", "run2"]
    assert len(told) == 1
    assert "unreadable" in told[0]
    assert ids(archive, told) == ["run1", "run2"]
    assert len(told) == 1


def test_an_index_of_another_version_is_made_anew(archive, told):
    ids(archive, told)
    with sqlite3.connect(archive.root / FILENAME) as connection:
        connection.execute("DROP TABLE cells")
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    assert ids(archive, told) == ["run1", "run2"]


def test_an_index_that_cannot_be_written_is_made_in_memory(archive, told):
    (archive.root / FILENAME).mkdir()
    assert ids(archive, told) == ["run1", "run2"]
    assert "in memory" in told[0]


def test_rebuild(archive, told):
    ids(archive, told)
    with sqlite3.connect(archive.root / FILENAME) as connection:
        connection.execute("UPDATE runs SET run_id = 'forged'")
    connection.close()
    assert ids(archive, told) == ["forged", "forged"]
    assert ids(archive, told, rebuild=True) == ["run1", "run2"]


def test_a_rebuild_where_nothing_can_be_removed_is_made_in_memory(archive, told, monkeypatch):
    ids(archive, told)

    def refuse(path, missing_ok=False):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    assert ids(archive, told, rebuild=True) == ["run1", "run2"]
    assert "in memory" in told[0]


def test_a_damaged_run_file_is_told_each_time_and_left_out(archive, told):
    path = archive.folder / archive.names()[0]
    path.write_bytes(path.read_bytes()[:100])
    assert ids(archive, told) == ids(archive, told) == ["run2"]
    assert len(told) == 2
    assert path.name in told[0]


def test_impossible_samples_are_told_and_left_out(archive, told, make_row, make_record):
    row = make_row("strided")
    slot = row.outcome.timings[0].slots[0].model_copy(update={"samples_ns": (0, -5)})
    timing = row.outcome.timings[0].model_copy(update={"slots": (slot,)})
    bad = row.model_copy(update={"outcome": row.outcome.model_copy(update={"timings": (timing,)})})
    archive.add(make_record([bad], run_id="backwards"))
    assert ids(archive, told) == ["run1", "run2"]
    assert "is not a positive, finite time" in told[0]


def test_dates_that_go_backwards_or_cannot_be_read(archive, told, make_row, make_record):
    """The clock was set back during one run and lost its date before another; both stay in the history."""
    archive.add(
        make_record(
            [make_row()],
            run_id="back",
            started_at="2026-01-01T12:00:00+00:00",
            finished_at="2026-01-01T11:00:00+00:00",
        )
    )
    archive.add(make_record([make_row()], run_id="lost", started_at="once upon a time"))
    archive.add(make_record([make_row()], run_id="naive", started_at="2026-01-01T18:00:00"))
    assert ids(archive, told) == ["lost", "run1", "back", "naive", "run2"]


def test_a_date_in_the_future_is_no_newest_one(archive, told, make_row, make_record):
    archive.add(make_record([make_row("strided")], run_id="ahead", started_at="2090-01-01T00:00:00+00:00"))
    assert ids(archive, told) == ["ahead", "run1", "run2"]
    with HistoryIndex(archive, told.append) as index:
        assert [[run.run_id for run in index.runs(limit=count)] for count in (1, 2)] == [["run2"], ["run1", "run2"]]
        assert [cell.run.run_id for cell in index.cases(["strided"])] == ["ahead", "run1", "run2"]
    assert run_and_version(archive.newest()[-1])[0] == "run2"


def test_the_part_of_a_run_that_was_resumed_counts_once(archive, told, make_row, make_record):
    archive.add(
        make_record([make_row("strided"), make_row("gather")], run_id="run2", started_at="2026-01-02T00:00:00+00:00")
    )
    with HistoryIndex(archive, told.append) as index:
        assert [(run.run_id, run.rows) for run in index.runs()] == [("run1", 2), ("run2", 2)]
        assert len(list(index.cases(["strided"]))) == 2
        assert len(list(index.cases(["gather"]))) == 1


def test_no_store_yet(tmp_path, told):
    assert ids(Archive(tmp_path / "nothing"), told) == []
    assert not (tmp_path / "nothing").exists()


def test_the_newest_runs_are_found_without_reading_the_others(archive, told):
    """Ten times as many runs take SQLite as many instructions."""
    counts = []
    with HistoryIndex(archive, told.append) as index:
        for size in (100, 1000):
            index._connection.execute("BEGIN")
            for day in range(size):
                row = (
                    f"{size}-{day}",
                    1,
                    f"{size}-{day}",
                    "quick",
                    "cpu",
                    "m",
                    f"2026-01-03T{day:06}",
                    "",
                    "complete",
                    1,
                    1,
                )
                index._connection.execute(f"INSERT INTO runs VALUES ({', '.join('?' * len(row))})", row)
            index._connection.execute("COMMIT")
            steps = []
            index._connection.set_progress_handler(lambda: steps.append(1), 10)  # noqa: B023
            assert [run.run_id for run in index.runs(2)] == [f"{size}-{size - 2}", f"{size}-{size - 1}"]
            counts.append(len(steps))
    assert 0 < counts[1] < 2 * counts[0]
