"""What `.ci/run` runs, in which environment and in which order: every program that it calls is a stand-in that logs."""

import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = (".ci/run", "scripts/check", "scripts/test", "README.md")
# `python -m venv FOLDER`: an environment with a number, whose programs log it and how they are called.
VENV = """#!/bin/bash
set -e
number=$(($(cat "$STATE/number" 2>/dev/null || echo 0) + 1))
echo $number > "$STATE/number"
mkdir -p "$3/bin"
echo "export PATH=\\"$3/bin:\\$PATH\\" ENVIRONMENT=$number" > "$3/bin/activate"
for name in python pip dilabench pytest mkdocs ruff mypy lint-imports; do cp "$STATE/program" "$3/bin/$name"; done
"""
PROGRAM = """#!/bin/bash
call="${0##*/} $*"
echo "$ENVIRONMENT ${call% }" >> "$STATE/log"
[[ -z "${FAILING:-}" || "$call" != "$FAILING"* ]]
"""
Run = Callable[..., tuple[int, list[tuple[str, str]]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """The exit code of `.ci/run` with this README, and its calls: number of the environment and words."""
    tree, state = tmp_path / "tree", tmp_path / "state"
    for name in FILES:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    state.mkdir()
    # A machine that has a browser.
    for name, text in {"venv": VENV, "program": PROGRAM, "chromium": PROGRAM}.items():
        (state / name).write_text(text)
        (state / name).chmod(0o755)

    def call(readme: Callable[[str], str] = str, failing: str = "") -> tuple[int, list[tuple[str, str]]]:
        (tree / "README.md").write_text(readme((tree / "README.md").read_text()))
        variables = {"PATH": f"{state}:/usr/bin:/bin", "PYTHON": str(state / "venv"), "STATE": str(state)}
        environment = {"TMPDIR": str(tmp_path), "FAILING": failing, **variables}
        done = subprocess.run([tree / ".ci" / "run"], env=environment, capture_output=True, text=True, check=False)
        assert "command not found" not in done.stderr
        log = (state / "log").read_text().splitlines() if (state / "log").exists() else []
        calls = [(number, words) for number, _, words in (line.partition(" ") for line in log)]
        return done.returncode, calls

    return call


def test_each_command_of_the_readme_has_an_environment_of_its_own(run: Run) -> None:
    code, calls = run()
    assert code == 0
    first, second, third = ([words for number, words in calls if number == wanted] for wanted in "123")
    assert first[:2] == ["pip install -c constraints.txt .", "dilabench run quick"]
    assert [words for words in first if "install" in words] == first[:1]
    assert second == ["pip install -c constraints.txt .[test]", "pytest"]
    assert third[0] == "python -m pip install --quiet -c constraints.txt .[dev]"
    assert len(first) + len(second) + len(third) == len(calls)


def test_the_tests_that_are_left_out_by_default_run_last_and_no_others_run_again(run: Run) -> None:
    _, calls = run()
    assert [words for _, words in calls if words.startswith("pytest")] == [
        "pytest",
        "pytest -m slow or needs_extra --durations=25",
    ]
    assert calls[-1][1].startswith("pytest ")


def test_the_commands_are_those_that_the_readme_shows(run: Run) -> None:
    _, calls = run(lambda text: text.replace("&& dilabench run quick\n", "&& dilabench run another\n"))
    assert calls[1] == ("1", "dilabench run another")


@pytest.mark.parametrize(
    "failing", ["pip install -c constraints.txt .", "dilabench run quick", "pip install -c constraints.txt .[test]"]
)
def test_a_command_that_fails_ends_it(run: Run, failing: str) -> None:
    code, calls = run(failing=failing)
    assert code != 0
    assert calls[-1][1] == failing


def test_a_readme_without_the_commands_is_refused(run: Run) -> None:
    assert run(lambda text: text.replace("## Two commands", "## Set-up")) == (1, [])


def test_each_extra_is_resolved(run: Run) -> None:
    _, calls = run()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tried = {extra for extra in project["optional-dependencies"] if any(f".[{extra}]" in words for _, words in calls)}
    assert tried == set(project["optional-dependencies"])
