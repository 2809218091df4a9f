"""The documentation says what the code does: generated pages are current, links lead somewhere, promises stand."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dilabench.cli.app import app
from dilabench.errors import ExitCode
from dilabench.plugins import hookspecs
from dilabench.record import RunRecord

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
COMMANDS = [command.name for command in app.registered_commands] + [group.name for group in app.registered_groups]
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


@pytest.mark.parametrize("command", [command.name for command in app.registered_commands])
def test_command_reference_names_exactly_the_options_there_are(command: str) -> None:
    page = (DOCS / "reference" / "cli.md").read_text()
    section = page.split(f"## dilabench {command}\n", 1)[1].split("\n## ", 1)[0]
    shown = CliRunner().invoke(app, [command, "--help"], prog_name="dilabench").output
    options = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
    assert set(options.findall(section)) == set(options.findall(shown))


def test_exit_codes_are_listed() -> None:
    page = (DOCS / "reference" / "cli.md").read_text()
    assert re.findall(r"^\| (\d+) \|", page, re.MULTILINE) == [str(code.value) for code in ExitCode]


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_included_files_are_verbatim(path: Path) -> None:
    for name, text in INCLUDE.findall(path.read_text()):
        assert text == (ROOT / name).read_text(), name


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


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_commands_in_the_documentation_exist(path: Path) -> None:
    used = set(re.findall(r"(?:^    |`|run: )dilabench ([a-z]+)", path.read_text(), re.MULTILINE))
    assert used <= set(COMMANDS)


def test_continuous_integration_runs_what_the_readme_says() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert 'install --quiet -c constraints.txt ".[test]"' in script
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
    assert project["license-files"] == ["LICENSE"]


def test_generated_pages_are_current() -> None:
    done = subprocess.run([sys.executable, "scripts/docs", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
