"""`dilabench baseline`."""

import json

import pytest

from dilabench.record import Skipped
from dilabench.store.archive import Archive


@pytest.fixture
def runs(make_row, make_record):
    archive = Archive()
    for day, name in enumerate(("aaaa", "bbbb"), 1):
        archive.add(make_record([make_row()], run_id=name, started_at=f"2026-01-0{day}T00:00:00+00:00"))
    archive.add(
        make_record([make_row("x")], run_id="other", hard={"device": "cpu", "cpu": "another"}, started_at="2025")
    )


@pytest.mark.usefixtures("runs")
def test_save_list_rm(cli):
    assert "main holds 20260102T000000Z-bbbb.json.gz" in cli("baseline", "save", "main").stdout
    refused = cli("baseline", "save", "main", "aaaa")
    assert refused.exit_code == 2
    assert "--add" in refused.stderr
    added = cli("baseline", "save", "main", "aaaa", "--add").stdout
    assert "20260102T000000Z-bbbb.json.gz, 20260101T000000Z-aaaa.json.gz" in added
    known = json.loads(cli("baseline", "list", "--json").stdout)
    assert len(known["main"]["runs"]) == 2
    assert "main" in cli("baseline", "list").stdout
    assert "the store keeps 20260102" in cli("baseline", "rm", "main").stdout
    assert cli("baseline", "rm", "main").exit_code == 2
    assert "no baselines" in cli("baseline", "list").stdout
    assert len(Archive().names()) == 3


@pytest.mark.usefixtures("runs")
def test_sessions_of_another_machine_are_not_added(cli):
    cli("baseline", "save", "main", "aaaa")
    result = cli("baseline", "save", "main", "other", "--add")
    assert result.exit_code == 2
    assert "cpu: test against another" in result.stderr


def test_a_file_is_copied_into_the_store(cli, tmp_path, make_row, make_record):
    path = tmp_path / "run.json"
    path.write_text(make_record([make_row()], run_id="file").model_dump_json())
    assert cli("baseline", "save", "main", str(path)).exit_code == 0
    path.unlink()
    assert cli("compare", "main", "main").exit_code == 0


def test_a_run_without_times_is_no_baseline(cli, tmp_path, make_row, make_record):
    path = tmp_path / "run.json"
    path.write_text(make_record([make_row(outcome=Skipped(code="unsupported", why="no GPU"))]).model_dump_json())
    result = cli("baseline", "save", "main", str(path))
    assert result.exit_code == 2
    assert "no measured case" in result.stderr
    assert cli("baseline", "save", "main").exit_code == 2


@pytest.mark.parametrize(
    ("skips", "status", "warning"),
    [
        ((), "complete", ""),
        (("unsupported",), "complete", ""),
        (("budget",), "complete", "run abcd has no time for 1 of 2 rows: `check` does not compare these"),
        (("budget", "budget"), "complete", "run abcd has no time for 2 of 3 rows"),
        ((), "interrupted", "run abcd has no time for 0 of 1 row and was interrupted"),
    ],
)
def test_an_incomplete_run_is_saved_with_a_warning(cli, make_row, make_record, skips, status, warning):
    outcomes = [Skipped(code=code, why="for a reason") for code in skips]
    rows = [make_row(f"way{place}", outcome=outcome) for place, outcome in enumerate(outcomes)]
    planned = [
        row.model_copy(update={"planned": row.planned.model_copy(update={"skip": row.outcome})})
        if row.outcome.code == "unsupported"
        else row
        for row in rows
    ]
    Archive().add(make_record([make_row(), *planned], run_id="abcd", status=status))
    saved = cli("baseline", "save", "main")
    assert saved.exit_code == 0
    text = " ".join(saved.stderr.split())
    assert warning in text
    assert bool(warning) == ("has no time" in text)
