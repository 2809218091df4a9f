"""Loops over thousands of blocks, each of which frees the memory of the preceding one: the blocks to trace (torch).

A trace costs about a tenth of a millisecond per operator of any size. A block's memory follows from its shape, so
blocks of a known shape, or smaller than others, need no trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dilabench.backends import math
from dilabench.contracts import AttentionFn
from dilabench.engine.call.chunked_queries import ChunkedQueries
from dilabench.impls import reference, visible_keys
from dilabench.impls.visible_keys import FEW_ROWS, GROUPS_TOGETHER, KeyGroup
from dilabench.kernels import lse as merging
from dilabench.workload import visibility
from dilabench.workload.spec import Workload

# A block is traced if it is this much larger than all preceding ones.
LARGER = 1.02

_lerp_in_slices_, _blocks, _key_groups = merging._lerp_in_slices_, math._blocks, visible_keys.key_groups
_chunks = ChunkedQueries.chunks
_reference_blocks, _pattern_groups = reference.blocks, visibility.key_groups


def loop_forms() -> list[tuple[Any, str, Any]]:
    """(module, name, stand-in)."""
    return [
        (merging, "_lerp_in_slices_", _two_slices),
        (ChunkedQueries, "chunks", _few_chunks),
        (math, "_blocks", _few_score_blocks),
        (reference, "key_groups", _few_groups),
        (reference, "blocks", _growing_blocks),
    ]


def _two_slices(out: Tensor, end: Tensor, weight: Tensor) -> None:
    rows = slice(0, 2 * max(1, merging.SLICE_ELEMENTS * out.shape[-3] // max(1, out.numel())))
    _lerp_in_slices_(out[..., rows, :, :], end[..., rows, :, :], weight[..., rows, :, :])


def _few_chunks(chunked: ChunkedQueries) -> Iterator[tuple[slice, AttentionFn]]:
    """The first three and the last."""
    chunks = list(_chunks(chunked))
    yield from chunks if len(chunks) < 5 else [*chunks[:3], chunks[-1]]


def _few_score_blocks(q: Tensor, k: Tensor, compute: torch.dtype) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """The first two and the last four ranges of queries, of the first two and the last range of the batch."""
    batches = list(_blocks(q, k, compute))
    for first, stop, rows in batches if len(batches) < 4 else [*batches[:2], batches[-1]]:
        yield first, stop, rows if len(rows) < 7 else [*rows[:2], *rows[-4:]]


def _few_groups(
    workload: Workload, head: int, positions: Tensor, device: torch.device | str = "cpu"
) -> Iterator[KeyGroup]:
    """The calls of the first two heads, three of each shape."""
    if head < 2:
        with mock.patch.object(visibility, "key_groups", _distinct_groups):
            yield from _key_groups(workload, head, positions, device)


def _distinct_groups(workload: Workload, head: int, positions: Any) -> Iterator[Any]:
    seen: Counter[tuple[int, ...]] = Counter()
    for start, group in _pattern_groups(workload, head, positions):
        shape = len(group.rows), *map(len, group.parts)
        seen[shape] += 1
        # Groups of few rows are put together before they are used.
        if seen[shape] <= (2 * GROUPS_TOGETHER if len(group.rows) < FEW_ROWS else 3):
            yield start, group


def _growing_blocks(workload: Workload, rows: Tensor, q: Tensor) -> Iterator[reference.Block]:
    """A block that is larger than all before it, after the one that still lives when it is made, and two as large."""
    largest, before, alike = 0, None, 0
    for block in _reference_blocks(workload, rows, q):
        size = len(block.rows) * len(block.keys)
        alike = 0 if size > LARGER * largest else alike + (LARGER * size >= largest)
        if size > LARGER * largest or (LARGER * size >= largest and alike <= 2):
            if before is not None:
                yield before
            yield block
            largest, before = max(largest, size), None
        else:
            before = block
    if before is not None:
        yield before
