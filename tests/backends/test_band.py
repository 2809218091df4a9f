from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dilabench.backends.band import Band
from dilabench.backends.sdpa import flash_cpu


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


def test_blocks_that_see_alike_have_one_mask_that_is_not_copied() -> None:
    """torch's CPU kernel copies a mask that does not lie row by row, in every call."""
    seen: list[Tensor | None] = []
    q = torch.randn(1, 1500, 1, 8)
    band = Band.of(False, (100, 30), 1500, 1500)
    for start in (256, 512, 768):
        first, end, mask = flash_cpu._block_mask(q[:, start : start + 256], start, 1500, band, backward=False)
        hidden = band.hidden(start, start + 256, first, end, q.device)
        assert mask is not None
        assert hidden is not None
        assert mask.is_contiguous()
        assert torch.equal(mask.isneginf(), hidden)
        seen.append(mask)
    assert seen[0] is seen[1] is seen[2]
    with FlopCounterMode(display=False):
        traced = flash_cpu._block_mask(q[:, 256:512], 256, 1500, band, backward=False)[2]
    assert traced is not seen[0], "whoever follows a call must see all that it makes"
    with torch.device("meta"):
        mask = flash_cpu._block_mask(q[:, :100], 0, 1500, band, backward=False)[2]
    assert mask is not None
    assert mask.device == q.device, "whatever tensors are made on by default"
