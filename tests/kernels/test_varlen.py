"""Stretches of packed sequences, and the tiles that they reach, against every pair by itself."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilabench.kernels.varlen import Reach, keys_seen, tiles_seen

LENGTH = st.integers(1, 70)


@st.composite
def stretches(draw: st.DrawFn) -> tuple[Reach, Reach, np.ndarray]:
    """The keys that queries see, the queries that see keys, and which pairs are visible [rows, keys]."""
    lengths = draw(st.lists(st.tuples(LENGTH, st.one_of(st.just(0), LENGTH)), min_size=1, max_size=6))
    bounds = [0, *accumulate(queries for queries, _ in lengths)]
    key_bounds = [0, *accumulate(queries + more for queries, more in lengths)]
    causal, (left, right) = draw(st.booleans()), draw(st.tuples(st.integers(-1, 40), st.integers(-1, 40)))
    right = 0 if causal else right
    pairs = np.zeros((bounds[-1], key_bounds[-1]), bool)
    for index, (queries, more) in enumerate(lengths):
        ahead = np.arange(queries + more) - (np.arange(queries)[:, None] + more)
        seen = np.ones(ahead.shape, bool)
        seen &= (ahead >= -left) | (left < 0)
        seen &= (ahead <= right) | (right < 0)
        pairs[bounds[index] : bounds[index + 1], key_bounds[index] : key_bounds[index + 1]] = seen
    queries, keys = torch.tensor(bounds), torch.tensor(key_bounds)
    seen, seeing = (
        keys_seen(queries, keys, bounds[-1], left, right),
        keys_seen(keys, queries, key_bounds[-1], right, left),
    )
    return seen, seeing, pairs


@settings(max_examples=60, deadline=None)
@given(case=stretches(), own=st.sampled_from([16, 32, 64]), other=st.sampled_from([16, 32, 64]))
def test_tiles_hold_every_visible_pair(case: tuple[Reach, Reach, np.ndarray], own: int, other: int) -> None:
    *reaches, pairs = case
    for reach, visible in zip(reaches, (pairs, pairs.T), strict=True):
        rows = np.arange(visible.shape[1])
        first, stop = (x.numpy()[:, None] for x in reach)
        assert np.array_equal((rows >= first) & (rows < stop), visible)
        padded = np.pad(visible, [(0, -size % tile) for size, tile in zip(visible.shape, (own, other), strict=True)])
        tiles = padded.reshape(len(padded) // own, own, -1, other).sum((1, 3))
        found = [x.tolist() for x in tiles_seen(reach, own, other)]
        for tile, (begin, end, full_begin, full_end) in enumerate(zip(*found, strict=True)):
            assert set(np.flatnonzero(tiles[tile])) <= set(range(begin, end))
            assert begin <= full_begin <= full_end <= end
            part = visible[tile * own : (tile + 1) * own, full_begin * other : full_end * other]
            assert part.all()
            assert full_end * other <= visible.shape[1]


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
