"""`dilabench tune`: measures, keeps the fastest, and `-i auto` then goes by it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).resolve().parents[2])
SMALL = [
    "--set",
    "num_heads=2",
    "--set",
    "batch_size=1",
    "--set",
    "segment_lengths=64,128",
    "--set",
    "dilation_rates=1,2",
]


@pytest.mark.slow
def test_keeps_the_fastest_and_auto_takes_it(tmp_path: Path) -> None:
    environment = {"DILABENCH_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT}

    run = [sys.executable, "-m", "dilabench"]
    done = subprocess.run(
        [*run, "tune", "--lengths", "256", *SMALL, "--device", "cpu", "--budget", "60s"],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "1 workloads tuned in" in done.stdout
    (file,) = (tmp_path / "cache" / "tune").glob("cpu-*.json")
    (cell,) = json.loads(file.read_text())["cells"]
    assert cell["implementation"] in {"gather", "strided"}
    assert cell["runner_up_ns"] >= cell["median_ns"]
    dry = subprocess.run(
        [*run, "run", "implementations", "-i", "auto", "--lengths", "256", *SMALL, "--device", "cpu", "--dry-run"],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert dry.returncode == 0, dry.stderr
    assert cell["implementation"] in dry.stdout
