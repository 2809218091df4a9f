"""The command line as the tests call it: in this process, or in a fresh one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dilabench
from dilabench.cli import spread
from dilabench.cli.app import app


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch, tmp_path):
    """Pinned width, no third-party plug-ins, and a folder of its own for what a command writes."""
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    monkeypatch.setenv("DILABENCH_DISABLE_PLUGINS", "1")
    monkeypatch.delenv("DILABENCH_DEBUG", raising=False)
    monkeypatch.delenv("DILABENCH_STORE", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def cli():
    """Call a command; the answer has exit_code, stdout and stderr."""

    def call(*arguments):
        return CliRunner().invoke(app, spread(arguments))

    return call


@pytest.fixture
def fresh():
    """Call Python in a process of its own."""

    def call(*arguments, **variables):
        paths = os.pathsep.join(filter(None, (str(Path(dilabench.__file__).parents[1]), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **variables}
        return subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=120, check=False
        )

    return call
