"""FlexAttention over packed sequences: its mask and lists of blocks, its eager numbers, and what it compiles."""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention as library

from dilabench.backends import flex
from dilabench.backends.adapt import Sequences
from dilabench.backends.band import Band
from tests.backends.test_packed import LENGTHS, LOOKING_AHEAD, MASKS, agrees_with_math
from tests.conftest import half_are_slow

LENGTH = st.one_of(st.integers(1, 9), st.sampled_from([63, 127, 128, 129, 260]))
BANDS = [(-1, -1), (-1, 0), (0, 0), (40, 0), (200, 0), (3, 7)]


def sequences_of(queries: list[int], keys: list[int]) -> Sequences:
    bounds = (torch.tensor([0, *accumulate(lengths)], dtype=torch.int32) for lengths in (queries, keys))
    cu_seqlens, cu_seqlens_k = bounds
    return Sequences(cu_seqlens, max(queries), cu_seqlens_k, max(keys))


def visible(sequences: Sequences, band: Band) -> Tensor:
    """[T, T_k] bool, sequence by sequence."""
    bounds, others = sequences.cu_seqlens.tolist(), sequences.cu_seqlens_k.tolist()
    seen = torch.zeros(bounds[-1], others[-1], dtype=torch.bool)
    for start, stop, first, end in zip(bounds, bounds[1:], others, others[1:], strict=False):
        place = torch.arange(end - first - (stop - start), end - first)[:, None]
        key = torch.arange(end - first)
        own = torch.ones(len(place), len(key), dtype=torch.bool)
        if band.left >= 0:
            own &= key >= place - band.left
        if band.right >= 0:
            own &= key <= place + band.right
        seen[start:stop, first:end] = own
    return seen


def listed(counts: Tensor, lists: Tensor, columns: int) -> Tensor:
    """How often each block stands in a list: [blocks, columns]."""
    found = torch.zeros(lists.shape[2], columns, dtype=torch.int64)
    for row, (count, blocks) in enumerate(zip(counts[0, 0], lists[0, 0], strict=True)):
        found[row] += torch.bincount(blocks[:count].long(), minlength=columns)
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(LENGTH, st.one_of(st.just(0), LENGTH)), min_size=1, max_size=6), st.sampled_from(BANDS))
def test_mask_and_blocks_are_what_is_seen(lengths: list[tuple[int, int]], sides: tuple[int, int]) -> None:
    sequences, band = sequences_of([x for x, _ in lengths], [x + more for x, more in lengths]), Band(*sides)
    rows, keys = int(sequences.cu_seqlens[-1]), int(sequences.cu_seqlens_k[-1])
    mask, seen = flex.packed_mask(sequences, band, rows, keys), visible(sequences, band)
    i, j = torch.meshgrid(torch.arange(rows), torch.arange(keys), indexing="ij")
    assert torch.equal(mask.mask_mod(i, i, i, j), seen)
    size = flex.BLOCK
    tall, wide = -(-rows // size), -(-keys // size)

    def by_block(pairs: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(pairs, (0, wide * size - keys, 0, tall * size - rows))
        return padded.view(tall, size, wide, size).sum((1, 3))

    visible_pairs, all_pairs = by_block(seen), by_block(torch.ones_like(seen))
    partly, full = (
        listed(mask.kv_num_blocks, mask.kv_indices, wide),
        listed(mask.full_kv_num_blocks, mask.full_kv_indices, wide),
    )
    partly_by_key, full_by_key = (
        listed(mask.q_num_blocks, mask.q_indices, tall).T,
        listed(mask.full_q_num_blocks, mask.full_q_indices, tall).T,
    )
    for some, every in ((partly, full), (partly_by_key, full_by_key)):
        assert int((some + every).max()) == 1
        assert bool(((some + every)[visible_pairs > 0] == 1).all())
        assert torch.equal(visible_pairs[every > 0], all_pairs[every > 0])


def eager(patch: pytest.MonkeyPatch) -> None:
    """torch's uncompiled form, which has a backward on a CPU but refuses to be asked for it."""
    patch.setattr(library, "_validate_device", lambda *_: None)
    patch.setattr(library, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
    patch.setattr(flex, "_compiled", lambda *_key: (flex._call, None))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("mask", "lengths"), half_are_slow([*MASKS, LOOKING_AHEAD], LENGTHS), ids=str)
def test_results_of_the_eager_form(mask: dict[str, Any], lengths: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eager(monkeypatch)
    agrees_with_math(flex.packed, "cpu", torch.float32, lengths, **mask)


def test_other_bounds_and_masks_over_as_many_tokens_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    flex._compiled.cache_clear()
    q = torch.randn(200, 2, 16)
    for lengths in ([200], [1, 150, 49], [7] * 28 + [4]):
        bounds, longest, *_ = sequences_of(lengths, lengths)
        for mask in MASKS:
            flex.packed.attend(q, q, q, cu_seqlens=bounds, longest=longest, scale=0.3, **{"causal": False, **mask})
    assert counter.frame_count == 1
    flex._compiled.cache_clear()


def test_a_mask_is_kept_until_its_bounds_change() -> None:
    sequences, band = sequences_of([3, 4], [3, 4]), Band(-1, 0)
    first = flex.packed_mask(sequences, band, 7, 7)
    assert flex.packed_mask(sequences, band, 7, 7) is first
    sequences.cu_seqlens[1] = 5
    sequences.cu_seqlens_k[1] = 5
    second = flex.packed_mask(sequences, band, 7, 7)
    i, j = torch.tensor(4), torch.tensor(0)
    assert not first.mask_mod(i, i, i, j)
    assert second.mask_mod(i, i, i, j)
