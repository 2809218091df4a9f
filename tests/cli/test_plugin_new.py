"""`dilabench plugin new`: what it writes, and what it refuses."""

import ast
import tomllib
from pathlib import Path

import pytest

from dilabench.cli.author.new import TEMPLATES, Kind
from dilabench.plugins.manager import REGISTRIES, discover


@pytest.mark.parametrize("kind", list(Kind))
def test_a_package_of_each_kind_is_whole(cli, tmp_path, kind):
    result = cli("plugin", "new", "my-thing", "--kind", kind, "-o", "here")
    assert result.exit_code == 0, result.stderr
    folder = tmp_path / "here" / "my-thing"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files >= {"pyproject.toml", "README.md", "my_thing/__init__.py", "tests/test_my_thing.py"}
    assert all(f"here/my-thing/{name}\n" in result.stdout for name in files)
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["description"] == f"{'An' if kind == 'implementation' else 'A'} {kind} for dilabench"
    assert project["entry-points"]["dilabench"] == {"my-thing": "my_thing.plugin"}
    for path in folder.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path
    modules = {path.name for path in (folder / "my_thing").glob("*.py")} - {"__init__.py"}
    readme = (folder / "README.md").read_text()
    assert all(f"`my_thing/{name}`" in readme for name in modules)
    assert "{{" not in "".join(path.read_text() for path in folder.rglob("*") if path.is_file())


def test_its_tests_run_inside_of_a_project_that_has_options_of_its_own(cli, fresh, tmp_path):
    """Such as a clone of dilabench, whose options need pytest-xdist."""
    (tmp_path / "pyproject.toml").write_text((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert cli("plugin", "new", "my-attention").exit_code == 0
    done = fresh("-m", "pytest", "-p", "no:xdist", "--collect-only", "-q", "my-attention")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_my_attention.py" in done.stdout


def test_there_is_a_template_for_every_kind_of_thing():
    catalogue = discover().catalogue
    assert {getattr(catalogue, one).kind for one in REGISTRIES} == set(Kind)
    assert {path.name for path in TEMPLATES.iterdir() if path.is_dir()} == {*Kind, "common"}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("My Thing", "cannot name a package: small letters"),
        ("../up", "cannot name a package"),
        ("-x", "No such option"),
        ("class", "a word or a module of Python's own"),
        ("json", "a word or a module of Python's own"),
        ("numpy", "module 'numpy' is there already"),
        ("gather", "implementation 'gather' is already registered by plug-in 'builtin'"),
        ("auto", "means several names"),
    ],
)
def test_a_name_that_could_not_be_used_is_refused(cli, tmp_path, name, why):
    result = cli("plugin", "new", name)
    assert result.exit_code == 2
    assert why in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_ever_written_over(cli, tmp_path):
    (tmp_path / "my-thing").mkdir()
    kept = tmp_path / "my-thing" / "pyproject.toml"
    kept.write_text("mine")
    result = cli("plugin", "new", "my-thing")
    assert result.exit_code == 2
    assert "'my-thing' exists, and files are never overwritten; choose another name" in result.stderr
    assert kept.read_text() == "mine"
    Path("file").write_text("")
    assert cli("plugin", "new", "my-thing", "-o", "file").exit_code in (2, 3)
