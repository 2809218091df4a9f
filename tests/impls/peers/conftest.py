from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def importable_rank_functions(monkeypatch, warm_server):
    """Rank processes import what they run by its module's name; they inherit sys.path."""
    monkeypatch.syspath_prepend(HERE / "on_ranks")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def recorded(monkeypatch):
    """A package ring_flash_attn with the recorded interface, also for rank processes."""
    monkeypatch.syspath_prepend(HERE / "recorded")
