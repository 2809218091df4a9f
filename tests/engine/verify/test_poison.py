"""Uninitialised memory is NaN inside `poisoned`, and only inside."""

import pytest
import torch

from dilabench.engine.verify import poisoned


def allocations() -> dict[str, torch.Tensor]:
    like = torch.ones(3, 4)
    return {
        "empty": torch.empty(3, 4),
        "empty_like": torch.empty_like(like),
        "empty_strided": torch.empty_strided((3, 4), (4, 1)),
        "empty_permuted": torch.empty_permuted((3, 4), (1, 0)),
        "new_empty": like.new_empty(3, 4),
        "new_empty_strided": like.new_empty_strided((3, 4), (4, 1)),
    }


def test_every_allocation_is_nan() -> None:
    with poisoned():
        for name, tensor in allocations().items():
            assert tensor.isnan().all(), name
        assert torch.empty(3, dtype=torch.float16).isnan().all()
        assert torch.empty(3, dtype=torch.int64).shape == (3,)


def test_torch_is_itself_again_afterwards() -> None:
    before = torch.empty, torch.empty_like, torch.Tensor.new_empty
    with pytest.raises(KeyError), poisoned():
        raise KeyError
    assert (torch.empty, torch.empty_like, torch.Tensor.new_empty) == before
