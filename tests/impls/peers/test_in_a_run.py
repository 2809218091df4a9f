"""A whole run: peers are verified and measured beside ours, over ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dilabench
from dilabench.record import Measured, Skipped
from dilabench.store.run_files import read_record

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
NAMES = ("zigzag-ring", "torch-context-parallel", "ring-flash-attn-zigzag", "ring-flash-attn-ring")
REQUEST = ("ring", "-i", ",".join(NAMES), "--nproc", "2", "--device", "cpu", "--mode", "both", "--timing", "simple")
SHAPE = "pattern=dense dtype=bfloat16 seq_len=128 num_heads=4 num_kv_heads=2 head_dim=16 batch_size=1"


def test_peers_stand_in_the_same_table(tmp_path):
    recorded = Path(__file__).parent / "recorded"
    paths = [str(Path(dilabench.__file__).parents[1]), str(recorded), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "DILABENCH_LOCK_DIR": str(tmp_path)}
    fields = [text for field in SHAPE.split() for text in ("--set", field)]
    done = subprocess.run(
        [sys.executable, "-m", "dilabench", "run", *REQUEST, *fields, "-o", str(tmp_path), "--no-store"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = read_record(next(tmp_path.glob("*/run.json")))
    outcomes = {row.case.implementation: row.outcome for row in record.rows if row.case.world_size == 2}
    assert tuple(outcomes) == NAMES
    for name in ("zigzag-ring", "ring-flash-attn-zigzag", "ring-flash-attn-ring"):
        outcome = outcomes[name]
        assert isinstance(outcome, Measured)
        assert {"out", "lse", "dq", "dk", "dv"} <= {check.name for check in outcome.verification.checks if check.passed}
    skipped = outcomes["torch-context-parallel"]
    assert isinstance(skipped, Skipped)
    assert "device cpu is not supported (has cuda)" in skipped.why
    for name in NAMES:
        assert name in done.stdout
