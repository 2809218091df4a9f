"""`python -m dilabench` and the processes that it starts take no module from the working folder."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dilabench
from tests.conftest import slow

COMMANDS = {
    "plan": ("plan", "range", "--lengths", "512", "-i", "strided"),
    "verify": ("verify", "dense", "--seq-length", "96"),
    "doctor": ("doctor",),
}


def modules_after(code: str) -> set[str]:
    """The modules that Python has loaded after some code, which the working folder has no part in."""
    command = [sys.executable, "-I", "-c", f"{code}; print(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def start(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(dilabench.__file__).parents[1])}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, env=environment)


@pytest.mark.parametrize("command", [slow("plan"), slow("verify"), "doctor"])
def test_modules_of_the_working_folder_are_not_imported(tmp_path: Path, command: str) -> None:
    loaded = modules_after("import sys, runpy")
    names = {name for name in sys.stdlib_module_names - loaded if not name.startswith("_")} | {"numpy", "torch"}
    folder, seen = tmp_path / "work", tmp_path / "seen"
    folder.mkdir()
    for name in names:
        (folder / f"{name}.py").write_text(
            f"open({str(seen)!r}, 'a').write('{name}\\n')\nraise ImportError('{name}')\n"
        )
    done = start(folder, "-m", "dilabench", *COMMANDS[command])
    assert not seen.exists(), seen.read_text()
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["types", "functools", "contextlib"])
def test_a_file_that_python_imported_before_dilabench_is_named(tmp_path: Path, name: str) -> None:
    """`-m` itself imports a few modules, before any line of dilabench."""
    assert name in modules_after("import sys, runpy") - modules_after("import sys")
    copy = tmp_path / f"{name}.py"
    shutil.copy(importlib.import_module(name).__file__ or "", copy)
    done = start(tmp_path, "-m", "dilabench", "--version")
    assert (done.returncode, done.stdout) == (3, "")
    assert f"Python imported {copy} in place of its own module" in done.stderr
    assert start(tmp_path, "-P", "-m", "dilabench", "--version").returncode == 0


def test_children_are_started_in_one_way() -> None:
    """`sys.executable` stands in one file, whose command leaves the working folder out."""
    # -I leaves it out as well.
    others = re.compile(r'sys\.executable(?!, "-I")')
    package = Path(dilabench.__file__).parent
    assert [path.name for path in package.rglob("*.py") if others.search(path.read_text())] == ["machine.py"]
