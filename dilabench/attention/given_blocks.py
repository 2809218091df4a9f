"""Attention over key blocks that a caller gives as indices, and over keys that stand for blocks of tokens.

Plans are made from the indices, and kept until these are written to.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from dilabench.attention import operands
from dilabench.attention.operands import Kinds
from dilabench.attention.sequences import kinds_of, spans_of
from dilabench.choice.computation import implementation_of
from dilabench.errors import ConfigError
from dilabench.impls.block_sparse.planned import Planned, kernels_for, plan_of_columns
from dilabench.impls.call import AnyPattern, Call, Computation, PatternFields, pattern_of
from dilabench.impls.last_rows import BySequence, InSquare, Run
from dilabench.impls.no_pairs import NOTHING_SEEN
from dilabench.impls.operator_rules import materialised
from dilabench.impls.selected.selected_blocks import computation_for
from dilabench.impls.selected.selection import Selection
from dilabench.kernels.block_sparse.selected import SelectedPlan
from dilabench.kernels.streams import is_captured, stream_number
from dilabench.patterns.answers import Compression, HiddenRows, SelectedKeys, SequenceShape
from dilabench.patterns.dense import DENSE
from dilabench.patterns.pattern import Pattern
from dilabench.workload.spec import AUTO, UNBOUNDED, Workload

SELECTED_BY_INDICES = "pattern=SelectedBlocksPattern(block_size=...), per token, or TopKBlocksPattern, per query block"


def selecting(
    pattern: AnyPattern,
    indices: Tensor,
    query: Tensor,
    key: Tensor,
    bounds: tuple[tuple[int, ...], tuple[int, ...]],
    unread: tuple[Tensor | None, Tensor | None],
) -> tuple[Pattern | PatternFields, Tensor]:
    """The pattern of blocks that a caller gives, and their indices: as given, or, for blocks of queries in several
    sequences, per token. bounds, unread: `Call.cu_seqlens` and `Call.key_bounds`, as numbers or tensors.
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
    if not per_token and (any(bounds) or unread[0] is not None or unread[1] is not None):
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
    # The bounds of compressed keys are the tokens that they stand for.
    tokens = call.key_bounds[0] if call.key_bounds else query[1]
    count = compression.count(tokens)
    if key != value or key[1] != count or key[::3] != query[::3]:
        raise ValueError(
            f"compressed keys {tuple(key)} and values {tuple(value)} must be [B, C, K, D] with C = {count} for "
            f"{tokens} tokens and query {tuple(query)}, {compression}"
        )
    if device.type == "meta" or 0 in query or not count:
        return NOTHING_SEEN
    shape, before = SequenceShape(tokens, query[2], key[2], causal=True, window=UNBOUNDED), tokens - query[1]
    hidden = call.pattern.hidden_rows(shape)
    assert hidden is not None, "compressed keys are hidden from the tokens before them"
    if before:
        shape = replace(shape, length=query[1])
        hidden = HiddenRows.of(query[1], *zip(hidden.starts - before, hidden.stops - before, strict=True))
    scale = query[3] ** -0.5 if call.scale is None else float(call.scale)
    return Planned(kernels_for(device, dtype), plan_of_columns(shape, hidden, count), scale)


def of_indices(kinds: Kinds, call: Call, indices: Tensor) -> Computation:
    """The computation over the blocks that a caller gives, kept until the indices are written to."""
    workload = None if call.key_bounds else _of_given_blocks(kinds, call)
    if indices.device != kinds[0][2]:
        raise ValueError(f"indices are on {indices.device} and query on {kinds[0][2]}; move one of them")
    if not call.key_bounds and workload is None:
        return NOTHING_SEEN
    made = partial(_over_blocks, kinds, call, workload, indices)
    if not indices.is_cuda:
        return _by_indices.get(indices, (kinds, call), made)
    # A graph reads them at each replay.
    if is_captured(indices):
        return made()
    # Lists that a stream makes are complete for that stream.
    return _by_indices.get(indices, (kinds, call, stream_number(indices)), made)


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
        implementation_of(workload.replace(query_len=None), device)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return workload


