"""Attention over ranks as a library: exact, refused with a reason, and good for training."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parents[2]


def test_results_are_those_of_one_device_and_refusals_say_why(launch):
    import library_cases

    (wrong, said), other = launch(library_cases.wrong_and_refused, 2)
    assert (wrong, said) == other
    assert wrong == []
    reasons = (
        "ring-allgather: it takes tokens in another order than zigzag",
        "must be [B, N_local, H, D]",
        "must have the axes of query (2, 12, 4, 8)",
        "must share dtype and device",
        "unknown implementation 'no-such'",
        "strided: ",
        "give the axis of tokens",
        "give one of them",
        "must rise from 0",
        "must rise from 0",
        "'striped' is none of zigzag, contiguous, balanced",
        "another order than balanced: those were dealt for causal attention",
        "a DeviceMesh of 2 dimensions",
    )
    for text, reason in zip(said, reasons, strict=True):
        assert reason in text


def losses(ranks: int) -> list[float]:
    script = str(ROOT / "tests" / "distributed" / "train_over_ranks.py")
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if ranks == 1:
        # What torchrun would tell it.
        launcher = []
        variables |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    else:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [sys.executable, *launcher, script], env=variables, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


@pytest.mark.slow
def test_a_transformer_has_the_losses_of_one_rank_on_two():
    alone, together = losses(1), losses(2)
    assert len(alone) == 20
    assert together == pytest.approx(alone, rel=1e-9)
    assert alone[-1] < alone[0]
