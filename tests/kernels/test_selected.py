"""Planning from indices on the device: the lists of the same mask, without a look at any value from the host."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dilabench.kernels.block_sparse.selected import SelectedPlan, select_blocks
from dilabench.patterns.selectors import SELECTORS, Blocks, select, stand_ins


def test_the_lists_are_those_of_the_mask(interpreted: Callable[..., dict[str, list[str]]]) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: its interpreter runs these kernels on the CPU")
    found = interpreted("kernels/interpreted_selections.py")
    assert found.pop("compared") == [str(seed) for seed in range(8)]
    assert found == {}


def test_selecting_does_not_look_at_values() -> None:
    """Tensors without data refuse whatever would make the host wait for one."""
    with FakeTensorMode():
        q, k = torch.empty(700, 6, 16), torch.empty(700, 2, 16)
        assert select_blocks(q, k, 64, 4, causal=True, own_block=True).shape == (2, 11, 4)


def test_blocks_are_seen_once_and_rising() -> None:
    plan = SelectedPlan(torch.tensor([[[2, 0, 2], [-1, 1, 5], [-1, 3, 9]]]), 16, 40, causal=True)
    assert [plan.seen_blocks(0, block).tolist() for block in range(3)] == [[0, 2], [1], []]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", sorted(name for name, one in SELECTORS.items() if one.reads_queries))
def test_a_device_selects_what_the_oracle_takes(name: str, causal: bool, dtype: torch.dtype) -> None:
    blocks = Blocks(count=13, kv_heads=2, group=3, causal=causal, seed=1)
    pairs = [stand_ins(blocks, head) for head in range(2)]
    q = torch.from_numpy(np.concatenate([queries for queries, _ in pairs], 1)).to(dtype).repeat_interleave(16, 0)
    k = torch.from_numpy(np.stack([keys for _, keys in pairs], 1)).to(dtype).repeat_interleave(16, 0)
    found = select_blocks(q[:201], k[:201], 16, 5, causal=causal, own_block=SELECTORS[name].own_block)
    wanted = select(SELECTORS[name], blocks, 5)
    assert np.array_equal(found.sort(-1).values.numpy(), np.sort(wanted, -1))


def test_equal_and_negative_scores_are_ordered_and_the_earlier_block_wins() -> None:
    q = torch.ones(6, 1, 1)
    k = torch.tensor([-2.0, -1.0, 0.0, -0.0, -1.0, -3.0])[:, None, None]
    found = select_blocks(q, k, 1, 3, causal=False).sort(-1).values
    assert found.tolist() == [[[1, 2, 3]] * 6]
    assert select_blocks(q, k, 1, 3, causal=True)[0, 0].sort().values.tolist() == [-1, -1, 0]
