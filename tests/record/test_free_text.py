"""Texts of a record that pydantic accepts as they are: whatever they say, every command that reads them ends well."""

import json

import pytest

from tests.conftest import half_are_slow

TIMES = {
    "none": None,
    "empty": "",
    "no time": "yesterday",
    "no such day": "2026-13-45",
    "without a zone": "2026-01-02T03:05:00",
    "of another zone": "2026-01-02T05:05:00+02:00",
    "beyond a date": "9999-12-31T23:59:59-23:00",
    "before all": "0001-01-01T00:00:00+23:00",
}
COMMANDS = (
    ("check", "--run", "new.json", "--against", "base.json"),
    ("check", "--run", "base.json", "--against", "new.json"),
    ("compare", "base.json", "new.json"),
    ("merge", "new.json", "other.json"),
    ("report", "new.json", "-f", "markdown"),
)


@pytest.fixture
def record(make_row, make_record):
    rows = [make_row(name, seed=at, position=at) for at, name in enumerate(("gather", "strided"))]
    config = {"suite": "quick", "shard": "1/2"}
    return make_record(rows, finished_at="2026-01-02T03:05:00+00:00", config=config)


@pytest.mark.parametrize("kind", TIMES)
def test_a_run_lasts_from_its_start_to_its_end_if_both_are_times(record, kind):
    assert record.duration_s == 55.0
    ended = record.model_copy(update={"finished_at": TIMES[kind]})
    assert ended.duration_s == (55.0 if kind in ("without a zone", "of another zone") else 0.0)
    started = record.model_copy(update={"started_at": TIMES[kind] or ""})
    assert (started.started is not None) == (kind in ("without a zone", "of another zone"))
    assert started.duration_s == 0.0


@pytest.mark.parametrize(
    ("command", "field"),
    half_are_slow(COMMANDS, ["started_at", "finished_at"]),
    ids=lambda value: value if isinstance(value, str) else " ".join(value[:3]),
)
def test_a_time_that_cannot_be_read_stops_no_command(
    tmp_path, monkeypatch, make_row, make_record, record, field, command
):
    from typer.testing import CliRunner

    from dilabench.cli.app import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DILABENCH_DISABLE_PLUGINS", "1")
    (tmp_path / "base.json").write_text(record.model_dump_json())
    other = make_record([make_row(seq_len=32)], run_id="other", config={"suite": "quick", "shard": "2/2"})
    (tmp_path / "other.json").write_text(other.model_dump_json())
    document = json.loads(record.model_copy(update={"run_id": "new"}).model_dump_json())
    for number, text in enumerate(TIMES.values()):
        if (field, text) != ("started_at", None):
            (tmp_path / "new.json").write_text(json.dumps(document | {field: text}))
            output = ("-o", f"merged-{number}") if command[0] == "merge" else ()
            done = CliRunner().invoke(app, (*command, *output))
            assert (done.exit_code, "error" in done.stderr) == (0, False), (text, done.output)
