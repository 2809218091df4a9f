"""Whole documents on ranks: each token once, cut only where no segment crosses, even in tokens and work."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilabench.distributed.document_assignment import assigned_documents, pairs_of, segments_of
from dilabench.patterns.dense import DensePattern
from dilabench.patterns.dilated import DilatedPattern
from dilabench.workload.spec import Workload

LONGNET = DilatedPattern(segment_lengths=(2048, 4096, 8192, 16384, 32768), dilation_rates=(1, 2, 4, 8, 16))
SMALL = DilatedPattern(segment_lengths=(4, 8), dilation_rates=(1, 3))


def packing(bounds):
    return tuple(pairwise(bounds))


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), ranks=st.integers(1, 5))
def test_every_token_is_on_one_rank_and_documents_end_where_segments_do(lengths, ranks):
    bounds = packing((0, *np.cumsum(lengths).tolist()))
    found = assigned_documents(bounds, segments_of(SMALL, bounds[-1][1]), ranks)
    assert len(found) == ranks
    parts = sorted(part for of_rank in found for part in of_rank)
    starts, stops = {start for start, _ in bounds}, {stop for _, stop in bounds}
    position = 0
    for start, stop in parts:
        assert start == position
        document = max(at for at in starts if at <= start)
        assert (start - document) % 8 == 0
        assert stop in stops or (stop - document) % 8 == 0
        position = stop
    assert position == bounds[-1][1]
    assert all(list(of_rank) == sorted(of_rank) for of_rank in found)
    assert [of_rank[0] for of_rank in found if of_rank] == sorted(of_rank[0] for of_rank in found if of_rank)


@pytest.mark.parametrize("ranks", [2, 4])
def test_tokens_and_work_are_even(ranks):
    draw = np.random.default_rng(0)
    bounds = packing((0, *np.sort(draw.choice(np.arange(1, 131072), 55, replace=False)).tolist(), 131072))
    segments = segments_of(LONGNET, 131072)
    found = assigned_documents(bounds, segments, ranks)
    lengths = [np.array([stop - start for start, stop in of_rank]) for of_rank in found]
    for counts in ([x.sum() for x in lengths], [pairs_of(x, segments).sum() for x in lengths]):
        assert np.mean(counts) / np.max(counts) > 0.98


def test_pairs_are_those_of_the_pattern_where_all_heads_keep_the_same_rows():
    lengths = np.array([1, 7, 8, 9, 100])
    for length, pairs in zip(lengths.tolist(), pairs_of(lengths, segments_of(SMALL, 128)), strict=True):
        one = Workload.model_validate(
            {
                "pattern": SMALL.model_dump(),
                "batch_size": 1,
                "seq_len": length,
                "num_heads": 1,
                "num_kv_heads": 1,
                "head_dim": 8,
                "dtype": "float32",
                "causal": False,
                "mode": "both",
            }
        )
        assert pairs == SMALL.pairs(one.shapes[0]).attended


def test_heads_with_equal_branches_count_once_so_that_shards_need_no_heads():
    assert segments_of(LONGNET, 131072) == segments_of(LONGNET, 131072, 12, 4)
    grouped = SMALL.model_copy(update={"heads": "grouped"})
    assert segments_of(grouped, 64, 3, 3)[0] == ((4, 1, 2), (8, 3, 1))
    assert segments_of(DensePattern(), 64) is None
