"""Which kernel a group of branches goes to on Hopper: the warp-specialised one, or the plain one if lists are short."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: there are no kernels to choose from")

from dilabench.kernels.fused import forward
from dilabench.kernels.fused.residue_plan import residue_plan


@pytest.mark.parametrize(
    ("dim", "segment", "causal", "window", "few"),
    [
        (80, 512, False, (-1, -1), True),
        (80, 1024, False, (-1, -1), False),
        (80, 1024, True, (-1, -1), True),
        (96, 8192, True, (512, 0), True),
        (96, 8192, True, (1024, 0), False),
        (128, 8192, False, (128, 128), True),
        (128, 256, False, (-1, -1), False),
        (192, 8192, True, (128, 0), False),
    ],
)
def test_few_keys_of_a_query_go_to_the_plain_kernel(
    monkeypatch: pytest.MonkeyPatch, dim: int, segment: int, causal: bool, window: tuple[int, int], few: bool
) -> None:
    monkeypatch.setattr(forward, "on_hopper", lambda _: True)
    q = torch.empty(1, 16384, 1, dim, dtype=torch.bfloat16, device="meta")
    (group,) = residue_plan((segment,), (1,), 16384, 1, 1, causal, window=window).groups
    group_launch, tiles = forward._kernel_for(q, group, causal)
    assert (group_launch is forward._group_launch) == few
    assert tiles is not None
    assert tiles.specialized != few
