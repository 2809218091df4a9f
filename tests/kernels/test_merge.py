"""What the kernel that merges rows refuses; its results are compared in the interpreter (`test_fused`)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: dilabench.kernels needs it")

from dilabench.kernels.merge import merge_rows_


def test_shapes_that_disagree_are_refused() -> None:
    out, lse = torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 4)
    with pytest.raises(ValueError, match="must be equal"):
        merge_rows_(out, lse, torch.zeros(1, 3, 2, 8), lse)
    with pytest.raises(ValueError, match="must be"):
        merge_rows_(out, torch.zeros(1, 4, 2), out, lse)
