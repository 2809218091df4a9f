"""Stretches of packed sequences, and the lists of tiles that are made of them, against every pair by itself."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilabench.kernels.varlen import SequencePlan, keys_seen, sequence_plan

LENGTH = st.integers(1, 70)


@st.composite
def plans(draw: st.DrawFn) -> tuple[SequencePlan, np.ndarray]:
    """A plan, and which pairs are visible [rows, keys]."""
    lengths = draw(st.lists(st.tuples(LENGTH, st.one_of(st.just(0), LENGTH)), min_size=1, max_size=6))
    bounds = [0, *accumulate(queries for queries, _ in lengths)]
    key_bounds = [0, *accumulate(queries + more for queries, more in lengths)]
    causal, (left, right) = draw(st.booleans()), draw(st.tuples(st.integers(-1, 40), st.integers(-1, 40)))
    pairs = np.zeros((bounds[-1], key_bounds[-1]), bool)
    for index, (queries, more) in enumerate(lengths):
        ahead = np.arange(queries + more) - (np.arange(queries)[:, None] + more)
        seen = np.ones(ahead.shape, bool)
        seen &= (ahead >= -left) | (left < 0)
        seen &= (ahead <= (0 if causal else right)) | (right < 0 and not causal)
        pairs[bounds[index] : bounds[index + 1], key_bounds[index] : key_bounds[index + 1]] = seen
    return sequence_plan(bounds, causal, (left, right), key_bounds), pairs


@settings(max_examples=60, deadline=None)
@given(case=plans(), block_m=st.sampled_from([16, 32, 64]), block_n=st.sampled_from([16, 32, 64]))
def test_lists_hold_every_visible_tile_once(case: tuple[SequencePlan, np.ndarray], block_m: int, block_n: int) -> None:
    plan, pairs = case
    assert np.array_equal(~plan.hidden.hides(np.arange(plan.rows), slice(None)), pairs)
    padded = np.pad(pairs, [(0, -size % tile) for size, tile in zip(pairs.shape, (block_m, block_n), strict=True)])
    tiles = padded.reshape(len(padded) // block_m, block_m, -1, block_n).sum((1, 3))
    for by_key, visible in ((False, tiles), (True, tiles.T)):
        lists = plan.lists(block_m, block_n, by_key)
        assert sorted(lists.order[0].tolist()) == list(range(len(visible)))
        for own in range(len(visible)):
            full, masked = (part.tolist() for part in lists.partners(0, own))
            assert len({*full, *masked}) == len(full) + len(masked)
            assert set(np.flatnonzero(visible[own])) <= {*full, *masked}
            for other in full:
                query, key = (other, own) if by_key else (own, other)
                assert by_key or (key + 1) * block_n <= plan.keys
                assert pairs[query * block_m : (query + 1) * block_m, key * block_n : (key + 1) * block_n].all()
    assert plan.every_row_has_work


def test_the_last_query_stands_at_the_last_key() -> None:
    queries, keys = torch.tensor([0, 2, 3]), torch.tensor([0, 5, 9])
    reach = keys_seen(queries, keys, 3, left=1, right=0)
    assert list(zip(*(x.tolist() for x in reach), strict=True)) == [(2, 4), (3, 5), (7, 9)]
    seeing = keys_seen(keys, queries, 9, left=0, right=1)
    assert [stop - first for first, stop in zip(*(x.tolist() for x in seeing), strict=True)] == [
        0,
        0,
        1,
        2,
        1,
        0,
        0,
        1,
        1,
    ]
