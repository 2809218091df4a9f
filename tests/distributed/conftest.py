from collections.abc import Iterator
from pathlib import Path

import pytest

ON_RANKS = str(Path(__file__).parent / "on_ranks")


@pytest.fixture(autouse=True, scope="module")
def importable_rank_functions(warm_server: None) -> Iterator[None]:
    """Rank processes import what they run by its module's name; they inherit sys.path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ON_RANKS)
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