def _over_blocks(
    kinds: Kinds, call: Call, workload: Workload | None, indices: Tensor, by_token: bool = False
) -> Computation:
    """The computation over the blocks of each token, or of each block of queries unless `by_token`. workload: None for
    several sequences, each with its own queries and keys.
    """
    if workload is None:
        return _over_sequences(kinds, call, indices)
    (query, dtype, device), (key, *_), _ = kinds
    selected = call.pattern.selects
    assert selected is not None, "given blocks have a size"
    size, length, before, scale = selected.block_size, key[1], key[1] - query[1], workload.softmax_scale
    # Another object, so that the result does not hold the tensor that it is kept for.
    indices = materialised(indices.detach())
    if by_token or selected.per_token or call.cu_seqlens:
        indices = _indices_of_tokens(indices, query, key)
        _check_blocks(indices, _blocks_of_tokens(call.cu_seqlens, length, size))
        selection = Selection(_with_none_before(indices, before, 1), size, call.causal, call.window)
        computation: Computation = computation_for(query[3], dtype, device, selection, scale, call.cu_seqlens)
    else:
        blocks, blocks_before = -(-length // size), before // size
        _check_indices(indices, key[2], blocks - blocks_before, size, device)
        _check_blocks(indices, blocks)
        # In the form that dilabench's selectors return.
        by_head = (indices if indices.ndim == 3 else indices[None]).to(torch.int32).contiguous()
        plan = SelectedPlan(_with_none_before(by_head, blocks_before, 1), size, length, call.causal, call.window)
        computation = Planned(kernels_for(device, dtype), plan, scale)
    return InSquare(computation, length) if before else computation


def _over_sequences(kinds: Kinds, call: Call, indices: Tensor) -> BySequence:
    """The computation over the blocks of several sequences, each with its own queries and keys."""
    indices = _indices_of_tokens(indices, kinds[0][0], kinds[1][0])
    alone = call.of_one_sequence
    runs = []
    for queries, keys in spans_of(kinds, call):
        of_run, own = kinds_of(kinds, queries, keys), queries.of(indices.expand(kinds[0][0][0], -1, -1, -1))
        workload = _of_given_blocks(of_run, alone)
        computation: Computation = NOTHING_SEEN
        if workload is not None:
            computation = _over_blocks(of_run, alone, workload, own, by_token=True)
        runs.append(Run(queries, keys, computation))
    return BySequence(runs)


def _with_none_before(indices: Tensor, rows: int, axis: int) -> Tensor:
    """Indices with this many rows before them that select no block."""
    if not rows:
        return indices
    return torch.cat([indices.new_full((*indices.shape[:axis], rows, *indices.shape[axis + 1 :]), -1), indices], axis)


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
    indices: Tensor,
    block_size: int,
    query: Tensor,
    key: Tensor,
    bounds: tuple[tuple[int, ...], tuple[int, ...]],
    unread: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """Indices per token [B, M, K, k], packed [T, K, k], from [n, k] or [K, n, k] for blocks of `block_size` queries.

    query [B, M, H, D], key [B, N, K, D]; n counts the blocks of all sequences, one after another, and is not checked if
    the bounds are not read.
    """
    (batch, rows), packed = query.shape[:2], bool(bounds[0]) or unread[0] is not None
    of_queries, of_keys = bounds
    if not packed:
        of_queries = tuple(rows * item for item in range(batch + 1))
        of_keys = tuple(accumulate(of_keys, initial=0))
    if unread[0] is None and unread[1] is None:
        blocks = 0
        for (start, stop), (begin, end) in zip(pairwise(of_queries), pairwise(of_keys or of_queries), strict=False):
            if start < stop:
                blocks += -(-(end - begin) // block_size) - (end - begin - stop + start) // block_size
        _check_indices(indices, key.shape[2], blocks, block_size, query.device)
    starts, ends = (
        torch.tensor(numbers, dtype=torch.int64, device=query.device)
        if x is None
        else x.to(device=query.device, dtype=torch.int64)
        for x, numbers in zip(unread, (of_queries, of_keys or of_queries), strict=True)
    )
    if unread[1] is None and not of_keys:
        ends = starts
    elif unread[1] is not None and not packed:
        ends = torch.nn.functional.pad(ends.cumsum(0), (1, 0))
    # Behind the last sequence there are no queries.
    queries, keys = starts.diff(append=starts[-1:]), ends.diff(append=ends[-1:])
    before = keys - queries
    counts = ((keys + block_size - 1) // block_size - before // block_size).where(queries > 0, 0)
    token = torch.arange(batch * rows, device=query.device)
    sequence = torch.searchsorted(starts, token, right=True) - 1
    first = (counts.cumsum(0) - counts - before // block_size)[sequence]
    block = first + (before[sequence] + token - starts[sequence]) // block_size
    by_head = indices if indices.ndim == 3 else indices[None]
    if not by_head.shape[1]:
        by_head = by_head.new_full((len(by_head), 1, 1), -1)
    # Tokens behind the last sequence see no key.
    block = block.clamp(0, by_head.shape[1] - 1)
    by_token = by_head.transpose(0, 1)[block].expand(-1, key.shape[2], -1)
    return by_token if packed else by_token.unflatten(0, (batch, rows))


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

    The check is made on a CPU only; it would wait for a GPU.
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
