"""`block-sparse-ring` against one device, and its counted bytes against the mask; one spawn per number of ranks."""

import numpy as np
import pytest

from dilabench.distributed.shardings import BLOCKS
from tests.conftest import slow

pytestmark = pytest.mark.distributed


def any_masks(folder, count):
    """Random custom masks: any density, empty rows and columns, one or several heads, ragged last blocks."""
    import block_ring_cases

    random = np.random.default_rng(7)
    cases = {}
    for number in range(count):
        block, blocks = int(random.integers(1, 8)), int(random.integers(1, 14))
        length = int(random.integers((blocks - 1) * block + 1, blocks * block + 1))
        kv_heads, group = int(random.integers(1, 4)), int(random.integers(1, 3))
        heads = int(random.choice([1, kv_heads * group]))
        mask = random.random((heads, blocks, blocks)) < random.choice([0.05, 0.3, 0.8])
        mask[:, random.integers(blocks)] &= bool(random.integers(2))
        mask[:, :, random.integers(blocks)] &= bool(random.integers(2))
        shape = {"num_heads": kv_heads * group, "num_kv_heads": kv_heads, "causal": bool(random.integers(2))}
        one = block_ring_cases.custom(folder / f"{number}.npy", mask, block, length, **shape)
        cases[f"{number}: {blocks} blocks of {block}, {shape}"] = one
    return cases


@pytest.mark.parametrize("mutation", ["without_returned_gradients", slow("without_a_needed_block")])
def test_what_is_lost_on_the_way_is_caught(mutation, launch):
    import block_ring_cases

    cases = {"full": block_ring_cases.CASES["random, full"]}
    wrong = {part for _, part, _ in launch(getattr(block_ring_cases, mutation), 2, [cases])[0]}
    assert wrong == ({"dk", "dv"} if mutation == "without_returned_gradients" else {"out", "lse", "dq", "dk", "dv"})


def rows_to_move(one, parts):
    """[owner, reader] rows of keys of one head that some query of the reader sees, head by head and row by row."""
    (shape,) = one.shapes
    blocks = one.pattern.whole_blocks(shape)
    size, ranks = blocks.block_size, len(parts)
    owner_of = np.full(one.seq_len, -1)
    for rank, part in enumerate(parts):
        owner_of[part] = rank
    assert sorted(position for part in parts for position in part) == list(range(one.seq_len))
    of_queries = blocks.mask.repeat(one.num_heads // len(blocks.mask), axis=0)
    rows = np.zeros((ranks, ranks), dtype=int)
    for head in range(one.num_kv_heads):
        mask = of_queries[head * one.group_size : (head + 1) * one.group_size].any(0)
        for reader, part in enumerate(parts):
            seen = mask[sorted({position // size for position in part})].any(0)
            for key in range(one.seq_len):
                rows[owner_of[key], reader] += seen[key // size] and owner_of[key] != reader
    return rows


@pytest.mark.parametrize(("ranks", "masks"), [slow(1, 24), (3, 3), slow(4, 24)])
def test_results_are_those_of_one_device_and_only_needed_blocks_travel(ranks, masks, tmp_path, launch):
    import block_ring_cases

    cases = block_ring_cases.CASES | any_masks(tmp_path, masks)
    found = launch(block_ring_cases.exact_and_counted, ranks, [cases])
    for case, one in cases.items():
        assert [wrong for wrong, _, _ in (rank[case] for rank in found)] == [[]] * ranks, case
        rows = rows_to_move(one, found[0][case][1])
        vector = 2 * one.batch_size * one.head_dim * 8
        keys, gradients, everything = np.array([rank[case][2] for rank in found]).T
        assert keys.tolist() == (vector * rows.sum(0)).tolist(), case
        assert gradients.tolist() == (vector * rows.sum(1)).tolist(), case
        assert everything.tolist() == (keys + gradients).tolist(), case
        for mode, counted in (("forward", keys), ("backward", gradients), ("both", everything)):
            assert BLOCKS.received_bytes(one.replace(mode=mode), ranks) == counted.max(), (case, mode)


def test_half_precision_errs_hardly_more_than_on_one_device(launch):
    import block_ring_cases

    for part, ours, alone, largest, limit in launch(block_ring_cases.half_precision, 2)[0]:
        assert ours <= 1.5 * alone, part
        assert largest <= limit, part


def test_the_projected_ring_has_the_gradients_of_one_device(launch):
    import block_ring_cases

    for differences in launch(block_ring_cases.projected, 3):
        assert max(differences) < 1e-12
