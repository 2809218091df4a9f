"""Block masks: density per row, seeds, masks from files and their refusals, blocks that a shard needs."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilabench.errors import ConfigError
from dilabench.patterns import topk_blocks
from dilabench.patterns.answers import SequenceShape
from dilabench.patterns.block_masks import PREFERENCES, masked_pairs, needed_key_blocks
from dilabench.patterns.block_sparse import BlockSparsePattern, block_mask
from dilabench.patterns.pattern import Pattern
from dilabench.patterns.topk_blocks import TopKBlocksPattern
from dilabench.workload.spec import WorkloadRequest


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(sorted(PREFERENCES)),
    sparsity=st.floats(0, 0.99),
    rows=st.integers(1, 300),
    block=st.integers(1, 40),
    causal=st.booleans(),
)
def test_every_row_keeps_its_share_within_one_block(
    kind: str, sparsity: float, rows: int, block: int, causal: bool
) -> None:
    pattern = BlockSparsePattern(mask=kind, sparsity=sparsity, block_size=block, per_head=True)
    mask = block_mask(pattern, rows, causal, 3)
    blocks = -(-rows // block)
    assert mask.shape == (3, blocks, blocks)
    visible = np.arange(1, blocks + 1) if causal else np.full(blocks, blocks)
    assert (abs(mask.sum(-1) - (1 - sparsity) * visible) <= 1).all()
    assert (mask.sum(-1) >= 1).all()
    assert not (causal and np.triu(mask, 1).any())


def test_only_a_seed_or_a_head_of_its_own_changes_a_random_mask() -> None:
    pattern = BlockSparsePattern(mask="random", block_size=4, per_head=True)
    mask = block_mask(pattern, 200, False, 2)
    assert np.array_equal(mask, block_mask(pattern.model_copy(), 200, False, 2))
    assert not np.array_equal(mask[0], mask[1])
    assert not np.array_equal(mask, block_mask(pattern.model_copy(update={"seed": 1}), 200, False, 2))
    assert block_mask(pattern.model_copy(update={"per_head": False}), 200, False, 2).shape[0] == 1


def test_kinds_keep_what_they_are_named_for() -> None:
    def row(kind: str, index: int) -> list[int]:
        pattern = BlockSparsePattern(mask=kind, block_size=1, sparsity=0.8)
        return np.flatnonzero(block_mask(pattern, 40, False, 1)[0, index]).tolist()

    assert row("local_window", 20) == [16, 17, 18, 19, 20, 21, 22, 23]
    assert {0, 1, 20} <= set(row("global_local", 20))
    assert {12, 16, 18, 19, 20, 21, 22, 24} == set(row("dilated_sparse", 20))
    assert {0, 10, 20, 30} <= set(row("strided", 20))
    assert 20 in row("random", 20)


def test_a_file_is_read_in_both_forms(tmp_path: Path) -> None:
    mask = np.random.default_rng(0).random((5, 5)) < 0.5
    np.save(tmp_path / "mask.npy", mask.astype(np.int64))
    lists = [np.flatnonzero(row).tolist() for row in mask]
    (tmp_path / "mask.json").write_text(json.dumps(lists))
    (tmp_path / "heads.json").write_text(json.dumps([lists, lists]))
    for name, heads in (("mask.npy", 1), ("mask.json", 1), ("heads.json", 2)):
        pattern = BlockSparsePattern(mask="custom", mask_file=str(tmp_path / name), block_size=8)
        found = block_mask(pattern, 37, False, 2)
        assert found.shape == (heads, 5, 5)
        assert (found == mask).all()
        assert (block_mask(pattern, 37, True, 2) == np.tril(mask)).all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.ones((4, 4), bool), "has 4x4 blocks; the workload needs 5x5 blocks of 8"),
        (np.ones((3, 5, 5), bool), "has 3 heads; the workload has 2; give 1 or 2"),
        (np.full((5, 5), 2), "a block mask is bool, or integers 0 and 1"),
        (np.full((5, 5), 0.5), "holds float64"),
        (np.ones(5, bool), "has 1 dimensions"),
        ([[0], [1], [2], [3], [5]], "head 0, row 4: key block 5 is not in 0..4"),
        ([[0], [1], [2], [3], [True]], "key block True is not in 0..4"),
        ([[0], [1], 2, [3], [4]], "row 2: 2 is not a list of key blocks"),
        ({"rows": 5}, "must hold a list"),
        (b"nonsense", "is not a valid .npy file"),
    ],
    ids=str,
)
def test_a_wrong_file_is_refused_with_the_place(content: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / ("mask.json" if isinstance(content, list | dict) else "mask.npy")
    if isinstance(content, np.ndarray):
        np.save(path, content)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(json.dumps(content))
    pattern = BlockSparsePattern(mask="custom", mask_file=str(path), block_size=8)
    with pytest.raises(ConfigError) as refusal:
        block_mask(pattern, 37, False, 2)
    assert message in str(refusal.value)
    assert str(path) in str(refusal.value)


def test_a_request_keeps_the_digest_and_a_changed_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mask.npy"
    np.save(path, np.ones((4, 4), bool))
    request = WorkloadRequest(pattern="block_sparse", mask_file=str(path), seq_len=512)
    workload = request.resolve("float32")
    assert block_mask(workload.pattern, 512, False, 8).all()
    np.save(path, np.eye(4, dtype=bool))
    with pytest.raises(ConfigError, match="has changed since the request was made"):
        block_mask(workload.pattern, 512, False, 8)
    assert request.resolve("float32").pattern.mask_digest != workload.pattern.mask_digest
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        request.resolve("float32")


def test_too_many_blocks_are_refused_with_a_size_that_works() -> None:
    pattern = BlockSparsePattern(block_size=1)
    with pytest.raises(ConfigError, match="use block_size=3 or more"):
        block_mask(pattern, 2**16 + 1, False, 1)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 99), cuts=st.lists(st.integers(0, 60), min_size=2, max_size=4), heads=st.integers(1, 2))
def test_needed_blocks_are_those_that_a_local_row_sees(seed: int, cuts: list[int], heads: int) -> None:
    mask = np.random.default_rng(seed).random((heads, 9, 9)) < 0.2
    rows = [range(*sorted(cuts[:2])), range(*sorted(cuts[2:]))] if len(cuts) == 4 else [range(*sorted(cuts[:2]))]
    wanted = {key for part in rows for row in part for head in mask for key in np.flatnonzero(head[row // 7])}
    assert needed_key_blocks(mask, 7, rows).tolist() == sorted(wanted)


def test_pairs_of_a_selection_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every figure of a report that is per pair asks for them."""
    counted = []
    monkeypatch.setattr(topk_blocks, "masked_pairs", lambda *mask: counted.append(mask) or masked_pairs(*mask))
    pattern = TopKBlocksPattern(selector="random", block_size=16, top_k=2, selection_seed=1234)
    shape = SequenceShape(200, 6, 3, False, (-1, -1))
    assert [pattern.pairs(shape) for _ in range(3)] == [Pattern.pairs(pattern, shape)] * 3
    assert len(counted) == len(pattern.whole_blocks(shape).mask)
