"""What tests of transformers' models share."""

from typing import Any

import pytest
from torch import Tensor


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of dilabench's own calls."""
    # Only with transformers.
    from dilabench.compat.transformers import interface

    seen: list[dict[str, Any]] = []
    attention = interface.attention

    def noted(*tensors: Tensor, **options: Any) -> Any:
        seen.append(options | {"value_dim": tensors[2].shape[-1]})
        return attention(*tensors, **options)

    monkeypatch.setattr(interface, "attention", noted)
    return seen
