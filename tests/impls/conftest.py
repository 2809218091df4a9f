"""Uninitialised memory is NaN in every test here, so that a row nobody wrote is a failing test."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    # torch fills only in its deterministic mode, which matrix products on CUDA refuse without a setting of cuBLAS.
    if request.node.get_closest_marker("gpu"):
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
