"""Pictures of block masks: one per distinct mask of a record, exact where a block is a cell."""

import numpy as np
import pytest

from dilabench.patterns.answers import SequenceShape
from dilabench.patterns.block_masks import block_shares
from dilabench.patterns.block_sparse import BlockSparsePattern, block_mask
from dilabench.patterns.hidden_rows import HiddenRowsPattern
from dilabench.patterns.pattern import Pattern
from dilabench.patterns.registry import pattern_type
from dilabench.plugins.manager import discover
from dilabench.record import Skipped
from dilabench.report import markdown
from dilabench.report.findings import MAX_CELLS, _pictures_of, sections_of
from dilabench.report.plots import plots


def sparse(**fields):
    return {"kind": "block_sparse", "block_size": 64, "sparsity": 0.75, **fields}


@pytest.fixture
def pictures(make_record, make_row):
    """The plots of a record whose rows have these patterns."""

    def drawn(*patterns, **workload):
        rows = [make_row(pattern=pattern, seq_len=1024, **workload) for pattern in patterns]
        sections = _pictures_of(make_record(rows))
        return [plot for section in sections for plot in section.plots]

    return drawn


def test_equal_masks_are_drawn_once_and_others_by_their_own_name(pictures):
    drawn = pictures(sparse(), {"kind": "dense"}, sparse(), sparse(sparsity=0.5), sparse(seed=1, mask="random"))
    assert [plot.name for plot in drawn] == [
        "mask_local_window_1024_rows_block_64_density_25",
        "mask_local_window_1024_rows_block_64_density_50",
        "mask_random_1024_rows_block_64_density_25",
    ]
    same_name = pictures(sparse(mask="random"), sparse(mask="random", seed=1))
    assert [plot.name for plot in same_name] == [same_name[0].name, f"{same_name[0].name}_2"]


def test_the_title_has_the_density_asked_for_and_reached(pictures):
    (plot,) = pictures(sparse(mask="strided"))
    mask = block_mask(BlockSparsePattern(**sparse(mask="strided")), 1024, True, 1)
    reached = mask.sum() / (16 * 17 / 2)
    assert plot.title == f"strided, 1K tokens, block 64, causal:\ndensity 25.0% requested, {reached:.1%} reached"


@pytest.mark.parametrize("causal", [True, False])
def test_a_cell_per_block_says_whether_it_is_computed(causal, pictures):
    (plot,) = pictures(sparse(mask="random"), causal=causal)
    mask = block_mask(BlockSparsePattern(**sparse(mask="random")), 1024, causal, 1)[0]
    assert (plot.blocks, plot.block_size) == (16, 64)
    for query in range(16):
        for key in range(16):
            hidden = causal and key > query
            assert plot.cells[query][key] == (None if hidden else float(mask[query, key]))


def test_masks_over_branches_are_those_of_the_rows_that_they_keep(pictures):
    branches = {"kind": "dilated", "segment_lengths": (512, 1024), "dilation_rates": (1, 4)}
    drawn = pictures(sparse(branches=branches))
    assert [plot.blocks for plot in drawn] == [8, 4]
    assert "256 rows of a branch of rate 4" in drawn[1].title


def test_a_mask_per_head_shows_the_first(pictures):
    (plot,) = pictures(sparse(mask="random", per_head=True), num_heads=3, num_kv_heads=3)
    mask = block_mask(BlockSparsePattern(**sparse(mask="random", per_head=True)), 1024, True, 3)
    assert "head 0 of 3" in plot.title
    assert plot.cells[15] == tuple(map(float, mask[0, 15]))


def test_a_file_that_is_gone_is_told_and_the_others_are_drawn(make_record, make_row, tmp_path):
    path = tmp_path / "mask.npy"
    np.save(path, np.eye(16, dtype=bool))
    custom = sparse(mask="custom", mask_file=str(path), sparsity=0.0)
    record = make_record([make_row(pattern=pattern, seq_len=1024) for pattern in (custom, sparse())])
    (section,) = _pictures_of(record)
    assert section.plots[0].title.endswith("density from a file, 11.8% reached")
    path.unlink()
    (section,) = _pictures_of(record)
    assert len(section.plots) == 1
    assert "cannot be drawn" in section.sentence
    assert str(path) in section.sentence


def test_large_masks_are_drawn_in_shares():
    rng = np.random.default_rng(0)
    mask = rng.random((600, 600)) < 0.3
    shares = block_shares(mask, MAX_CELLS, MAX_CELLS)
    assert shares.shape == (MAX_CELLS, MAX_CELLS)
    assert shares[0, 0] == mask[:2, :2].mean()
    assert 0 <= shares.min() < shares.max() <= 1


def test_any_suite_shows_its_masks_in_the_report(make_record, make_row, tmp_path):
    rows = [make_row(pattern=sparse(), seq_len=1024, outcome=Skipped(code="unsupported", why="for the test"))]
    record = make_record(rows, suite="quick")
    sections = sections_of(record, discover().catalogue)
    plots.render(record, tmp_path, sections)
    markdown.render(record, tmp_path, sections)
    name = "mask_local_window_1024_rows_block_64_density_25"
    assert {f"{name}.png", f"{name}.svg"} <= {path.name for path in (tmp_path / "plots").iterdir()}
    assert f"](plots/{name}.png)" in (tmp_path / "report.md").read_text()
    dense = make_record([make_row()], suite="quick")
    assert "Block masks" not in [section.title for section in sections_of(dense, discover().catalogue)]


HIDDEN_ROWS = [
    pattern
    for kind in discover().catalogue.patterns
    if issubclass(pattern_type(kind.name), HiddenRowsPattern)
    for pattern in pattern_type(kind.name).examples()
]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [(-1, -1), (7, 5)])
@pytest.mark.parametrize("pattern", HIDDEN_ROWS, ids=str)
def test_keys_are_counted_by_column_as_row_by_row(pattern, causal, window):
    shape = SequenceShape(61, 4, 2, causal, window)
    rows, edges = np.array([0, 1, 5, 17, 18, 40, 60]), np.array([0, 1, 7, 30, 61])
    derived = Pattern.keys_in_columns(pattern, shape, rows, edges)
    assert pattern.keys_in_columns(shape, rows, edges).tolist() == derived.tolist()


@pytest.mark.parametrize("pattern", HIDDEN_ROWS, ids=str)
def test_a_picture_looks_at_each_key_once(pattern, monkeypatch):
    asked, ranges = [], type(pattern).hidden_rows
    monkeypatch.setattr(type(pattern), "hidden_rows", lambda *given: asked.append(1) or ranges(*given))
    pattern.shares(SequenceShape(61, 4, 2, True, (-1, -1)), 20, 20)
    assert len(asked) == 1
