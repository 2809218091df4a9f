"""`python -m dilabench` and the processes that it starts take no module from the working folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dilabench

COMMANDS = {
    "plan": ("plan", "range", "--lengths", "512", "-i", "strided"),
    "verify": ("verify", "dense"),
    "doctor": ("doctor",),
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_modules_of_the_working_folder_are_not_imported(tmp_path: Path, command: tuple[str, ...]) -> None:
    loaded = subprocess.run(
        [sys.executable, "-I", "-c", "import sys, runpy; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    names = {name for name in sys.stdlib_module_names - set(loaded) if not name.startswith("_")} | {"numpy", "torch"}
    folder, seen = tmp_path / "work", tmp_path / "seen"
    folder.mkdir()
    for name in names:
        (folder / f"{name}.py").write_text(
            f"open({str(seen)!r}, 'a').write('{name}\\n')\nraise ImportError('{name}')\n"
        )
    done = subprocess.run(
        [sys.executable, "-m", "dilabench", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(Path(dilabench.__file__).parents[1])},
    )
    assert not seen.exists(), seen.read_text()
    assert done.returncode == 0, done.stderr


def test_children_are_started_in_one_way() -> None:
    """`sys.executable` stands in one file, whose command leaves the working folder out."""
    # -I leaves it out as well.
    others = re.compile(r'sys\.executable(?!, "-I")')
    package = Path(dilabench.__file__).parent
    assert [path.name for path in package.rglob("*.py") if others.search(path.read_text())] == ["machine.py"]
