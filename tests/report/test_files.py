"""What reporters write, and what happens when they cannot."""

import os
from pathlib import Path

import pytest

from dilabench.atomic_file import write_text
from dilabench.errors import EnvironmentNotReady, ExitCode
from dilabench.record import RunRecord, Skipped
from dilabench.report import json, markdown, table
from dilabench.store.run_files import read_record

GOLDEN = Path(__file__).parents[1] / "golden" / "run_record.v1.json"


@pytest.fixture
def record() -> RunRecord:
    return read_record(GOLDEN)


def test_json_and_markdown_write_into_a_folder_and_print_nothing(record: RunRecord, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    assert json.render(record, folder) is None
    assert markdown.render(record, folder) is None
    assert sorted(path.name for path in folder.iterdir()) == ["report.md", "run.json"]
    assert RunRecord.model_validate_json((folder / "run.json").read_text()) == record


def test_without_a_folder_the_text_is_returned(record: RunRecord, tmp_path: Path) -> None:
    printed = tmp_path / "printed.json"
    printed.write_text(json.render(record, None) or "")
    assert read_record(printed) == record
    assert (markdown.render(record, None) or "").startswith("# dilabench quick\n\nSuite quick on ")


def test_lists_of_numbers_stay_text_inside_strings(record: RunRecord) -> None:
    tricky = record.model_copy(update={"suite": "[\n  1,\n  2\n]"})
    assert RunRecord.model_validate_json(json.to_text(tricky)).suite == "[\n  1,\n  2\n]"


@pytest.mark.parametrize(("columns", "width"), [("90", 90), (None, table.PIPED_WIDTH), ("wide", table.PIPED_WIDTH)])
def test_a_piped_table_is_as_wide_as_columns_says_and_has_no_colours(
    record: RunRecord, monkeypatch: pytest.MonkeyPatch, columns: str | None, width: int
) -> None:
    monkeypatch.delenv("TERMINAL_WIDTH", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = table.render(record, None) or ""
    assert "\x1b" not in text
    assert text == table.to_text(record, width=width)


def test_colours_are_there_when_asked_for(record: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in table.to_text(record, width=120, colour=True)


def test_markup_in_a_reason_is_printed_as_it_stands(record: RunRecord) -> None:
    reason = "[red]shape[/] (1|2) *star*\nsecond line"
    row = record.rows[5]
    row = row.model_copy(update={"outcome": row.outcome.model_copy(update={"why": reason})})
    changed = record.model_copy(update={"rows": (row,)})
    assert "[red]shape[/] (1|2) *star*" in table.to_text(changed, width=120)
    assert r"\[red\]shape\[/\] (1\|2) \*star\* second line" in markdown.to_text(changed)


def test_many_skips_of_one_kind_say_how_many_other_reasons_there_are(record: RunRecord) -> None:
    skipped = next(row for row in record.rows if isinstance(row.outcome, Skipped))
    reasons = ("needs cuda", "needs cuda", "no bfloat16", "no windows")
    rows = [
        row.model_copy(update={"outcome": skipped.outcome.model_copy(update={"why": why})})
        for row, why in zip(record.rows, reasons, strict=False)
    ]
    changed = record.model_copy(update={"rows": tuple(rows)})
    text = table.to_text(changed, width=120)
    assert "(4 rows): needs cuda; for 2 other reasons see --details" in text
    assert all(why in table.to_text(changed, width=120, details=True) for why in reasons)


def test_an_empty_record_renders(record: RunRecord) -> None:
    empty = record.model_copy(update={"rows": ()})
    assert "0 of 0 rows" in table.to_text(empty, width=80)
    assert "0 of 0 rows" in markdown.to_text(empty)


def test_a_folder_that_cannot_be_written_is_an_environment_error(record: RunRecord, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(EnvironmentNotReady, match="choose another folder with -o") as caught:
        json.render(record, blocker / "run")
    assert caught.value.exit_code is ExitCode.ENVIRONMENT


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    write_text(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EnvironmentNotReady, match="No space left on device"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def test_ctrl_c_in_mid_write_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.md"
    write_text(path, "old")

    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"report.md": "old"}
