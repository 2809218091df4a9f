"""Attention over key blocks that a caller gives as indices, and over keys that stand for blocks of tokens.

Plans are made from the indices, and kept until these are written to.
"""

from __future__ import annotations

from functools import lru_cache, partial
from itertools import pairwise

import torch
from torch import Tensor

from dilabench.attention import operands
from dilabench.attention.operands import Kinds
from dilabench.choice.computation import implementation_of
from dilabench.errors import ConfigError
from dilabench.impls.block_sparse.planned import Planned, kernels_for, plan_of_columns
from dilabench.impls.call import AnyPattern, Call, PatternFields, pattern_of
from dilabench.impls.no_pairs import NOTHING_SEEN, SHAPES_ONLY
from dilabench.impls.one_operator import Computation, materialised
from dilabench.impls.selected.selected_blocks import computation_for
from dilabench.impls.selected.selection import Selection
from dilabench.kernels.block_sparse.selected import SelectedPlan
from dilabench.kernels.streams import is_captured
from dilabench.patterns.answers import Compression, SelectedKeys, SequenceShape
from dilabench.patterns.dense import DENSE
from dilabench.patterns.pattern import Pattern
from dilabench.workload.spec import AUTO, UNBOUNDED, Workload

SELECTED_BY_INDICES = "pattern=SelectedBlocksPattern(block_size=...), per token, or TopKBlocksPattern, per query block"


def selecting(
    pattern: AnyPattern,
    indices: Tensor,
    query: Tensor,
    key: Tensor,
    bounds: tuple[int, ...],
    unread: Tensor | None,
) -> tuple[Pattern | PatternFields, Tensor]:
    """The pattern of blocks that a caller gives, and their indices: as they are, or in packed sequences, for blocks of
    queries, those of their tokens.
    """
    selected = pattern if isinstance(pattern, SelectedKeys) else None
    if isinstance(pattern, Pattern):
        selected = pattern.selects
    if selected is None:
        given = f" with pattern {pattern.kind}: they" if isinstance(pattern, Pattern) and pattern != DENSE else ""
        raise ValueError(f"indices{given} are blocks of {SELECTED_BY_INDICES}; give that pattern")
    size, per_token = selected
    if type(indices) is not Tensor or indices.layout is not torch.strided:
        operands.check_are_tensors(indices=indices)
    if not per_token and (bounds or unread is not None):
        indices = _of_query_blocks(indices, size, query, key, bounds, unread)
    # Patterns that stand for any blocks of their size.
    kind = "selected_blocks" if per_token else "topk_blocks"
    if torch.compiler.is_compiling():
        return pattern_of(kind, selector="random", block_size=size, top_k=1), indices
    return _standing(kind, size), indices


@lru_cache(maxsize=64)
def _standing(kind: str, block_size: int) -> Pattern | PatternFields:
    return pattern_of(kind, selector="random", block_size=block_size, top_k=1)


def over_compressed(kinds: Kinds, call: Call, compression: Compression) -> Computation:
    """The computation of queries over keys that stand for blocks of tokens."""
    (query, dtype, device), (key, *_), (value, *_) = kinds
    count = compression.count(query[1])
    if key != value or key[1] != count or key[::3] != query[::3]:
        raise ValueError(
            f"compressed keys {tuple(key)} and values {tuple(value)} must be [B, C, K, D] with C = {count} for query "
            f"{tuple(query)}, {compression}"
        )
    if device.type == "meta" or 0 in query:
        return SHAPES_ONLY
    if not count:
        return NOTHING_SEEN
    shape = SequenceShape(query[1], query[2], key[2], causal=True, window=UNBOUNDED)
    hidden = call.pattern.hidden_rows(shape)
    assert hidden is not None, "compressed keys are hidden from the tokens before them"
    scale = query[3] ** -0.5 if call.scale is None else float(call.scale)
    return Planned(kernels_for(device, dtype), plan_of_columns(shape, hidden, count), scale)


def of_indices(kinds: Kinds, call: Call, indices: Tensor) -> Computation:
    """The computation over the blocks that a caller gives, kept until the indices are written to."""
    workload = _of_given_blocks(kinds, call)
    if indices.device != kinds[0][2]:
        raise ValueError(f"indices are on {indices.device} and query on {kinds[0][2]}; move one of them")
    if workload is None:
        return SHAPES_ONLY
    made = partial(_over_blocks, kinds, call, workload, indices)
    if not indices.is_cuda:
        return _by_indices.get(indices, (kinds, call), made)
    # A graph reads them at each replay.
    if is_captured(indices):
        return made()
    # Lists that a stream makes are complete for that stream.
    stream = torch.cuda.current_stream(indices.device).cuda_stream
    return _by_indices.get(indices, (kinds, call, stream), made)


_by_indices = operands.OfTensors[Computation]()


@lru_cache(maxsize=64)
def _of_given_blocks(kinds: Kinds, call: Call) -> Workload | None:
    """The workload, whose pattern stands for any blocks of its size; None if there are no numbers to compute with."""
    operands.check_call(call)
    device = kinds[0][2]
    try:
        workload = operands.workload_of(kinds, call)
        if call.backend != AUTO:
            raise ConfigError(f"backend {call.backend!r} with indices of blocks, whose kernels call none; leave it out")
        if workload is None or device.type == "meta":
            return None
        implementation_of(workload, device)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return workload


