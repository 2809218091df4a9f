"""Loops over thousands of blocks, each of which frees the memory of the preceding one: the blocks to trace (torch).

A trace costs about a tenth of a millisecond per operator of any size. A block's memory follows from its shape, so
blocks of a known shape, or smaller than others, need no trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dilabench.backends import math
from dilabench.contracts import AttentionFn
from dilabench.engine.call.chunked_queries import ChunkedQueries
from dilabench.engine.verify.oracle import blocks as oracle_blocks
from dilabench.engine.verify.oracle import formula
from dilabench.engine.verify.oracle.blocks import FEW_ROWS, JOINED_GROUPS, Block, blocks
from dilabench.kernels import lse as merging
from dilabench.patterns.answers import KeyGroup, Positions
from dilabench.workload.spec import Workload
from dilabench.workload.visibility import key_groups

# A block is traced if it is this much larger than all preceding ones.
LARGER = 1.02

_lerp_in_slices_, _blocks, _chunks = merging._lerp_in_slices_, math._blocks, ChunkedQueries.chunks


def loop_forms() -> list[tuple[Any, str, Any]]:
    """(module, name, stand-in)."""
    return [
        (merging, "_lerp_in_slices_", _two_slices),
        (ChunkedQueries, "chunks", _few_chunks),
        (math, "_blocks", _few_score_blocks),
        (oracle_blocks, "key_groups", _few_groups),
        (formula, "blocks", _growing_blocks),
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


def _few_groups(workload: Workload, head: int, positions: Positions) -> Iterator[tuple[int, KeyGroup]]:
    """Groups of the first two heads, three of each shape."""
    seen: Counter[tuple[int, ...]] = Counter()
    for start, group in key_groups(workload, head, positions) if head < 2 else ():
        shape = len(group.rows), *map(len, group.parts)
        seen[shape] += 1
        # Groups of few rows are joined before they are used.
        if seen[shape] <= (2 * JOINED_GROUPS if len(group.rows) < FEW_ROWS else 3):
            yield start, group


def _growing_blocks(workload: Workload, rows: Tensor, q: Tensor) -> Iterator[Block]:
    """A block that is larger than all before it, after the one that still lives when it is made, and two as large."""
    largest, before, alike = 0, None, 0
    for block in blocks(workload, rows, q):
        size = block.seen.numel()
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
