"""No kernel reads or writes beyond its tensors: NVIDIA's compute-sanitizer watches all of them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("under_memcheck.py")
FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dim", [24, 64, 128, 256])
def test_kernels_stay_inside_their_tensors(dim: int) -> None:
    tool = shutil.which("compute-sanitizer", path=os.pathsep.join((os.environ.get("PATH", ""), *FOLDERS)))
    if tool is None:
        pytest.skip("there is no compute-sanitizer; it comes with the CUDA toolkit")
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, str(PROGRAM), str(dim)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout
