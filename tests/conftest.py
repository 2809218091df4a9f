"""GPU tests are skipped, with the reason, where there is no GPU; texts are laid out at a fixed width."""

import os

import pytest

PINNED_WIDTH = "100"


def pytest_configure() -> None:
    # Read when text is laid out, in this process and in those that tests start.
    os.environ.setdefault("TERMINAL_WIDTH", PINNED_WIDTH)
    os.environ.pop("FORCE_COLOR", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, none is visible to torch"))
