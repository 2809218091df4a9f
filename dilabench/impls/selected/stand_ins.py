"""The selection of a workload of pattern `selected_blocks`, made on a device from the stand-ins of its selector."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from dilabench.impls.selected.selecting import (
    Choosing,
    select_by_compression,
    select_by_indexer,
    select_by_mean_key,
)
from dilabench.impls.selected.selection import Selection
from dilabench.patterns.answers import Compression, SequenceShape
from dilabench.patterns.selected_blocks import SelectedBlocksPattern
from dilabench.patterns.selectors import ABSENT, STAND_IN_DIM
from dilabench.patterns.token_selectors import TOKEN_SELECTORS, Tokens, indexer_stand_ins, stand_ins
from dilabench.workload.spec import Workload

# Scores of stand-ins differ by 1 at least and by 2^19 at most: the shares of all of them are then different numbers.
STAND_IN_SCALE = 1.5e-4

Select = Callable[[], Tensor]
"""Indices int32 [1, N, K, S] of one sequence."""


def selection_of(workload: Workload, device: torch.device) -> Selection:
    """The selection that the pattern defines. Raises ConfigError for a file of indices that does not fit."""
    pattern = SelectedBlocksPattern.of(workload)
    of_shapes = {}
    for shape in dict.fromkeys(workload.shapes):
        # An accelerator selects in less time than the host, which needs half a minute for single tokens at 64K.
        if pattern.reads_queries and device.type != "cpu":
            of_shapes[shape] = selecting(pattern, shape, device, torch.float32, STAND_IN_DIM)()
        else:
            of_shapes[shape] = torch.from_numpy(pattern.selection(shape))[None].to(device)
    return as_selection(workload, [of_shapes[shape] for shape in workload.shapes])


def as_selection(workload: Workload, of_sequences: list[Tensor]) -> Selection:
    """The indices of each sequence as one selection."""
    widest = max(indices.shape[-1] for indices in of_sequences)
    padded = [
        torch.nn.functional.pad(indices, (0, widest - indices.shape[-1]), value=ABSENT) for indices in of_sequences
    ]
    indices = padded[0] if len(padded) == 1 else torch.cat(padded, 1)
    return Selection(indices, SelectedBlocksPattern.of(workload).block_size, workload.causal, workload.window)


def selecting_all(workload: Workload, device: torch.device) -> Callable[[], Selection]:
    """A selector for every sequence in each call, from tensors of the workload's dtype and head dim.

    Raises ValueError for a selector that reads no queries.
    """
    pattern, dtype = SelectedBlocksPattern.of(workload), getattr(torch, workload.dtype)
    if not pattern.reads_queries:
        raise ValueError(f"selector={pattern.selector} reads no queries; use selected-blocks-planned")
    selects = [selecting(pattern, shape, device, dtype, workload.head_dim) for shape in workload.shapes]
    return lambda: as_selection(workload, [select() for select in selects])


def selecting(
    pattern: SelectedBlocksPattern, shape: SequenceShape, device: torch.device, dtype: torch.dtype, head_dim: int
) -> Select:
    """The pattern's selector over its stand-ins, which are moved to the device here."""
    tokens, selector = pattern.tokens_of(shape), TOKEN_SELECTORS[pattern.selector]
    choosing = Choosing(pattern.block_size, pattern.top_k, shape.causal, selector.initial, selector.local_of(tokens))
    return SELECTS[pattern.selector](tokens, choosing, partial(_moved, device=device, dtype=dtype, width=head_dim))


def _moved(x: torch.Tensor, *, device: torch.device, dtype: torch.dtype, width: int) -> Tensor:
    """With as many numbers in a row as a head has, zeros behind the stand-in's."""
    return torch.nn.functional.pad(x.to(device, dtype), (0, width - x.shape[-1]))[None]


def _by_heads(tokens: Tokens, move: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Queries [1, N, H, D] and keys [1, N, K, D]."""
    pairs = [stand_ins(tokens, head) for head in range(tokens.kv_heads)]
    queries, keys = (torch.stack([torch.from_numpy(pair[at]) for pair in pairs], 1) for at in (0, 1))
    return move(queries.repeat_interleave(tokens.group, 1)), move(keys[_blocks_of_tokens(tokens)])


def _mean_key(tokens: Tokens, choosing: Choosing, move: Callable[[Tensor], Tensor]) -> Select:
    return partial(select_by_mean_key, *_by_heads(tokens, move), choosing)


def _compressed(tokens: Tokens, choosing: Choosing, move: Callable[[Tensor], Tensor]) -> Select:
    queries, keys = _by_heads(tokens, move)
    compression = Compression(tokens.block, tokens.block)

    def select() -> Tensor:
        whole = compression.count(tokens.length)
        means = keys[:, : whole * tokens.block].unflatten(1, (whole, tokens.block)).mean(2)
        return select_by_compression(queries, means, compression, STAND_IN_SCALE, choosing)

    return select


def _indexer(tokens: Tokens, choosing: Choosing, move: Callable[[Tensor], Tensor]) -> Select:
    found = [indexer_stand_ins(tokens, head) for head in range(tokens.kv_heads)]
    queries, weights, keys = (torch.stack([torch.from_numpy(part[at]) for part in found], 1) for at in range(3))
    moved = move(queries), move(keys[_blocks_of_tokens(tokens)])
    return partial(select_by_indexer, moved[0], weights.to(moved[0])[None], moved[1], choosing)


def _blocks_of_tokens(tokens: Tokens) -> Tensor:
    return torch.arange(tokens.length, device="cpu") // tokens.block


SELECTS: Mapping[str, Callable[[Tokens, Choosing, Callable[[Tensor], Tensor]], Select]] = {
    "mean_key": _mean_key,
    "compressed": _compressed,
    "indexer": _indexer,
}
