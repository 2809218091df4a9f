import sys
from pathlib import Path

import pytest
import torch

MEASURING = str(Path(__file__).parent / "measuring")


@pytest.fixture(autouse=True)
def peaks(monkeypatch):
    """How peaks are measured; rank processes import it by its name, for they inherit sys.path.

    One thread: kernels have buffers per thread, which no trace sees.
    """
    monkeypatch.setattr(sys, "path", [MEASURING, *sys.path])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    import peaks

    yield peaks
    torch.set_num_threads(threads)
