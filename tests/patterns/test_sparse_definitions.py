"""window_sink, column_bounds and topk_blocks against their definitions (semantics.md §5), written out pair by pair."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilabench.errors import ConfigError
from dilabench.patterns.answers import HiddenRows
from dilabench.patterns.column_bounds import ColumnBoundsPattern
from dilabench.patterns.native_sparse import BlockwiseNativeSparsePattern, NativeSparsePattern
from dilabench.patterns.pattern import Pattern, SequenceShape
from dilabench.patterns.registry import pattern_type, read_pattern
from dilabench.patterns.selectors import ABSENT, SELECTORS, Blocks, select, stand_ins
from dilabench.patterns.topk_blocks import TopKBlocksPattern
from dilabench.patterns.window_sink import WindowSinkPattern
from dilabench.plugins.manager import discover
from dilabench.workload.spec import WorkloadRequest
from tests.patterns.test_selected_blocks import seen

N = 41
FULL = SequenceShape(N, 4, 2, causal=False, window=(-1, -1))
i, j = np.indices((N, N))


@settings(max_examples=30, deadline=None)
@given(pattern=WindowSinkPattern.strategy(N))
def test_a_window_and_the_first_keys(pattern: WindowSinkPattern) -> None:
    window = (i - pattern.window_size < j) & (j <= i)
    assert np.array_equal(seen(pattern), (j < pattern.sinks) | window)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4).map(tuple),
    lead=st.integers(0, 12),
    answers=st.integers(1, 5),
)
def test_documents_prefixes_and_shared_questions(lengths: tuple[int, ...], lead: int, answers: int) -> None:
    of_maker = {
        bounds: seen(ColumnBoundsPattern(bounds=bounds, document_lengths=lengths, lead=lead, answers=answers))
        for bounds in ("documents", "prefix_documents", "shared_question")
    }
    document = np.repeat(np.arange(N), np.resize(lengths, N))[:N]
    place = np.arange(N) - np.searchsorted(document, document)
    size = np.bincount(document)[document]
    same = document[i] == document[j]
    assert np.array_equal(of_maker["documents"], same)
    assert np.array_equal(of_maker["prefix_documents"], same & ((j <= i) | (place[j] < lead)))
    part = np.where(place < lead, -1, (place - lead) * answers // np.maximum(size - lead, 1))
    assert np.array_equal(of_maker["shared_question"], same & ((part[j] == -1) | (part[j] == part[i])))


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, np.ndarray]:
    """(rows, bounds [ranges, 2, rows]): any ranges, also empty, turned around, overlapping and over everything."""
    rows, count = draw(st.integers(1, 30)), draw(st.integers(1, 3))
    numbers = st.lists(st.integers(0, rows), min_size=2 * count * rows, max_size=2 * count * rows)
    return rows, np.array(draw(numbers)).reshape(count, 2, rows)


@settings(max_examples=60, deadline=None)
@given(case=ranges(), causal=st.booleans(), window=st.tuples(st.integers(-1, 12), st.just(-1)))
def test_ranges_are_joined_and_what_is_left_is_counted(
    case: tuple[int, np.ndarray], causal: bool, window: tuple[int, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows, bounds = case
    hidden = HiddenRows.of(rows, *((part[0], part[1]) for part in bounds))
    row = np.arange(rows)[:, None]
    wanted = ~np.any([(row >= start) & (row < stop) for start, stop in bounds], axis=0)
    assert np.array_equal(~hidden.hides(np.arange(rows), slice(None)), wanted)
    path = tmp_path_factory.mktemp("bounds") / "bounds.npy"
    np.save(path, bounds)
    pattern = ColumnBoundsPattern(bounds="file", bounds_file=str(path))
    shape = SequenceShape(rows, 2, 1, causal, window)
    key = np.arange(rows)
    wanted &= (key <= row) | (not causal)
    wanted &= (key >= row - window[0]) | (window[0] < 0)
    assert pattern.pairs(shape).attended == 2 * wanted.sum()
    assert pattern.covered(shape, 0).tolist() == wanted.any(1).tolist()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", sorted(SELECTORS))
def test_a_selector_keeps_the_best_and_what_a_device_would(name: str, causal: bool) -> None:
    blocks = Blocks(count=23, kv_heads=2, group=3, causal=causal, seed=5)
    selector = SELECTORS[name]
    found = select(selector, blocks, top_k=6)
    for head in range(2):
        scores = selector.scores(blocks, head, range(23))
        if selector.reads_queries:
            q, k = (part.astype(np.float32) for part in stand_ins(blocks, head))
            assert np.array_equal(scores, q.sum(1) @ k.T), "exact in float32"
        for row in range(23):
            chosen = found[head, row][found[head, row] != ABSENT]
            visible = np.arange(row + 1 if causal else 23)
            assert len(chosen) == min(6, len(visible))
            assert (np.diff(chosen) > 0).all()
            assert not selector.own_block or row in chosen
            others = np.setdiff1d(visible, chosen)
            free = chosen[chosen != row] if selector.own_block else chosen
            assert not len(others) or not len(free) or scores[row, others].max() <= scores[row, free].min()
    assert not np.array_equal(found[0], found[1]), "key/value heads select by themselves"


def test_of_equal_scores_the_earlier_block_is_better() -> None:
    blocks = Blocks(count=5, kv_heads=1, group=1, causal=False, seed=0)
    alike = SELECTORS["random"].__class__("", lambda b, _head, rows: np.zeros((len(rows), b.count)))
    assert select(alike, blocks, 2)[0].tolist() == [[0, 1]] * 5


def given_indices(folder: Path, indices: object, **changes: object) -> TopKBlocksPattern:
    path = folder / "indices.npy"
    np.save(path, np.array(indices))
    asked = WorkloadRequest(pattern="topk_blocks", indices_file=str(path), block_size=8, seq_len=N, num_heads=4)
    pattern = asked.model_copy(update=changes).resolve("float32").pattern
    assert isinstance(pattern, TopKBlocksPattern)
    return pattern


def test_given_indices_in_any_order_count_once_and_may_be_absent(tmp_path: Path) -> None:
    rows = [[5, 0, 0], [1, -1, -1], [-1, -1, -1], [3, 2, 3], [0, 4, 1], [5, 5, 5]]
    pattern = given_indices(tmp_path, rows)
    wanted = np.zeros((6, 6), bool)
    for row, keys in enumerate(rows):
        wanted[row, [key for key in keys if key >= 0]] = True
    assert np.array_equal(seen(pattern), wanted[i // 8, j // 8])
    assert pattern.covered(FULL, 0).tolist() == (np.arange(N) // 8 != 2).tolist()
    assert pattern.row_labels([FULL])["density_reached"] == f"{9 / 36:.4f}"


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([[0], [1], [2], [6], [4], [5]], "head 0, row 3: key block 6 is not in 0..5; -1 means none"),
        ([[0], [1], [-2], [3], [4], [5]], "head 0, row 2: key block -2 is not in 0..5"),
        ([[0], [1]], "has 2 query blocks; the workload needs 6 blocks of 8"),
        ([[[0]] * 6] * 3, "has 3 heads; the workload has 2 key/value heads; give 1 or 2"),
        ([[0.5]] * 6, "holds float64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_indices_that_do_not_fit_are_refused_with_the_place(tmp_path: Path, indices: object, message: str) -> None:
    with pytest.raises(ConfigError, match="indices file") as refusal:
        given_indices(tmp_path, indices).whole_blocks(FULL)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (np.full((1, 2, N), N + 1), f"range 0, key 0: row {N + 1} is not in 0..{N}"),
        (np.zeros((1, 2, 7), int), f"has 7 columns; the sequence has {N} keys"),
        (np.zeros((2, N), int), "give integers [ranges, 2, N]"),
        (np.zeros((1, 2, N)), "holds float64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bounds_that_do_not_fit_are_refused(tmp_path: Path, bounds: np.ndarray, message: str) -> None:
    path = tmp_path / "bounds.npy"
    np.save(path, bounds)
    with pytest.raises(ConfigError) as refusal:
        ColumnBoundsPattern(bounds="file", bounds_file=str(path)).hidden_rows(FULL)
    assert message in str(refusal.value)


def test_a_prefix_under_a_causal_mask_is_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match="use it with causal=false"):
        WorkloadRequest(pattern="column_bounds", bounds="prefix_documents").resolve("float32")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "pattern",
    [
        BlockwiseNativeSparsePattern(block_size=6, top_k=2, window_size=4),
        NativeSparsePattern(block_size=16, top_k=2, window_size=4, compression_length=9, compression_stride=3),
    ],
    ids=lambda pattern: pattern.kind,
)
def test_what_native_sparse_answers_by_itself_follows_from_its_counts(pattern, causal: bool) -> None:
    shape = SequenceShape(N, 4, 2, causal, (-1, -1))
    for head in (0, 3):
        assert pattern.covered(shape, head).tolist() == Pattern.covered(pattern, shape, head).tolist()
        for key in range(0, N, 5):
            derived = Pattern.rows_seeing(pattern, shape, head, key)
            assert pattern.rows_seeing(shape, head, key).tolist() == derived.tolist()
    pairs, selected, window = pattern.pairs(shape), *(one.pattern.pairs(shape) for one in pattern.summands(shape)[1:])
    length, stride = pattern.compression
    whole = [max(0, (tokens - length) // stride + 1) for tokens in range(1, N + 1)]
    means = 4 * sum(whole if causal else [whole[-1]] * N)
    assert pairs.attended == means + selected.attended + window.attended
    assert pairs.least == means + max(selected.attended, window.attended)


@pytest.mark.parametrize("kind", ["topk_blocks", "blockwise_native_sparse"])
def test_what_shares_a_selection_is_said(kind):
    (summary,) = (known.summary for known in discover().catalogue.patterns if known.name == kind)
    assert "block of queries" in summary
    for pattern in pattern_type(kind).examples():
        assert pattern.label().endswith(" per block of queries")


@pytest.mark.parametrize("method", ["nsa", "moba", "dsa", "msa"])
def test_a_preset_named_after_a_method_selects_as_it_does(method):
    named = [preset for preset in discover().catalogue.workloads if method in preset.name.split("_")]
    assert named
    for preset in named:
        blockwise = preset.name.startswith("blockwise_")
        assert ("per block of queries" in preset.summary) == blockwise
        assert (preset.fields["pattern"] in {"selected_blocks", "native_sparse"}) == (not blockwise)


def test_records_from_before_read_native_sparse_as_the_blockwise_form():
    before = {"kind": "native_sparse", "block_size": 64, "top_k": 16, "window_size": 512, "selection_seed": 0}
    assert read_pattern(before) == BlockwiseNativeSparsePattern()
    for pattern in (NativeSparsePattern(), BlockwiseNativeSparsePattern(top_k=3)):
        assert read_pattern(pattern.model_dump(mode="json")) == pattern
