from __future__ import annotations

import itertools

import pytest
import torch

from dilabench.backends.band import Band


@pytest.mark.parametrize(
    ("causal", "window", "length", "band"),
    [
        (False, (-1, -1), 9, Band(-1, -1)),
        (True, (-1, -1), 9, Band(-1, 0)),
        (False, (-1, 0), 9, Band(-1, 0)),
        (True, (8, -1), 9, Band(-1, 0)),
        (True, (7, 0), 9, Band(7, 0)),
        (False, (8, 8), 9, Band(-1, -1)),
        (True, (-1, -1), 1, Band(-1, -1)),
        (True, (0, 0), 1, Band(-1, -1)),
    ],
)
def test_bounds_that_hide_nothing_are_unbounded(causal: bool, window: tuple[int, int], length: int, band: Band) -> None:
    assert Band.of(causal, window, length, length) == band


@pytest.mark.parametrize(("queries", "keys"), [(11, 11), (13, 7), (5, 12)])
def test_blocks_cover_the_band_exactly(queries: int, keys: int) -> None:
    for left, right, causal, block in itertools.product((-1, 0, 2, 20), (-1, 0, 3), (False, True), (1, 4, 50)):
        band = Band.of(causal, (left, right), queries, keys)
        seen = torch.zeros(queries, keys, dtype=torch.bool)
        for start in range(0, queries, block):
            stop = min(queries, start + block)
            first, end = band.keys_of(start, stop, keys)
            hidden = band.hidden(start, stop, first, end, torch.device("cpu"))
            seen[start:stop, first:end] = True if hidden is None else ~hidden
        expected = [
            [
                (left < 0 or j >= i - left) and (right < 0 or j <= i + right) and (not causal or j <= i)
                for j in range(keys)
            ]
            for i in range(queries)
        ]
        assert torch.equal(seen, torch.tensor(expected)), band


def test_kinds() -> None:
    assert Band(-1, -1).full
    assert Band(-1, 0).causal
    assert not Band(-1, 0).windowed
    assert Band(3, 0).windowed
    assert Band(-1, 3).windowed
