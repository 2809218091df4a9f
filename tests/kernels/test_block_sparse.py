"""Block-sparse kernels through Triton's interpreter against float64, and the lists that they walk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilabench.kernels.block_lists import Visibility, largest_tile, padded_lists, tile_lists

HERE = Path(__file__).resolve().parent
CASES = [
    "full tiles",
    "causal, shared keys, mask per head",
    "window, wide query tile",
    "causal window, wide key tile",
    "ragged end",
    "tiles inside blocks of 48",
    "padded head dim",
]


@pytest.fixture(scope="module")
def errors() -> dict[str, dict[str, float]]:
    pytest.importorskip("triton", reason="Triton is not installed: its interpreter runs these kernels on the CPU")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    script = [sys.executable, "-W", "ignore::RuntimeWarning", str(HERE / "interpreted_block_cases.py")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_float32_is_masked_softmax(errors: dict[str, dict[str, float]], case: str) -> None:
    found = errors[case]
    assert found.pop("number of empty rows") > 0, "the case must hold rows that see nothing"
    assert found["empty rows"] == 0
    assert max(found.values()) < 2e-6, found


def test_a_single_block(errors: dict[str, dict[str, float]]) -> None:
    assert max(errors["one block"].values()) < 2e-6, errors["one block"]


def test_half_precision_stays_within_twice_its_rounding(errors: dict[str, dict[str, float]]) -> None:
    found = errors["half"]
    assert found["empty rows"] == 0
    assert max(found["out"], found["lse"]) < 1e-3, found
    assert max(found["dq"], found["dk"], found["dv"]) < 2e-3, found


@st.composite
def lists_to_make(draw: st.DrawFn) -> tuple[np.ndarray, int, Visibility, int, int]:
    block = draw(st.sampled_from([16, 32, 48, 64]))
    blocks = draw(st.integers(1, 4))
    rows = draw(st.integers((blocks - 1) * block + 1, blocks * block))
    heads = draw(st.integers(1, 2))
    bits = draw(st.lists(st.booleans(), min_size=heads * blocks**2, max_size=heads * blocks**2))
    seen = Visibility(rows, draw(st.booleans()), draw(st.integers(-1, 40)), draw(st.integers(-1, 40)))
    tiles = [tile for tile in (16, 32, 64) if tile <= largest_tile(block)]
    mask = np.array(bits).reshape(heads, blocks, blocks)
    return mask, block, seen, draw(st.sampled_from(tiles)), draw(st.sampled_from(tiles))


@settings(max_examples=60, deadline=None)
@given(case=lists_to_make(), by_key=st.booleans())
def test_lists_hold_every_visible_tile_once(case: tuple[np.ndarray, int, Visibility, int, int], by_key: bool) -> None:
    mask, block, seen, block_m, block_n = case
    row = np.arange(seen.rows)
    pairs = mask[:, (row // block)[:, None], (row // block)[None]]
    right = 0 if seen.causal else seen.right
    pairs = pairs & ((row[None] >= row[:, None] - seen.left) | (seen.left < 0))
    pairs = pairs & ((row[None] <= row[:, None] + right) | (right < 0))
    lists = tile_lists(mask, block, seen, block_m, block_n, by_key)
    padded = padded_lists(lists)
    for head in range(mask.shape[0]):
        own_tiles = lists.spans.shape[1]
        assert sorted(lists.order[head]) == list(range(own_tiles))
        lengths = lists.spans[head, :, 1:].sum(-1)
        assert (np.diff(lengths[lists.order[head]]) <= 0).all()
        for own in range(own_tiles):
            first, n_full, n_partly = lists.spans[head, own]
            full, partly = np.split(lists.entries[first : first + n_full + n_partly], [n_full])
            assert padded.full[0, head, own, :n_full].tolist() == full.tolist()
            assert padded.partly[0, head, own, :n_partly].tolist() == partly.tolist()
            assert (padded.full_count[0, head, own], padded.partly_count[0, head, own]) == (n_full, n_partly)
            for other in range(-(-seen.rows // (block_m if by_key else block_n))):
                query, key = (other, own) if by_key else (own, other)
                tile = pairs[head, query * block_m : (query + 1) * block_m, key * block_n : (key + 1) * block_n]
                whole = tile.all() and tile.shape[1] == block_n
                assert (other in full) == whole
                assert (other in partly) == (tile.any() and not whole)


def test_tiles_must_divide_blocks() -> None:
    assert [largest_tile(size) for size in (8, 16, 48, 100, 128, 384, 512)] == [0, 16, 16, 0, 128, 128, 128]
    with pytest.raises(ValueError, match="tiles 32x16 must divide the block size 48"):
        tile_lists(np.ones((1, 2, 2), bool), 48, Visibility(96, False), 32, 16, by_key=False)


def test_hopper_work_lists_name_every_tile_with_its_list() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from dilabench.kernels.block_plan import BlockPlan
    from dilabench.kernels.block_sparse_forward_sm90 import work_lists

    mask = np.random.default_rng(2).random((3, 5, 5)) < 0.5
    mask[1, 2] = False
    items, entries, all_work = work_lists(BlockPlan(mask, 256, 1280, causal=True))
    assert not all_work
    assert items.shape == (1, 3, 10, 5)
    for head in range(3):
        for residue, tile, first, full, partly in items[0, head]:
            seen = {key for key in range(tile + 1) if mask[head, tile // 2, key // 2]}
            found = entries[first : first + full + partly]
            assert residue == 0
            assert set((found & 0x7FFF).tolist()) == seen
            assert (found >> 15 == 1 << 10).all(), "class 0, counted once"
            assert partly == (tile in seen)
            assert not partly or found[-1] & 0x7FFF == tile
