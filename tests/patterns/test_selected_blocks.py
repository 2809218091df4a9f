"""selected_blocks against its definition (semantics.md §5), written out pair by pair, and its selectors."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from dilabench.errors import ConfigError
from dilabench.patterns.answers import SequenceShape
from dilabench.patterns.pattern import Pattern
from dilabench.patterns.selected_blocks import SelectedBlocksPattern
from dilabench.patterns.token_selectors import HIDDEN, NEIGHBOURS, TOKEN_SELECTORS, Tokens, select_rows, thresholds
from dilabench.validation import validated
from dilabench.workload.spec import WorkloadRequest

N = 41
FULL = SequenceShape(N, 4, 2, causal=False, window=(-1, -1))
LARGE = SequenceShape(4000, 8, 2, causal=True, window=(-1, -1))
i, j = np.indices((N, N))


def seen(pattern: Pattern, head: int = 0, shape: SequenceShape = FULL) -> np.ndarray:
    matrix = np.zeros((shape.length, shape.length), bool)
    for group in pattern.counts(shape, head, np.arange(shape.length)):
        matrix[group.rows[:, None], group.keys()] = True
    return matrix


def from_file(folder: Path, indices: np.ndarray, **changes: object) -> SelectedBlocksPattern:
    np.save(folder / "indices.npy", indices)
    fields = {"pattern": "selected_blocks", "indices_file": str(folder / "indices.npy"), "block_size": 16, **changes}
    pattern = WorkloadRequest(seq_len=N, num_heads=4, **fields).resolve("float32").pattern
    assert isinstance(pattern, SelectedBlocksPattern)
    return pattern


def test_given_indices_are_in_any_order_count_once_and_may_be_absent(tmp_path: Path) -> None:
    indices = np.random.default_rng(0).integers(-1, 3, (N, 2, 7))
    pattern = from_file(tmp_path, indices)
    for head in range(4):
        chosen = indices[:, head // 2]
        assert np.array_equal(seen(pattern, head), (chosen[:, None] == (j // 16)[:, :, None]).any(2))
    assert pattern.selection(FULL).shape == (N, 2, 3)


@pytest.mark.parametrize("window", [(-1, -1), (5, 0)])
@pytest.mark.parametrize("causal", [True, False])
def test_given_indices_are_counted_and_covered_by_pairs(causal: bool, window: tuple[int, int], tmp_path: Path) -> None:
    indices = np.random.default_rng(0).integers(-1, 3, (N, 1, 2))
    pattern, shape = from_file(tmp_path, indices), SequenceShape(N, 4, 2, causal, window)
    visible = (j <= i) | (not causal)
    if window[0] >= 0:
        visible &= (j >= i - window[0]) & (j <= i)
    matrix = seen(pattern, 0, shape) & visible
    assert pattern.pairs(shape).attended == 4 * matrix.sum()
    assert pattern.covered(shape, 3).tolist() == matrix.any(1).tolist()


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (np.full((N, 1), 3), "token 0, head 0: key block 3 is not in 0..2; -1 means none"),
        (np.full((N, 2, 1), -2), "key block -2 is not in 0..2"),
        (np.zeros((7, 1), int), f"has 7 tokens; the sequence has {N}"),
        (np.zeros((N, 3, 1), int), "has 3 heads; the workload has 2 key/value heads; give 1 or 2"),
        (np.zeros((N, 1)), "holds float64"),
        (np.zeros((N, 0), int), "give integers [N, S] or [N, K, S]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_indices_that_do_not_fit_are_refused_with_the_place(tmp_path: Path, indices: np.ndarray, message: str) -> None:
    with pytest.raises(ConfigError, match="indices file") as refusal:
        from_file(tmp_path, indices).selection(FULL)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 24}, "block_size 24 is neither 1 nor a multiple of 16; use 32"),
        ({"block_size": 8192}, "4096"),
        ({"selector": "given"}, "need each other"),
        ({"selector": "pooled"}, "selector"),
    ],
)
def test_impossible_fields_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validated(SelectedBlocksPattern, fields)


def test_tokens_that_cannot_be_ranked_are_refused_with_a_way_out() -> None:
    request = WorkloadRequest(pattern="selected_blocks", block_size=1, seq_len=2**20)
    with pytest.raises(ConfigError, match="use larger blocks, or an indices_file"):
        request.resolve("float32")


@settings(max_examples=30, deadline=None)
@given(pattern=SelectedBlocksPattern.strategy(N))
def test_what_is_answered_from_ranks_follows_from_the_counts(pattern: SelectedBlocksPattern) -> None:
    for causal in (True, False):
        shape = SequenceShape(N, 4, 2, causal, (-1, -1))
        assert pattern.pairs(shape).attended == Pattern.pairs(pattern, shape).attended
        assert pattern.covered(shape, 3).tolist() == Pattern.covered(pattern, shape, 3).tolist()
        for key in (0, 17, N - 1):
            derived = Pattern.rows_seeing(pattern, shape, 3, key)
            assert pattern.rows_seeing(shape, 3, key).tolist() == derived.tolist()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize("name", sorted(TOKEN_SELECTORS))
def test_a_selector_keeps_the_best_whatever_rows_are_asked_for_together(name: str, block: int, causal: bool) -> None:
    tokens, selector = Tokens(200, block, 2, 3, causal, 5, 6, 2), TOKEN_SELECTORS[name]
    rows, blocks = np.arange(200), np.arange(-(-200 // block))
    for head in range(2):
        ranks = selector.ranks(tokens, head, rows, blocks)
        found = select_rows(selector, tokens, head, rows)
        assert all(len(set(row)) == len(row) for row in np.where(ranks == HIDDEN, -1 - blocks, ranks).tolist())
        for row in range(200):
            visible = np.arange(row // block + 1 if causal else len(blocks))
            best = visible[np.argsort(-ranks[row, visible])][:6]
            assert found[row][found[row] >= 0].tolist() == sorted(best.tolist())
            assert block == 1 or row // block in best
        some = np.array([3, 77, 199])
        assert np.array_equal(select_rows(selector, tokens, head, some), found[some])
        assert np.array_equal(thresholds(selector, tokens, head, some), thresholds(selector, tokens, head, rows)[some])
    assert not np.array_equal(found, select_rows(selector, tokens, 0, rows)), "key/value heads select by themselves"


def test_nsa_always_takes_the_first_block_and_two_local_ones() -> None:
    chosen = SelectedBlocksPattern(block_size=16, top_k=4).selected(LARGE, 1, np.arange(48, 4000))
    own = np.arange(48, 4000)[:, None] // 16
    assert ((chosen == 0).any(1) & (chosen == own).any(1) & (chosen == own - 1).any(1)).all()


def test_neighbours_share_about_three_of_four_blocks() -> None:
    pattern = SelectedBlocksPattern(block_size=16, top_k=17, selector="neighbours")
    rows = np.arange(2000, 4000, NEIGHBOURS)
    first, last = (pattern.selected(LARGE, 0, rows + at) for at in (0, NEIGHBOURS - 1))
    shared = (first[:, :, None] == last[:, None]).any(2).sum(1) - 1
    assert 0.65 < shared.mean() / 16 < 0.85
    random = pattern.model_copy(update={"selector": "random"}).row_labels([LARGE])
    assert float(random["overlap"]) < 0.3 < float(pattern.row_labels([LARGE])["overlap"])


def test_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = SelectedBlocksPattern(block_size=1, top_k=40, selector="indexer")
    rows = np.arange(FULL.length)
    whole = pattern.selected(FULL, 1, rows)
    monkeypatch.setattr("dilabench.patterns.selected_blocks.RANKS_AT_ONCE", 100)
    assert np.array_equal(pattern.selected(FULL, 1, rows), whole)


def test_a_selection_is_made_once_and_each_caller_has_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, calls = SelectedBlocksPattern(block_size=16, top_k=2, selector="random", selection_seed=77), []
    selected = SelectedBlocksPattern.selected
    monkeypatch.setattr(SelectedBlocksPattern, "selected", lambda *asked: calls.append(asked) or selected(*asked))
    first = pattern.selection(LARGE)
    made = len(calls)
    wanted = first.copy()
    first[:] = -1
    assert np.array_equal(pattern.selection(LARGE), wanted)
    assert len(calls) == made
