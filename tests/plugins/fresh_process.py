"""Fresh processes that see packages which pip installed into a folder."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
# `dilabench` with each of these arguments, one after the other: exit code, stdout and stderr.
COMMANDS = """
import json, sys
from typer.testing import CliRunner
from dilabench.cli.app import app

for arguments in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, arguments)
    sys.stdout.write(json.dumps([done.exit_code, done.stdout, done.stderr]) + "\\n")
"""


class Said(NamedTuple):
    """The end of a command."""

    code: int
    stdout: str
    stderr: str


def python(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in a fresh process, started in the folder of the packages that it sees."""
    paths = [str(site), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    environment.pop("DILABENCH_DISABLE_PLUGINS", None)
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=site, env=environment, capture_output=True, text=True, timeout=280, check=False)


def answers(site: Path, asked: Mapping[str, Sequence[str]]) -> dict[str, Said]:
    """What `dilabench` answers to each of several lists of arguments, all in one such process."""
    done = python(site, "-c", COMMANDS, json.dumps(list(asked.values())))
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: Said(*json.loads(line)) for name, line in zip(asked, done.stdout.splitlines(), strict=True)}
