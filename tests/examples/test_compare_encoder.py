"""The comparison of docs/how-to/run-gigapath.md, on an encoder whose attention stands for torchscale's."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dilabench.compat.torchscale import DilatedAttention

HERE = Path(__file__).parent


class TheirDilatedAttention(DilatedAttention):
    """Known by torchscale's methods, and four times too large, so that `patch` shows."""

    def forward(self, *inputs: Any, **options: Any) -> tuple[Tensor, None]:
        return 4 * super().forward(*inputs, **options)[0], None

    def dense_to_sparse(self) -> None: ...
    def sparse_to_dense(self) -> None: ...


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(HERE / "compare_encoder.py"))


class Model(nn.Module):
    """One attention, whose embeddings come in a list, as GigaPath's do."""

    def __init__(self) -> None:
        super().__init__()
        fields = {"segment_length": [8, 64], "dilated_ratio": [1, 2], "multiway": False, "xpos_rel_pos": False}
        self.attention: nn.Module = TheirDilatedAttention(SimpleNamespace(**fields), 16, 4, self_attention=True)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.attention(x, x, x)[0]]


def test_it_compares_the_model_with_its_patched_copy(example: dict[str, Any]) -> None:
    model = Model()
    found = example["compare"](model, torch.randn(1, 13, 16), rounds=2)
    assert found["difference"] == pytest.approx(0.75)
    assert min(found["theirs_s"], found["ours_s"]) > 0
    assert type(model.attention) is TheirDilatedAttention, "the model itself stays"


def test_it_refuses_a_model_without_dilated_attention(example: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the model has no dilated attention of torchscale's"):
        example["compare"](nn.Linear(4, 4), torch.randn(2, 4))
