"""Planning from indices on the device: the lists of the same mask, without a look at any value from the host."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from dilabench.kernels.block_sparse.lists import largest_tile
from dilabench.kernels.block_sparse.plan import BlockPlan
from dilabench.kernels.block_sparse.selected import SelectedPlan, select_blocks
from dilabench.kernels.tuning import TileConfig
from dilabench.patterns.selectors import SELECTORS, Blocks, select, stand_ins


@st.composite
def selections(draw: st.DrawFn) -> tuple[SelectedPlan, BlockPlan, TileConfig]:
    """Indices in any order, repeated and absent, over blocks that the end cuts; the same as a mask; a tile shape."""
    block, blocks = draw(st.sampled_from([16, 32, 48, 64])), draw(st.integers(1, 5))
    rows = draw(st.integers((blocks - 1) * block + 1, blocks * block))
    heads, width = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    numbers = st.lists(st.integers(-1, blocks - 1), min_size=heads * blocks * width, max_size=heads * blocks * width)
    indices = np.array(draw(numbers)).reshape(heads, blocks, width)
    mask = (indices[..., None] == np.arange(blocks)).any(2)
    seen = {"causal": draw(st.booleans()), "window": (draw(st.integers(-1, 40)), draw(st.integers(-1, 40)))}
    tiles = [tile for tile in (16, 32, 64) if tile <= largest_tile(block)]
    config = TileConfig(draw(st.sampled_from(tiles)), draw(st.sampled_from(tiles)), 4, 1)
    plan = SelectedPlan(torch.from_numpy(indices), block, rows, **seen)
    return plan, BlockPlan(mask, block, rows, **seen), config


@settings(max_examples=80, deadline=None)
@given(case=selections(), by_key=st.booleans())
def test_the_lists_are_those_of_the_mask(case: tuple[SelectedPlan, BlockPlan, TileConfig], by_key: bool) -> None:
    plan, of_mask, config = case
    (spans, entries, order), wanted = (one.tables(config, by_key, torch.device("cpu")) for one in (plan, of_mask))
    assert torch.equal(spans[..., 1:], wanted[0][..., 1:])
    assert torch.equal(order, wanted[2])
    for mine, theirs in zip(spans.flatten(0, 1), wanted[0].flatten(0, 1), strict=True):
        count = int(mine[1:].sum())
        assert torch.equal(entries[mine[0] : mine[0] + count], wanted[1][theirs[0] : theirs[0] + count])
    for head in range(plan.mask_heads):
        for block in range(plan.indices.shape[1]):
            assert plan.seen_blocks(head, block).tolist() == of_mask.seen_blocks(head, block).tolist()


def test_neither_selecting_nor_planning_looks_at_values() -> None:
    """Tensors without data refuse whatever would make the host wait for one."""
    with FakeTensorMode():
        q, k = torch.empty(700, 6, 16), torch.empty(700, 2, 16)
        plan = SelectedPlan(select_blocks(q, k, 64, 4, causal=True, own_block=True), 64, 700, causal=True)
        for by_key in (False, True):
            spans, entries, order = plan.tables(TileConfig(32, 64, 4, 1), by_key, q.device)
            assert spans.shape[:2] == order.shape
            assert entries.shape == (2 * 22 * 4,)


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
