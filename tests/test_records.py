"""`scripts/records`: what it runs, keeps and stores, and the tables that it writes."""

import importlib.machinery
import importlib.util
import lzma
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

from dilabench.store.run_files import read_record
from tests.conftest import slow

ROOT = Path(__file__).parents[1]
TINY = "run implementations --device cpu -i gather,strided -b sdpa-flash --seq-length 64 --num-heads 2 --head-dim 16"
TINY += " --dtype float32 --timing-runs 5"
PAGE = """# Page

Answer: gather takes 123456 ms.

<!-- record: tiny; rows; time -->
<!-- end -->
"""


@pytest.fixture
def records(tmp_path, monkeypatch):
    """The script as a module whose root is a copy: one entry, one page, no record."""
    loader = importlib.machinery.SourceFileLoader("records_script", str(ROOT / "scripts" / "records"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("records_script", loader))
    monkeypatch.setitem(sys.modules, "records_script", module)
    loader.exec_module(module)
    results = tmp_path / "docs" / "results"
    results.mkdir(parents=True)
    (tmp_path / "README.md").write_text("# A page without a table\n")
    (results / "page.md").write_text(PAGE)
    (tmp_path / "dilabench").symlink_to(ROOT / "dilabench")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(module, "RESULTS", results)
    monkeypatch.setattr(module, "code_digest", lambda: "0" * 12)
    monkeypatch.setattr(module, "git_finds_no_change", lambda _sha: False)
    known = {"tiny": module.Entry("tiny", "page", 0, 20, TINY)}
    monkeypatch.setattr(module, "entries", lambda: known)
    monkeypatch.setattr(module, "pages", lambda: [tmp_path / "README.md", results / "page.md"])
    return module


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A record of the tiny command."""
    folder = tmp_path_factory.mktemp("tiny")
    command = [sys.executable, "-m", "dilabench", *TINY.split(), "--no-store", "-o", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.rglob("run.json")
    return path.read_bytes()


def stored(records) -> Path:
    return records.RESULTS / "tiny.json.xz"


@slow
def test_a_run_stores_the_record_and_writes_the_table(records, capsys) -> None:
    records.run(0, 600, [], None)
    record = read_record(stored(records))
    text = (records.RESULTS / "page.md").read_text()
    assert {row.outcome.status for row in record.rows} == {"measured"}
    assert text.count("`gather over sdpa-flash`") == text.count("`strided over sdpa-flash`") == 1
    assert record.started_at[:10] in text
    assert "'123456 ms' is in no record" in capsys.readouterr().out
    assert records.run(0, 600, [], None) == 1
    assert "has a record of today's code" in capsys.readouterr().out


@slow
def test_a_run_that_was_cut_short_goes_on(records, monkeypatch) -> None:
    monkeypatch.setattr(records, "OVERHEAD_S", 0)
    monkeypatch.setattr(records, "SAVING_S", 30)
    long = TINY.replace("--timing-runs 5", "--lengths 64,128,256,512,1K,2K")
    monkeypatch.setitem(records.entries(), "tiny", records.Entry("tiny", "page", 0, 60, long))
    monkeypatch.setattr(records, "PATIENCE", 0.2)
    folder = records.made_folder()
    folder.mkdir(parents=True)
    made, outcome = records.measure(records.entries()["tiny"], folder, 600)
    assert not made
    assert outcome.startswith("waits: took longer")
    (rows,) = folder.rglob("rows.jsonl")
    assert not (folder / "tiny.json.xz").exists()
    begun = len(rows.read_text().splitlines())
    monkeypatch.setattr(records, "PATIENCE", 3)
    made, outcome = records.measure(records.entries()["tiny"], folder, 600)
    assert made
    assert outcome.startswith("record kept: exit code 0, 12 of 12")
    assert begun >= 1
    assert not list(folder.rglob("*.begun"))


def test_records_come_back_in_one_file_and_are_taken(records, recorded, tmp_path, capsys) -> None:
    made, out = tmp_path / "made", tmp_path / "out"
    made.mkdir()
    (made / "tiny.json.xz").write_bytes(lzma.compress(recorded))
    (made / "stranger.json.xz").write_bytes(lzma.compress(recorded))
    records.pack(made, out)
    with tarfile.open(out / records.TAR) as tar:
        assert tar.getnames() == ["stranger.json.xz", "tiny.json.xz"]
    records.take([out])
    assert stored(records).read_bytes() == (made / "tiny.json.xz").read_bytes()
    assert [path.name for path in records.RESULTS.glob("*.xz")] == ["tiny.json.xz"]
    assert "stranger.json.xz: not in records.toml" in capsys.readouterr().out


def test_a_page_waits_for_its_record(records, recorded, tmp_path, capsys) -> None:
    """It is outside the navigation, as it is, until its record is taken and its answer is written."""
    page, navigation = records.RESULTS / "page.md", tmp_path / "mkdocs.yml"
    unwritten = PAGE.replace("gather takes 123456 ms", "not measured yet")
    page.write_text(unwritten)
    listed = "nav:\n  - Results:\n      - results/index.md\nextra:\n  waiting:\n"
    navigation.write_text(listed)
    assert records.check() == 1
    assert "page.md: not stored: tiny" in capsys.readouterr().out
    navigation.write_text(listed + "    - results/page.md\n")
    assert records.write_pages() == 0
    assert page.read_text() == unwritten
    (tmp_path / "tiny.json.xz").write_bytes(lzma.compress(recorded))
    assert records.take([tmp_path]) == 1
    assert navigation.read_text() == listed.replace("index.md\n", "index.md\n      - results/page.md\n")
    assert "its records are there, and its answer is not written" in capsys.readouterr().out
    page.write_text(page.read_text().replace("not measured yet", "gather is first"))
    assert records.check() == 0


@pytest.mark.parametrize(
    ("seconds", "entry", "why"),
    [
        (30, {}, "waits: needs 45 s"),
        (600, {"needs": ("no_such_module",)}, "waits: not installed: no_such_module"),
        (600, {"command": "run implementations -i no-such-name"}, "FAILED with exit code 2"),
    ],
)
def test_what_cannot_run_leaves_the_page_as_it_is(records, recorded, seconds, entry, why, monkeypatch, capsys) -> None:
    stored(records).write_bytes(lzma.compress(recorded))
    monkeypatch.setitem(records.entries(), "tiny", records.entries()["tiny"]._replace(**entry))
    records.write_pages()
    before = (records.RESULTS / "page.md").read_text(), stored(records).read_bytes()
    records.run(0, seconds, [], None)
    told = capsys.readouterr().out
    assert why in told
    assert "pages that wait: page" in told
    assert ((records.RESULTS / "page.md").read_text(), stored(records).read_bytes()) == before


def test_a_record_of_another_device_is_refused(records, recorded, tmp_path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(recorded)
    entry = records.Entry("tiny", "page", 1, 20, TINY)
    assert "the page is about 1 x H200" in (entry.ran_elsewhere(read_record(path)) or "")
    assert records.entries()["tiny"].ran_elsewhere(read_record(path)) is None


def test_a_table_is_of_one_record_and_an_old_one_is_out_of_date(records, recorded, capsys) -> None:
    stored(records).write_bytes(lzma.compress(recorded))
    assert records.check() == 1
    assert "page.md: its tables are out of date" in capsys.readouterr().out
    records.write_pages()
    page = records.RESULTS / "page.md"
    page.write_text(page.read_text().replace("gather takes 123456 ms", "gather is fast"))
    assert records.check() == 0
    page.write_text(page.read_text().replace("`gather over", "`other over"))
    assert records.check() == 1


def test_an_unknown_column_is_an_error_that_names_the_known_ones(records, recorded) -> None:
    stored(records).write_bytes(lzma.compress(recorded))
    page = records.RESULTS / "page.md"
    page.write_text(PAGE.replace("rows; time", "Answer; length | speed"))
    with pytest.raises(SystemExit, match=r"no column \{'speed'\}, it has \('length'"):
        records.write_pages()


def test_every_entry_has_a_name_and_a_page_that_shows_it() -> None:
    with (ROOT / "scripts" / "records.toml").open("rb") as file:
        entries = tomllib.load(file)["record"]
    assert len({entry["name"] for entry in entries}) == len(entries)
    for entry in entries:
        page = ROOT / "docs" / ("" if entry["page"] == "index" else "results") / f"{entry['page']}.md"
        assert f"<!-- record: {entry['name']};" in page.read_text(), entry["name"]


def test_every_table_on_a_page_has_an_entry() -> None:
    with (ROOT / "scripts" / "records.toml").open("rb") as file:
        names = {entry["name"] for entry in tomllib.load(file)["record"]}
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert names == {name for page in pages for name in re.findall(r"<!-- record: ([\w-]+);", page.read_text())}
