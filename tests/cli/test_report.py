"""`dilabench report`: the ways to name a run."""

import json
from pathlib import Path

import pytest

from dilabench.store.archive import Archive
from dilabench.store.baselines import Baselines
from dilabench.store.run_files import RunFolder
from tests.conftest import smallest_of_each_suite, text_of

DOCS = Path(__file__).parents[2] / "docs"


# `tests/report/test_one_row_view.py` has the tables of all.
@pytest.mark.slow
@pytest.mark.parametrize(
    "path", sorted(smallest_of_each_suite((DOCS / "results").glob("*.json.xz"))), ids=lambda path: path.stem
)
def test_records_in_the_documentation_are_shown(cli, path):
    result = cli("report", str(path))
    assert result.exit_code == 0, result.stderr
    environment = json.loads(text_of(path))["environment"]
    device = environment["gpus"][0]["name"] if environment["gpus"] else environment["cpu"]["model"]
    assert device in result.stdout


@pytest.mark.parametrize("path", sorted((DOCS / "figures").glob("*.json")), ids=lambda path: path.stem)
def test_figures_that_no_run_made_are_told_as_such(cli, path):
    result = cli("report", str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "JSON, but no run record" in " ".join(result.stderr.split())


@pytest.fixture
def archive(make_row, make_record):
    """Two stored runs, both of them named main."""
    archive = Archive()
    names = [archive.add(make_record([make_row()], run_id=run_id)) for run_id in ("aaaa", "bbbb")]
    Baselines(archive.root).save("main", names, "2026-01-01")
    Baselines(archive.root).save("first", names[:1], "2026-01-01")
    return archive


@pytest.mark.parametrize(
    ("name", "run_id"), [("latest", "bbbb"), ("aa", "aaaa"), ("first", "aaaa"), ("20260102T030405Z-bbbb", "bbbb")]
)
@pytest.mark.usefixtures("archive")
def test_a_stored_run(cli, name, run_id):
    result = cli("report", name, "-f", "json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["run_id"] == run_id


def test_a_compressed_file(cli, archive):
    result = cli("report", str(archive.folder / archive.names()[0]), "-f", "markdown")
    assert result.exit_code == 0, result.stderr
    assert "Run `aaaa`" in result.stdout


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda text: text, False),
        (lambda text: text.replace('"run_id": "aaaa"', '"run_id": "aaab"'), True),
        (lambda text: text.replace('  "rows"', '   "rows"'), True),
        (lambda text: text + "\n", True),
        # As records of older versions, and as `report --json` prints them.
        (lambda text: json.dumps({**json.loads(text), "digest": None}), False),
    ],
    ids=["as it was", "another value", "another space", "longer", "without a digest"],
)
def test_a_record_that_was_edited_says_so(cli, make_row, make_record, tmp_path, edit, says):
    folder = RunFolder(tmp_path)
    record = make_record([make_row()], run_id="aaaa")
    folder.finish(record)
    path = tmp_path / "run.json"
    path.write_text(edit(path.read_text()))
    for run in (tmp_path, path):
        result = cli("report", str(run))
        assert result.exit_code == 0, result.stderr
        assert ("was edited after its run" in " ".join(result.stderr.split())) is says
    assert cli("report", str(path), "--json").stdout.count("digest") == 0


@pytest.mark.usefixtures("archive")
def test_a_baseline_of_several_runs_is_ranked(cli):
    result = cli("report", "main", "--json")
    assert result.exit_code == 0, result.stderr
    assert {run["run_id"] for run in json.loads(result.stdout)["runs"]} == {"aaaa", "bbbb"}


@pytest.mark.usefixtures("archive")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("aaaa bbbb -f csv", "-f csv renders one run; several are shown as table, html, json"),
        ("aaaa bbbb --samples --columns mean", "--samples, --columns: for the report of one run"),
    ],
)
def test_what_renders_one_run_is_refused_for_several(cli, arguments, text):
    result = cli("report", *arguments.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert text in " ".join(result.stderr.split())


def test_files_of_a_stored_run_need_a_place(cli, archive, tmp_path):
    for name in ("latest", str(archive.folder / archive.names()[0])):
        result = cli("report", name, "-f", "plots")
        assert result.exit_code == 2
        assert "reporter 'plots' writes files and " in result.stderr
        assert "say where with -o" in result.stderr
    assert len(list(archive.folder.iterdir())) == 2
    assert cli("report", "latest", "-f", "markdown", "-o", "out").exit_code == 0
    assert (tmp_path / "out" / "report.md").exists()


@pytest.mark.usefixtures("archive")
@pytest.mark.parametrize(("form", "name"), [("html", "page.html"), ("markdown", "answer.md"), ("csv", "rows.csv")])
def test_an_output_with_the_suffix_of_the_format_is_a_file(cli, tmp_path, form, name):
    (tmp_path / "report.html").write_text("another")
    assert cli("report", "latest", "-f", form, "-o", name).exit_code == 0
    assert (tmp_path / name).is_file()
    assert sorted(path.name for path in tmp_path.glob("*.*")) == sorted({name, "report.html"})
    assert (tmp_path / "report.html").read_text() == "another"


@pytest.mark.usefixtures("archive")
def test_samples_have_a_line_each_where_a_format_has_that(cli):
    assert len(cli("report", "aa", "-f", "csv").stdout.strip().splitlines()) == 2
    assert len(cli("report", "aa", "-f", "csv", "--samples").stdout.strip().splitlines()) == 101
    refused = cli("report", "aa", "-f", "markdown", "--samples")
    assert refused.exit_code == 2
    assert "'markdown' has no form with a line per sample; these have: csv, parquet" in refused.stderr
