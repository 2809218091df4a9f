"""Sequences of which each has its own queries and keys: packed ones with bounds of both, and the items of a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Size, Tensor

from dilabench.attention import operands
from dilabench.attention.operands import Kinds
from dilabench.impls.call import Call
from dilabench.impls.last_rows import Span


def key_bounds(
    key: Tensor,
    packed: bool,
    cu_seqlens_k: Sequence[int] | Tensor | None,
    key_lengths: Sequence[int] | Tensor | None,
) -> tuple[tuple[int, ...], Tensor | None]:
    """Bounds of the keys of packed sequences, or the number of keys of each item of a batch: as numbers, or unread if
    they are in a tensor on a GPU, or in one that a compiler traces. Raises ValueError.
    """
    if packed == (cu_seqlens_k is None) or packed == (key_lengths is not None):
        raise ValueError(
            "cu_seqlens_k goes with cu_seqlens, packed sequences [T, H, D], and key_lengths with a batch [B, M, H, D]; "
            f"got cu_seqlens_k {cu_seqlens_k!r:.80} and key_lengths {key_lengths!r:.80} "
            f"{'with' if packed else 'without'} cu_seqlens"
        )
    name, given = ("cu_seqlens_k", cu_seqlens_k) if packed else ("key_lengths", key_lengths)
    assert given is not None
    if isinstance(given, Tensor) and (torch.compiler.is_compiling() or operands.may_stay(given)):
        operands.check_bounds_dtype(given, name)
        return (), given
    if not packed and not key.shape[0]:
        return (), None
    return operands.bounds(given, key.shape[0] if packed else None, name), None


def spans_of(kinds: Kinds, call: Call) -> Iterator[tuple[Span, Span]]:
    """The queries and the keys of sequences, as `Call.cu_seqlens` and `Call.key_bounds` give them, equal neighbours
    together. Those without queries or keys are left out.

    Raises ValueError for bounds that do not fit the tensors or each other, and under a mask, a window or a pattern for
    a sequence of more queries than keys.
    """
    operands.check_operands(*(shape for shape, _, _ in kinds))
    operands.check_kinds((dtype, device) for _, dtype, device in kinds)
    last: tuple[Span, Span] | None = None
    for queries, keys in _sequences(kinds, call):
        joined = last and _joined(last, (queries, keys))
        if joined:
            last = joined
            continue
        if last:
            yield last
        last = queries, keys
    if last:
        yield last


def _sequences(kinds: Kinds, call: Call) -> Iterator[tuple[Span, Span]]:
    (query, _, _), (key, _, _), _ = kinds
    if not call.cu_seqlens:
        check_lengths(call.key_bounds, query[0], key[1])
        for item, keys in enumerate(call.key_bounds):
            operands.check_rows(query[1], keys, call)
            items = slice(item, item + 1)
            if query[1] and keys:
                yield Span(items, slice(0, query[1])), Span(items, slice(0, keys))
        return
    bounds = call.cu_seqlens, call.key_bounds
    for numbers, tokens in zip(bounds, (query[1], key[1]), strict=True):
        operands.without_empty(numbers, tokens)
    if len(bounds[0]) != len(bounds[1]):
        raise ValueError(
            f"cu_seqlens has {len(bounds[0])} bounds and cu_seqlens_k {len(bounds[1])}: each sequence has its queries "
            "and its keys; give as many of both, equal bounds where a sequence has none"
        )
    for queries, keys in zip(*map(pairwise, bounds), strict=True):
        operands.check_rows(queries[1] - queries[0], keys[1] - keys[0], call)
        if queries[0] < queries[1] and keys[0] < keys[1]:
            yield Span(slice(0, 1), slice(*queries)), Span(slice(0, 1), slice(*keys))


def check_lengths(lengths: tuple[int, ...], batch: int, tokens: int) -> None:
    """Refuse numbers of keys that are not one of 0 to the tokens of the cache for each item."""
    if len(lengths) != batch or not all(0 <= length <= tokens for length in lengths):
        raise ValueError(
            f"key_lengths {[*lengths[:8]]} must be {batch} numbers of 0 to {tokens}: how many of the keys [B, N, K, D] "
            "of each item are there"
        )


def _joined(earlier: tuple[Span, Span], later: tuple[Span, Span]) -> tuple[Span, Span] | None:
    """Both as one if they are neighbours of equal lengths."""
    joined = []
    for before, behind in zip(earlier, later, strict=True):
        items, tokens = behind.items, behind.tokens
        if before.length != behind.length:
            return None
        if before.items == items and before.tokens.stop == tokens.start:
            joined.append(Span(items, slice(before.tokens.start, tokens.stop), before.per_item + 1))
        elif before.tokens == tokens and before.items.stop == items.start:
            joined.append(Span(slice(before.items.start, items.stop), tokens))
        else:
            return None
    return joined[0], joined[1]


def kinds_of(kinds: Kinds, queries: Span, keys: Span) -> Kinds:
    """The kinds of these sequences as a batch."""
    (query, *of_query), (key, *of_keys), _ = kinds
    shape = Size((keys.sequences, keys.length, *key[2:]))
    return (Size((queries.sequences, queries.length, *query[2:])), *of_query), (shape, *of_keys), (shape, *of_keys)  # type: ignore[return-value]