def _over_blocks(kinds: Kinds, call: Call, workload: Workload, indices: Tensor) -> Computation:
    (query, dtype, device), (key, *_), _ = kinds
    selected = call.pattern.selects
    assert selected is not None, "given blocks have a size"
    size, length, scale = selected.block_size, query[1], workload.softmax_scale
    # Another object, so that the result does not hold the tensor that it is kept for.
    indices = materialised(indices.detach())
    if selected.per_token or call.cu_seqlens:
        indices = _indices_of_tokens(indices, query, key)
        _check_blocks(indices, _blocks_of_tokens(call.cu_seqlens, length, size))
        selection = Selection(indices, size, call.causal, call.window)
        return computation_for(query[3], dtype, device, selection, scale, call.cu_seqlens)
    _check_indices(indices, key[2], -(-length // size), size, device)
    _check_blocks(indices, -(-length // size))
    # In the form that dilabench's selectors return.
    by_head = (indices if indices.ndim == 3 else indices[None]).to(torch.int32).contiguous()
    plan = SelectedPlan(by_head, size, length, call.causal, call.window)
    return Planned(kernels_for(device, dtype), plan, scale)


def _indices_of_tokens(indices: Tensor, query: torch.Size, key: torch.Size) -> Tensor:
    """[B or 1, N, K, S] of indices [B, N, K, S], [N, K, S] or packed [T, K, S]: key blocks of each token. Raises
    ValueError for others.
    """
    batch, rows, kv_heads = query[0], query[1], key[2]
    by_item = indices[None] if indices.ndim == 3 else indices
    wanted = f"integers [{rows}, {kv_heads}, S] or [{batch}, {rows}, {kv_heads}, S]: S key blocks for each of {rows} "
    if indices.is_floating_point() or indices.dtype == torch.bool or by_item.ndim != 4:
        raise ValueError(f"indices {indices.dtype} {tuple(indices.shape)} must be {wanted}tokens and {kv_heads} heads")
    fits = by_item.shape[0] in (1, batch) and tuple(by_item.shape[1:3]) == (rows, kv_heads)
    if not fits or (rows and not by_item.shape[3]):
        raise ValueError(f"indices {tuple(indices.shape)} must be {wanted}tokens and {kv_heads} heads of keys")
    return by_item


def _of_query_blocks(
    indices: Tensor, block_size: int, query: Tensor, key: Tensor, bounds: tuple[int, ...], unread: Tensor | None
) -> Tensor:
    """[T, K, k] of query [1, T, H, D] and key [1, T, K, D], from [n, k] or [K, n, k] of each block of `block_size`
    queries: n blocks of all packed sequences, one after another. Of bounds that stay unread, n is not checked.
    """
    tokens, kv_heads = query.shape[1], key.shape[2]
    if unread is not None:
        ends = unread.to(device=query.device, dtype=torch.int64)
    else:
        numbers = operands.without_empty(bounds, tokens)
        blocks = sum(-(-(stop - start) // block_size) for start, stop in pairwise(numbers))
        _check_indices(indices, kv_heads, blocks, block_size, query.device)
        ends = torch.tensor(numbers, dtype=torch.int64, device=query.device)
    token = torch.arange(tokens, device=query.device)
    sequence = torch.searchsorted(ends, token, right=True) - 1
    blocks_of = (ends.diff(append=ends[-1:]) + block_size - 1) // block_size
    block = (blocks_of.cumsum(0) - blocks_of)[sequence] + (token - ends[sequence]) // block_size
    by_head = indices if indices.ndim == 3 else indices[None]
    # Tokens behind the last sequence see no key.
    block = block.clamp_max(by_head.shape[1] - 1)
    return by_head.transpose(0, 1)[block].expand(-1, kv_heads, -1)


def _check_indices(indices: Tensor, kv_heads: int, blocks: int, block_size: int, device: torch.device) -> None:
    """Refuse indices that are not integers [n, k] or [K, n, k] on `device`: k key blocks for each query block."""
    shape, no_numbers = tuple(indices.shape), indices.is_floating_point() or indices.dtype == torch.bool
    if no_numbers or shape[:-1] not in ((blocks,), (1, blocks), (kv_heads, blocks)):
        raise ValueError(
            f"indices {indices.dtype} {shape} must be integers [{blocks}, k] or [{kv_heads}, {blocks}, k]: k key "
            f"blocks for each of {blocks} blocks of {block_size} queries"
        )
    if indices.device != device:
        raise ValueError(f"indices are on {indices.device} and query on {device}; move one of them")


def _check_blocks(indices: Tensor, blocks: int | Tensor) -> None:
    """Refuse numbers that are neither one of this many blocks, or as many for each row of indices [..., S], nor -1.

    On a CPU only: a GPU would have to be waited for.
    """
    if indices.device.type != "cpu":
        return
    # Small and unsigned integers cannot be compared with every number of a block, and with -1.
    indices = indices.to(torch.int64) if indices.dtype not in {torch.int32, torch.int64} else indices
    wrong = (indices < -1) | (indices >= blocks)
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        there = int(torch.as_tensor(blocks, device="cpu").expand(indices.shape)[place])
        raise ValueError(f"indices{[*place]} is block {indices[place]}, not one of 0 to {there - 1}; -1 means no block")


def _blocks_of_tokens(cu_seqlens: tuple[int, ...], tokens: int, block_size: int) -> int | Tensor:
    """The number of key blocks that each token may select: of all tokens, or [T, 1, 1] of packed sequences."""
    if not cu_seqlens:
        return -(-tokens // block_size)
    # Rows of no sequence see nothing.
    blocks = torch.full((tokens, 1, 1), -(-tokens // block_size), device="cpu", dtype=torch.int64)
    for first, last in pairwise(cu_seqlens):
        blocks[first:last] = -(-(last - first) // block_size)
    return blocks
