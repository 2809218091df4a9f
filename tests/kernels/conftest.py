"""Kernels in Triton's interpreter run in a process of their own: it is switched on before Triton is imported."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def interpreted() -> Callable[..., dict[str, dict[str, float]]]:
    """Runs a script of this folder, with options for Python, and gives what it prints last."""

    def run(script: str, *options: str) -> dict[str, dict[str, float]]:
        environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *options, str(HERE / script)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run
