import sys
from pathlib import Path

import pytest

ON_RANKS = str(Path(__file__).parent / "on_ranks")


@pytest.fixture(autouse=True)
def importable_rank_functions(monkeypatch, warm_server):
    """Rank processes import what they run by its module's name; they inherit sys.path."""
    monkeypatch.setattr(sys, "path", [ON_RANKS, *sys.path])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
