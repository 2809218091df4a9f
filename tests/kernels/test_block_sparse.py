"""Block-sparse kernels through Triton's interpreter against float64, and the lists that they walk."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilabench.kernels.block_sparse.lists import (
    HiddenTiles,
    Visibility,
    block_lists,
    largest_tile,
    limits_of,
    transposed,
)
from dilabench.patterns.answers import HiddenRows

CASES = [
    "full tiles",
    "causal, shared keys, mask per head",
    "window, wide query tile",
    "causal window, wide key tile",
    "ragged end",
    "tiles inside blocks of 48",
    "padded head dim",
    "mask per key head",
    "bounds: one range, causal",
    "bounds: two ranges, wide query tile",
    "bounds: three ranges, window, wide key tile",
    "chosen on the device",
    "bounded on the device",
    "shared tiles: padded head dim",
    "shared tiles: mask per key head",
    "shared tiles: bounds",
    "two calls: more keys than queries",
    "two calls: more queries than keys, ragged ends",
    "two calls: wide query tile, one key row",
    "two calls: wide key tile",
    "two calls: padded head dim",
]


@pytest.fixture(scope="module")
def errors(interpreted: Callable[..., dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    pytest.importorskip("triton", reason="Triton is not installed: its interpreter runs these kernels on the CPU")
    return interpreted("kernels/interpreted_block_cases.py")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_float32_is_masked_softmax(errors: dict[str, dict[str, float]], case: str) -> None:
    found = errors[case]
    assert found.pop("number of empty rows") > 0, "the case must hold rows that see nothing"
    assert found["empty rows"] == 0
    assert max(found.values()) < 2e-6, found


@pytest.mark.slow
def test_packed_documents_are_each_by_itself(interpreted: Callable[..., dict[str, dict[str, float]]]) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: its interpreter runs these kernels on the CPU")
    found = interpreted("kernels/interpreted_block_packings.py")
    assert len(found) == 5
    for name, errors in found.items():
        errors.pop("number of empty rows")
        assert errors["empty rows"] == 0, name
        assert max(errors.values()) < 2e-6, (name, errors)


@pytest.mark.slow
def test_gates_are_products_with_every_part(errors: dict[str, dict[str, float]]) -> None:
    assert max(errors["gates"].values()) == 0.0, errors["gates"]


@pytest.mark.slow
def test_a_single_block(errors: dict[str, dict[str, float]]) -> None:
    assert max(errors["one block"].values()) < 2e-6, errors["one block"]


@pytest.mark.slow
def test_half_precision_stays_within_twice_its_rounding(errors: dict[str, dict[str, float]]) -> None:
    found = errors["half"]
    assert found["empty rows"] == 0
    assert max(found["out"], found["lse"]) < 1e-3, found
    assert max(found["dq"], found["dk"], found["dv"]) < 2e-3, found


@st.composite
def lists_to_make(draw: st.DrawFn) -> tuple[np.ndarray, int, Visibility, int, int]:
    block = draw(st.sampled_from([16, 32, 48, 64]))
    blocks, key_blocks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rows, key_rows = (draw(st.integers((n - 1) * block + 1, n * block)) for n in (blocks, key_blocks))
    if draw(st.booleans()):
        key_blocks, key_rows = blocks, None
    heads = draw(st.integers(1, 2))
    size = heads * blocks * key_blocks
    bits = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    hidden = None
    if draw(st.booleans()):
        random, keys = np.random.default_rng(draw(st.integers(0, 99))), rows if key_rows is None else key_rows
        # Few distinct bounds, so that whole tiles are hidden.
        bounds = np.sort(random.choice([0, 16, rows // 2, rows], (draw(st.integers(1, 2)), 2, keys)), axis=-1)
        hidden = HiddenRows.of(rows, *((start, stop) for start, stop in bounds))
    edges = draw(st.integers(-1, 40)), draw(st.integers(-1, 40))
    seen = Visibility(rows, draw(st.booleans()), *edges, key_rows, hidden)
    tiles = [tile for tile in (16, 32, 64) if tile <= largest_tile(block)]
    mask = np.array(bits).reshape(heads, blocks, key_blocks)
    return mask, block, seen, draw(st.sampled_from(tiles)), draw(st.sampled_from(tiles))


def hidden_tiles(seen: Visibility, block_n: int) -> HiddenTiles | None:
    return None if seen.hidden is None else HiddenTiles.of(limits_of(seen.hidden), seen.rows, block_n)


@settings(max_examples=60, deadline=None)
@given(case=lists_to_make(), by_key=st.booleans())
def test_lists_hold_every_visible_tile_once(case: tuple[np.ndarray, int, Visibility, int, int], by_key: bool) -> None:
    mask, block, seen, block_m, block_n = case
    row, key_row = np.arange(seen.rows), np.arange(seen.keys)
    pairs = mask[:, (row // block)[:, None], (key_row // block)[None]]
    right = 0 if seen.causal else seen.right
    pairs = pairs & ((key_row[None] >= row[:, None] - seen.left) | (seen.left < 0))
    pairs = pairs & ((key_row[None] <= row[:, None] + right) | (right < 0))
    if seen.hidden is not None:
        pairs = pairs & ~seen.hidden.hides(row, slice(None))
    lists = block_lists(mask, block, seen, block_m, block_n, by_key, hidden_tiles(seen, block_n))
    if by_key:
        of_queries = block_lists(mask, block, seen, block_m, block_n, False, hidden_tiles(seen, block_n))
        assert all(map(torch.equal, transposed(of_queries, -(-seen.keys // block_n)), lists))
    for head in range(mask.shape[0]):
        own_tiles = lists.spans.shape[1]
        assert sorted(lists.order[head].tolist()) == list(range(own_tiles))
        lengths = lists.lengths[head]
        assert (lengths[lists.order[head]].diff() <= 0).all()
        for own in range(own_tiles):
            full, partly = (part.tolist() for part in lists.partners(head, own))
            for other in range(-(-seen.rows // block_m) if by_key else -(-seen.keys // block_n)):
                query, key = (other, own) if by_key else (own, other)
                tile = pairs[head, query * block_m : (query + 1) * block_m, key * block_n : (key + 1) * block_n]
                whole = tile.all() and tile.shape[1] == block_n
                if seen.hidden is None:
                    assert (other in full) == whole
                    assert (other in partly) == (tile.any() and not whole)
                else:
                    # Bounds over a tile's keys: what they cannot tell is looked at pair by pair.
                    assert whole or other not in full
                    assert not tile.any() or other in full or other in partly


def test_a_windows_first_tile_is_left_to_the_rows_that_see_it() -> None:
    """Its first key is hidden by one range and the others by two: no bounds of one range say that a row is past all."""
    keys = np.arange(64)
    hidden = HiddenRows.of(1024, (np.zeros_like(keys), keys), (keys + 40, np.full_like(keys, 1024)))
    seen = Visibility(1024, False, key_rows=64, hidden=hidden)
    lists = block_lists(np.ones((1, 16, 1), bool), 64, seen, 64, 64, by_key=True, hidden=hidden_tiles(seen, 64))
    assert [part.tolist() for part in lists.partners(0, 0)] == [[], [0, 1]]


def test_long_lists_are_shared_and_every_entry_is_somebodys() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from dilabench.kernels.block_sparse.key_lists import balanced_items

    counts = np.array([[4000, 3, 0, 2500], [1, 1, 7, 8]])
    items, shared, slots = balanced_items(counts, group=2, kv_heads=2)
    for mine, tiles, lengths in zip(items.tolist(), shared.tolist(), counts.tolist(), strict=True):
        listed = [item for item in mine if item[0] >= 0]
        for tile, length in enumerate(lengths):
            parts = sorted(item[1:3] for item in listed if item[0] == tile)
            assert (parts[0][0], parts[-1][1] >= length) == (0, True)
            assert all(before[1] == after[0] for before, after in pairwise(parts))
        used = [item[3] for item in listed if item[3] >= 0]
        assert sorted(used) == list(range(len(used)))
        assert sum(count for tile, _, count in tiles if tile >= 0) == len(used) <= slots
    assert slots > 50


def test_tiles_must_divide_blocks() -> None:
    assert [largest_tile(size) for size in (8, 16, 48, 100, 128, 384, 512)] == [0, 16, 16, 0, 128, 128, 128]
    with pytest.raises(ValueError, match="tiles 32x16 must divide the block size 48"):
        block_lists(np.ones((1, 2, 2), bool), 48, Visibility(96, False), 32, 16, by_key=False, hidden=None)


def test_lists_by_query_name_every_tile_with_its_list() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from dilabench.kernels.block_sparse.plan import BlockPlan
    from dilabench.kernels.tuning import TileConfig

    mask = np.random.default_rng(2).random((3, 5, 5)) < 0.5
    mask[1, 2] = False
    plan = BlockPlan(mask, 256, 1280, causal=True)
    items, entries = (part.numpy() for part in plan.query_lists(TileConfig(128, 128, 4, 2), torch.device("cpu")))
    assert not plan.every_row_has_work
    assert items.shape == (3, 10, 5)
    for head in range(3):
        for residue, tile, first, full, partly in items[head]:
            seen = {key for key in range(tile + 1) if mask[head, tile // 2, key // 2]}
            found = entries[first : first + full + partly]
            assert residue == 0
            assert set((found & 0x7FFF).tolist()) == seen
            assert (found >> 15 == 1 << 10).all(), "class 0, counted once"
            assert partly == (tile in seen)
            assert not partly or found[-1] & 0x7FFF == tile


def test_lists_by_query_of_a_rectangle_have_only_whole_tiles() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from dilabench.kernels.block_sparse.plan import BlockPlan
    from dilabench.kernels.tuning import TileConfig

    mask = np.random.default_rng(2).random((2, 3, 7)) < 0.5
    mask[1, 2] = False
    plan = BlockPlan(mask, 128, 384, causal=False, key_rows=896)
    items, entries = (part.numpy() for part in plan.query_lists(TileConfig(128, 128, 4, 2), torch.device("cpu")))
    assert not plan.every_row_has_work
    for head in range(2):
        for residue, tile, first, full, partly in items[head]:
            assert (residue, partly) == (0, 0)
            assert (entries[first : first + full] & 0x7FFF).tolist() == np.flatnonzero(mask[head, tile]).tolist()


def test_the_hopper_kernel_takes_rectangles_of_whole_tiles_of_one_batch_item(monkeypatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from dilabench.kernels.block_sparse import forward as hopper
    from dilabench.kernels.block_sparse.plan import BlockPlan

    monkeypatch.setattr(hopper, "on_hopper", lambda device: True)

    def runs(batch: int, keys: int, causal: bool = False) -> bool:
        q = torch.zeros(batch, 256, 2, 128, dtype=torch.bfloat16)
        packed = torch.zeros(keys, 2, batch, 2, 128, dtype=torch.bfloat16)
        k, v = (packed[:, side].transpose(0, 1) for side in (0, 1))
        square = keys == 256
        mask = np.ones((1, 2, -(-keys // 128)), bool)
        return hopper.can_run(q, k, v, BlockPlan(mask, 128, 256, causal, key_rows=None if square else keys))

    assert runs(1, 384)
    assert runs(1, 128)
    assert runs(1, 256, causal=True)
    assert not runs(2, 384), "the second item's keys would be looked for at the queries' distance"
    assert not runs(1, 300), "keys past the end would count as zeros"


def test_keys_of_other_rows_have_no_causal_edge_or_window_and_must_fit() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from dilabench.kernels.block_sparse.plan import BlockPlan

    mask = np.ones((1, 2, 3), bool)
    for hidden in ({"causal": True}, {"causal": False, "window": (4, 0)}):
        with pytest.raises(ValueError, match="omit key_rows"):
            BlockPlan(mask, 16, 32, key_rows=48, **hidden)
    q, k = torch.zeros(1, 32, 2, 16), torch.zeros(1, 32, 2, 16)
    with pytest.raises(ValueError, match="32 query rows, 48 key rows and 1 mask heads"):
        BlockPlan(mask, 16, 32, False, key_rows=48).check(q, k, k)
