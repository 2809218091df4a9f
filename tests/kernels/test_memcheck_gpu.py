"""No kernel reads or writes beyond its tensors: NVIDIA's compute-sanitizer watches all of them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("under_memcheck.py")
FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")
BY_BLOCKS = ["blocks", "blocks of 128", "selected", "sum"]
OTHERS = ["dilated", "whole rows", "detached", "window", "sink", "packed", "packed dense"]
# The key kernel that this compiles to is 812 KB long and spills 1118 registers. compute-sanitizer 2025.3.1 stops there
# at an illegal instruction (H200, driver 580, Triton 3.6); without the tool the kernel runs. Tiles of 32x64 and 16x64
# with 8 warps spill half as much and give no error under the tool, but results that are not finite. Which of the two is
# at fault is not known.
NOT_UNDER_THE_TOOL = pytest.mark.xfail(reason="an illegal instruction under compute-sanitizer, none without it")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dim", "dtype", "entries"),
    [
        *((dim, dtype, []) for dim in (24, 64, 128) for dtype in ("bfloat16", "float32")),
        (256, "bfloat16", []),
        (256, "float32", OTHERS),
        pytest.param(256, "float32", BY_BLOCKS, marks=NOT_UNDER_THE_TOOL),
    ],
)
def test_kernels_stay_inside_their_tensors(dim: int, dtype: str, entries: list[str]) -> None:
    tool = shutil.which("compute-sanitizer", path=os.pathsep.join((os.environ.get("PATH", ""), *FOLDERS)))
    if tool is None:
        pytest.skip("needs compute-sanitizer, which comes with the CUDA toolkit")
    program = [sys.executable, str(PROGRAM), str(dim), dtype, *entries]
    done = subprocess.run(
        [tool, "--tool", "memcheck", "--error-exitcode", "9", *program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout
