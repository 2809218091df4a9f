"""Sequences that each have their own queries and keys: packed ones with bounds of both, the items of a cache, and the
tokens of a padded batch that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor

from dilabench.attention import operands
from dilabench.attention.operands import Kinds
from dilabench.impls.call import Call
from dilabench.impls.last_rows import Span
from dilabench.patterns.dense import DENSE
from dilabench.patterns.pattern import Pattern
from dilabench.workload.spec import UNBOUNDED

KeyLengths = Sequence[int] | Sequence[Sequence[int]] | Tensor
"""How many keys each item of a batch has, [B], or the first of them and their end, [B, 2]."""


def key_bounds(
    key: Tensor,
    packed: bool,
    cu_seqlens_k: Sequence[int] | Tensor | None,
    key_lengths: KeyLengths | None,
    spans: bool = False,
) -> tuple[tuple[int, ...], Tensor | None]:
    """Bounds of the keys of packed sequences, or the number of keys of each item of a batch: as numbers, or unread if
    they are in a tensor on a GPU, or in one that a compiler traces. spans: of items also the first key and the end,
    two numbers for each. Raises ValueError.
    """
    if packed == (cu_seqlens_k is None) or packed == (key_lengths is not None):
        raise ValueError(
            "cu_seqlens_k goes with cu_seqlens, packed sequences [T, H, D], and key_lengths with a batch [B, M, H, D]; "
            f"got cu_seqlens_k {cu_seqlens_k!r:.80} and key_lengths {key_lengths!r:.80} "
            f"{'with' if packed else 'without'} cu_seqlens"
        )
    name, given = ("cu_seqlens_k", cu_seqlens_k) if packed else ("key_lengths", key_lengths)
    assert given is not None
    if not (packed or spans) and _are_spans(given):
        raise ValueError(
            "key_lengths of pairs, the first key of each item and the end, with indices or native sparse attention: "
            "blocks count from the first key of the cache; give the keys that are there, one number for each item"
        )
    if isinstance(given, Tensor) and (torch.compiler.is_compiling() or operands.may_stay(given)):
        operands.check_bounds_dtype(given, name)
        return (), given
    if not packed and not key.shape[0]:
        return (), None
    return numbers_of(given, key.shape[0], packed), None


def _are_spans(key_lengths: KeyLengths) -> bool:
    """Whether they are the first key and the end of each item, [B, 2]."""
    if isinstance(key_lengths, Tensor):
        return key_lengths.ndim == 2
    return isinstance(key_lengths, Sequence) and bool(key_lengths) and isinstance(key_lengths[0], Sequence)


def numbers_of(given: KeyLengths, size: int, packed: bool) -> tuple[int, ...]:
    """Bounds of `size` packed keys, the number of keys of each of `size` items, or two of each. Raises ValueError."""
    if packed:
        return operands.bounds(given, size, "cu_seqlens_k")  # type: ignore[arg-type]
    are_spans = _are_spans(given)
    if isinstance(given, Tensor):
        pairs = not are_spans or given.shape[1] == 2
        flat: Any = given.flatten() if are_spans and pairs else given
    else:
        pairs = not are_spans or all(isinstance(pair, Sequence) and len(pair) == 2 for pair in given)
        flat = [*chain.from_iterable(given)] if are_spans and pairs else given  # type: ignore[arg-type]
    numbers = operands.bounds(flat, None, "key_lengths")
    if are_spans != (len(numbers) == 2 * size and size > 0):
        raise _wrong_lengths(numbers, size)
    return numbers


def spans_of(kinds: Kinds, call: Call) -> Iterator[tuple[Span, Span]]:
    """The queries and the keys of sequences, as `Call.cu_seqlens` and `Call.key_bounds` give them, equal neighbours
    together. Sequences without queries or keys are skipped.

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
        for item, (first, end) in enumerate(_checked_spans(call.key_bounds, query[0], key[1])):
            operands.check_rows(query[1], end - first, call)
            items = slice(item, item + 1)
            if query[1] and first < end:
                yield Span(items, slice(0, query[1])), Span(items, slice(first, end))
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


def _checked_spans(numbers: tuple[int, ...], batch: int, tokens: int) -> list[tuple[int, int]]:
    """The first key of each item and the end, of numbers of keys, or of both for each item. Raises ValueError."""
    if len(numbers) == 2 * batch:
        spans = [*zip(numbers[::2], numbers[1::2], strict=True)]
    else:
        spans = [(0, length) for length in numbers]
    if len(spans) != batch or not all(0 <= first <= end <= tokens for first, end in spans):
        raise _wrong_lengths(numbers, batch, tokens)
    return spans


def _wrong_lengths(numbers: tuple[int, ...], batch: int, tokens: int | None = None) -> ValueError:
    most = "N" if tokens is None else tokens
    return ValueError(
        f"key_lengths {[*numbers[:8]]} must be {batch} numbers of 0 to {most}: how many of the keys [B, N, K, D] of "
        "each item are there, or two for each item, the first of them and their end"
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
    moved = []
    for (shape, *kind), span in zip(kinds, (queries, keys, keys), strict=True):
        moved.append((Size((span.sequences, span.length, *shape[2:])), *kind))
    return tuple(moved)  # type: ignore[return-value]


class TokensThere(NamedTuple):
    """Which tokens of a batch [B, N] are no padding.

    places: int64 [T], among all B·N. bounds: of each item among them. has_holes: padding is between tokens of an item.
    """

    places: Tensor
    bounds: tuple[int, ...]
    has_holes: bool

    @classmethod
    def of(cls, padding: Tensor) -> TokensThere:
        """The tokens where bool [B, N] is True, not padding; its device is read once for each content."""
        return _there.get(padding, (), lambda: cls._of(padding))

    @classmethod
    def _of(cls, padding: Tensor) -> TokensThere:
        places = padding.flatten().nonzero()[:, 0]
        bounds = (0, *padding.sum(1).cumsum(0).tolist())
        runs = int(torch.nn.functional.pad(padding.to(torch.int8), (1, 0)).diff(dim=1).eq(1).sum())
        return cls(places, bounds, runs > sum(stop > start for start, stop in pairwise(bounds)))

    def taken(self, x: Tensor) -> Tensor:
        """[T, ...] of x [B, N, ...]; x itself as tokens if all are there."""
        tokens = x.flatten(0, 1)
        return tokens if len(self.places) == len(tokens) else tokens.index_select(0, self.places)

    def put(self, x: Tensor, rows: int, behind: float) -> Tensor:
        """[B, rows, ...] of x [T, ...], `behind` for padding."""
        batch = len(self.bounds) - 1
        if len(self.places) == batch * rows:
            return x.unflatten(0, (batch, rows))
        whole = x.new_full((batch * rows, *x.shape[1:]), behind)
        return whole.index_copy(0, self.places, x).unflatten(0, (batch, rows))


_there = operands.OfTensors[TokensThere]()


def attend_there(
    attend: Callable[..., tuple[Tensor, Tensor]],
    tensors: tuple[Tensor, Tensor, Tensor],
    key_padding: Tensor | None,
    query_padding: Tensor | None,
    pattern: Pattern,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """out [B, M, H, Dv] and lse [B, H, M] of `attend` over the tokens that are there, packed; 0 and -inf for rows
    without a query.

    Under a causal mask, a window or a pattern the queries are the last rows of the keys, and both have one padding.
    Raises ValueError for paddings that do not fit.
    """
    query, key, value = tensors
    operands.check_are_tensors(query=query, key=key, value=value)
    operands.check_operands(query.shape, key.shape, value.shape)
    for option in ("cu_seqlens", "max_seqlen", "cu_seqlens_k", "key_lengths", "indices"):
        if options.get(option) is not None:
            raise ValueError(f"{option} with key_padding or query_padding: one says which tokens there are; give one")
    (batch, rows), keys = query.shape[:2], key.shape[1]
    has_distances = tuple(options["window"]) != UNBOUNDED or pattern != DENSE
    has_places = has_distances or bool(options["causal"])
    for name, padding, length in (("key_padding", key_padding, keys), ("query_padding", query_padding, rows)):
        if padding is not None:
            _check_padding(name, padding, (batch, length), query.device)
    if has_places:
        operands.check_rows(rows, keys, Call(DENSE, causal=True))
        if key_padding is None or query_padding is None:
            if key_padding is None and rows < keys:
                raise ValueError(f"query_padding [B, {rows}] of fewer queries than {keys} keys needs key_padding, too")
            key_padding = query_padding if key_padding is None else key_padding
            assert key_padding is not None, "one of them is given"
            query_padding = key_padding if rows == keys else key_padding[:, keys - rows :]
        elif not torch.equal(query_padding, key_padding[:, keys - rows :]):
            raise ValueError(
                "query_padding differs from key_padding at the queries' places, which causal masks, windows and "
                "patterns count; leave query_padding out"
            )
    everything = key.new_ones((), dtype=torch.bool)
    of_keys = TokensThere.of(everything.expand(batch, keys) if key_padding is None else key_padding)
    if has_distances and of_keys.has_holes:
        raise ValueError(
            "key_padding has padding between tokens that are there, which counts as distance in windows and patterns; "
            "give padding at the ends only, or pack the tokens with cu_seqlens"
        )
    of_queries = of_keys
    if not (has_places and rows == keys):
        of_queries = TokensThere.of(everything.expand(batch, rows) if query_padding is None else query_padding)
    packed = (of_queries.taken(query), of_keys.taken(key), of_keys.taken(value))
    bounds: dict[str, Any] = {"cu_seqlens": of_queries.bounds}
    if of_queries is not of_keys:
        bounds["cu_seqlens_k"] = of_keys.bounds
    out, lse = attend(*packed, pattern, **options | bounds)
    return of_queries.put(out, rows, 0.0), of_queries.put(lse.T, rows, -torch.inf).transpose(1, 2)


def _check_padding(name: str, padding: Any, shape: tuple[int, int], device: torch.device) -> None:
    if not isinstance(padding, Tensor) or padding.dtype != torch.bool or tuple(padding.shape) != shape:
        kind = f"{padding.dtype} {tuple(padding.shape)}" if isinstance(padding, Tensor) else type(padding).__name__
        raise ValueError(f"{name} is {kind} and must be a bool tensor {[*shape]}, True for tokens that are there")
    if padding.device != device:
        raise ValueError(f"{name} is on {padding.device} and query on {device}; move one of them")
