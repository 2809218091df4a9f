"""Several processes that write to one store at once."""

import multiprocessing

from dilabench.store.archive import Archive
from dilabench.store.baselines import Baselines
from dilabench.store.index import HistoryIndex

WRITERS = 20


def write(root, record, number):
    """Keep a record, name it, and ask for the history, as `run`, `baseline save` and `history` do."""
    archive = Archive(root)
    name = archive.add(record)
    Baselines(root).save(f"mine-{number}", [name], "2026-01-01")
    Baselines(root).save("shared", [name], "2026-01-01", add=True)
    with HistoryIndex(archive, lambda _: None) as index:
        assert any(run.run_id == record.run_id for run in index.runs())


def test_nothing_is_lost(tmp_path, make_row, make_record):
    context = multiprocessing.get_context("fork")
    records = [make_record([make_row(seed=number)], run_id=f"run{number}") for number in range(WRITERS)]
    writers = [context.Process(target=write, args=(tmp_path, record, i)) for i, record in enumerate(records)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0] * WRITERS
    archive, known = Archive(tmp_path), Baselines(tmp_path).all()
    assert len(archive.names()) == WRITERS
    assert set(known) == {"shared", *(f"mine-{number}" for number in range(WRITERS))}
    assert sorted(known["shared"].runs) == archive.names()


def test_one_run_written_twice_at_once_is_two_whole_files(tmp_path, make_row, make_record):
    """Two parts of one run that end at the same moment take different names."""
    context = multiprocessing.get_context("fork")
    records = [make_record([make_row(seed=number)], run_id="same") for number in range(WRITERS)]
    writers = [context.Process(target=Archive(tmp_path).add, args=(record,)) for record in records]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    archive = Archive(tmp_path)
    assert len(archive.names()) == WRITERS
    kept = [archive.load(name) for name in archive.names()]
    assert all(record in kept for record in records)
