"""Every test of kernels runs on poisoned memory: what `torch.empty` and its relatives give is full of NaN."""

from collections.abc import Iterator

import pytest

from dilabench.engine.verify import poisoned


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Scripts in Triton's interpreter do the same in their processes (`interpreter`)."""
    with poisoned():
        yield
