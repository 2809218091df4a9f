"""The documentation says what the code does: generated pages are current, links lead somewhere, promises stand."""

import dataclasses
import json
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dilabench.cli.app import COMMANDS, app
from dilabench.errors import ExitCode
from dilabench.plugins import Capabilities, hookspecs
from dilabench.plugins.manager import REGISTRIES
from dilabench.record import RunRecord
from tests.conftest import text_of

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
NAMES = [command.name for command in COMMANDS]
GROUPS = {one.name: list(getattr(one.loaded({}), "commands", ())) for one in COMMANDS}
LINES = [line for name, parts in GROUPS.items() for line in (name, *(f"{name} {part}" for part in parts))]
INCLUDE = re.compile(r"<!-- file: (\S+) -->\n```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def page_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def headings(path: Path) -> list[str]:
    return re.findall(r"^## (.+)$", path.read_text(), re.MULTILINE)


def test_json_schema_is_that_of_the_run_record() -> None:
    published = json.loads((DOCS / "reference" / "run-record.schema.json").read_text())
    assert published == RunRecord.model_json_schema()


def test_every_hook_has_a_heading_and_its_signature() -> None:
    page = DOCS / "reference" / "hooks.md"
    hooks = [name for name in vars(hookspecs) if name.startswith("dilabench_")]
    assert [heading for heading in headings(page) if heading.startswith("dilabench_")] == hooks
    for name in hooks:
        assert f"def {name}() -> Sequence[" in page.read_text()
        assert getattr(hookspecs, name).__doc__ in page.read_text()


@pytest.mark.parametrize("kind", [*REGISTRIES.values(), Capabilities], ids=lambda kind: kind.__name__)
def test_every_field_of_a_descriptor_has_its_meaning(kind: type) -> None:
    page = (DOCS / "reference" / "hooks.md").read_text()
    section = page.split(f"`{kind.__name__}`: ", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `(\w+)` \|(?:[^|\\]|\\.)*\|[^|]*\| (.+) \|$", section, re.MULTILINE)
    meanings = {name: meaning for name, meaning in rows if meaning.strip()}
    assert list(meanings) == [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]


@pytest.mark.parametrize("command", LINES)
def test_command_reference_names_exactly_the_options_there_are(command: str) -> None:
    page = (DOCS / "reference" / "cli.md").read_text()
    section = page.split(f"## dilabench {command}\n", 1)[1].split("\n## ", 1)[0]
    shown = CliRunner().invoke(app, [*command.split(), "--help"], prog_name="dilabench").output
    options = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
    assert set(options.findall(section)) == set(options.findall(shown))


def test_exit_codes_are_listed() -> None:
    page = (DOCS / "reference" / "cli.md").read_text()
    assert re.findall(r"^\| (\d+) \|", page, re.MULTILINE) == [str(code.value) for code in ExitCode]


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_included_files_are_verbatim(path: Path) -> None:
    for name, text in INCLUDE.findall(path.read_text()):
        assert text == (ROOT / name).read_text(), name


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_what_code_on_a_page_imports_from_dilabench_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = re.findall(r"^from (dilabench(?:[.]\w+)*) import ([\w, ]+)$", text, re.MULTILINE)
    for module, names in lines:
        for name in names.split(", "):
            # A name may be a module of its own.
            if not hasattr(import_module(module), name):
                import_module(f"{module}.{name}")


def test_the_whole_example_plugin_is_in_its_pages() -> None:
    pages = [DOCS / "how-to" / name for name in ("add-implementation.md", "add-pattern.md")]
    included = {name for page in pages for name, _ in INCLUDE.findall(page.read_text())}
    files = (path for path in (ROOT / "tests" / "example_plugin").rglob("*") if path.suffix in {".py", ".toml"})
    assert included == {page_name(path) for path in files if path.read_text()}


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", path.read_text())
    missing = [target for target in targets if "://" not in target and not (path.parent / target).exists()]
    assert missing == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = set(re.findall(r"- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert navigation == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_readme_keeps_its_size_and_its_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 150
    assert "\n    pip install -c constraints.txt . && dilabench run quick\n" in text
    assert '\n    pip install -c constraints.txt ".[test]" && pytest\n' in text


def test_the_project_says_what_it_ships() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
    assert project["license-files"] == ["LICENSE"]
    assert (ROOT / "dilabench" / "py.typed").exists()


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = re.findall(r"^ +- ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_the_citation_names_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {project['version']}\n" in citation
    assert f"license: {project['license']}\n" in citation


def test_generated_pages_are_current() -> None:
    done = subprocess.run([sys.executable, "scripts/docs", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_environment_variable_is_on_its_page() -> None:
    page = (DOCS / "reference" / "settings.md").read_text()
    sources = "".join(path.read_text() for path in sorted((ROOT / "dilabench").rglob("*.py")))
    assert set(re.findall(r"\bDILABENCH_[A-Z_]+\b", sources)) == set(re.findall(r"`(DILABENCH_[A-Z_]+)`", page))


def test_the_files_of_settings_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults, workload = re.findall(r"```toml\n(.*?)```", (DOCS / "reference" / "settings.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("dilabench.toml").write_text(defaults)
    Path("file.toml").write_text(workload)
    done = CliRunner().invoke(app, ["run", "implementations", "--config", "file.toml", "--dry-run", "--json"])
    assert done.exit_code == 0, done.output
    shapes = [(case["workload"]["seq_len"], case["workload"]["mode"]) for case in json.loads(done.stdout)]
    assert set(shapes) == {(8192, "both")}


def test_the_home_page_shows_the_answer_that_its_record_gives() -> None:
    (shown,) = re.findall(
        r"<!-- record: h200-range; Answer.*?-->.*?(\n\|.*?)<!-- end -->", (DOCS / "index.md").read_text(), re.S
    )
    printed = CliRunner().invoke(app, ["report", str(DOCS / "results" / "h200-range.json.xz"), "-f", "markdown"]).stdout
    assert set(shown.splitlines()) <= set(printed.splitlines())


@pytest.mark.parametrize("page", sorted((DOCS / "results").glob("*.md")), ids=page_name)
def test_a_page_of_results_shows_the_date_and_commit_of_each_record(page: Path) -> None:
    text = page.read_text()
    for name in sorted(set(re.findall(r"\]\(([\w.-]+\.json\.xz)\)", text))):
        record = json.loads(text_of(page.parent / name))
        assert record["started_at"][:10] in text, name
        assert (record["environment"]["git"] or {"sha": "not recorded"})["sha"][:7] in text, name
