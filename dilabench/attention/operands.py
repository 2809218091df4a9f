"""Refusals of tensors that do not fit together: each names the value, the rule and a way out. All raise ValueError."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from math import inf
from operator import index, le, sub
from typing import Any, Generic, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dilabench.impls.call import Call, OwnBackend
from dilabench.patterns.dense import DENSE
from dilabench.patterns.pattern import Pattern, SequenceShape
from dilabench.validation import validated
from dilabench.workload.spec import UNBOUNDED, DType, Workload, bounds_of_lengths

Kind = tuple[torch.Size, torch.dtype, torch.device]
"""Shape, dtype and device of a tensor."""
Kinds = tuple[Kind, Kind, Kind]
"""The kinds of query, key and value."""
# With this few tokens of this many heads, the axes are likely swapped.
FEW_TOKENS, MANY_HEADS = 64, 256
_DTYPES = {getattr(torch, name): name for name in get_args(DType)}

_MadeT = TypeVar("_MadeT")


class OfTensors(Generic[_MadeT]):
    """Results that depend on the contents of a tensor, for as long as it exists and is not written to.

    They must not hold the tensor itself. Tensors of `torch.inference_mode`, which count no writes, have none.
    """

    def __init__(self) -> None:
        self._kept = WeakTensorKeyDictionary()

    def get(self, x: Tensor, key: Hashable, make: Callable[[], _MadeT]) -> _MadeT:
        """The result of `make` for this tensor and key."""
        if x.is_inference():
            return make()
        version, made = self._kept.get(x, (None, {}))
        if version != x._version:
            made = {}
            self._kept[x] = x._version, made
        if key not in made:
            made[key] = make()
        found: _MadeT = made[key]
        return found


def workload_of(kinds: Sequence[Kind], call: Call) -> Workload | None:
    """The workload of query, key and value, for the tokens up to the last bound of packed sequences and without empty
    sequences; None if no token sees any. More queries than keys, which all see all, are not in it. Raises ValueError
    for tensors that do not fit together, ConfigError for options that do not fit.
    """
    shapes, dtypes, devices = zip(*kinds, strict=True)
    check_operands(*shapes)
    check_kinds(zip(dtypes, devices, strict=True))
    batch_size, rows, num_heads, head_dim = shapes[0]
    seq_len = shapes[1][1]
    if rows == seq_len <= FEW_TOKENS and num_heads > MANY_HEADS:
        _warn_of_layout(tuple(shapes[0]))
    sequences: tuple[int, ...] = ()
    if call.cu_seqlens:
        if rows != seq_len:
            raise ValueError(
                f"query has {rows} tokens and key {seq_len}, with the bounds cu_seqlens for both; give cu_seqlens_k, "
                "the bounds of the keys"
            )
        sequences = without_empty(call.cu_seqlens, seq_len)
        rows = seq_len = sequences[-1]
    check_rows(rows, seq_len, call)
    is_empty = not (batch_size and rows and seq_len)
    layout: dict[str, Any] = {"layout": "packed", "cu_seqlens": sequences} if len(sequences) > 1 else {}
    if 0 < rows < seq_len:
        layout = {"query_len": rows}
    # The options are checked even so.
    workload = validated(
        Workload,
        {
            "pattern": call.pattern,
            "batch_size": batch_size or 1,
            "seq_len": seq_len or 1,
            "num_heads": num_heads,
            "num_kv_heads": shapes[1][2],
            "head_dim": head_dim,
            "value_dim": shapes[2][3],
            "softcap": call.softcap,
            "dtype": str(dtypes[0]).removeprefix("torch."),
            "causal": call.causal,
            "window": call.window,
            "scale": call.scale,
            "mode": "both" if call.wants_gradient else "forward",
            **layout,
        },
    )
    return None if is_empty else workload


def without_empty(cu_seqlens: Sequence[int], tokens: int) -> tuple[int, ...]:
    """Strictly ascending bounds of the same sequences without empty ones. Raises ValueError if they descend, do not
    begin at 0 or end beyond the tokens.
    """
    rising = all(map(le, cu_seqlens, cu_seqlens[1:]))
    if not rising or cu_seqlens[0] != 0 or cu_seqlens[-1] > tokens:
        several = [*cu_seqlens] if len(cu_seqlens) < 8 else [*cu_seqlens[:3], "...", cu_seqlens[-1]]
        raise ValueError(
            f"cu_seqlens [{', '.join(map(str, several))}] must rise from 0 to {tokens}, the tokens T of [T, H, D], or "
            f"less; equal bounds are empty sequences{bounds_of_lengths(cu_seqlens, tokens)}"
        )
    return tuple(dict.fromkeys(cu_seqlens))


def check_operands(query: torch.Size, key: torch.Size, value: torch.Size) -> None:
    """Refuse shapes that are not [B, M, H, D], [B, N, K, D] and [B, N, K, Dv]."""
    if len(query) != 4 or len(key) != 4 or key[:3] != value[:3]:
        raise ValueError(
            f"query {tuple(query)} must be [B, N, H, D], key {tuple(key)} [B, N, K, D] and value {tuple(value)} equal "
            "but for its last dim, [B, N, K, Dv]"
        )
    B, _, _, D = query
    if not D or not value[3]:
        raise ValueError(
            f"query {tuple(query)} or value {tuple(value)} has a head dim of 0; give [B, N, H, D] with D at least 1"
        )
    if (key[0], key[3]) != (B, D):
        raise ValueError(
            f"key {tuple(key)} must agree with query {tuple(query)} in batch and head dim; give [B, N, K, D] and "
            "[B, M, H, D]"
        )
    check_heads(query[2], key[2])


def check_rows(rows: int, keys: int, call: Call) -> None:
    """Refuse more queries than keys if places matter: under a mask, a window or a pattern."""
    if rows > keys and (call.causal or call.window != UNBOUNDED or call.pattern != DENSE):
        raise ValueError(
            f"{rows} queries over {keys} keys, causal={call.causal}, window={call.window}, pattern "
            f"{call.pattern.kind}: queries are the last rows of their keys, so at most as many; give all keys, or for "
            "cross-attention no mask, window or pattern"
        )


def check_heads(heads: int, kv_heads: int) -> None:
    """Raises ValueError if a number of heads is 0, or if `heads` is not a multiple of `kv_heads`."""
    if not heads or not kv_heads or heads % kv_heads:
        raise ValueError(
            f"num_heads={heads} is not a multiple of num_kv_heads={kv_heads}, both at least 1: give query [B, N, H, D] "
            "and key [B, N, K, D], K dividing H; if they are [B, H, N, D], call transpose(1, 2) first"
        )


def check_tokens(query: Tensor, key: Tensor, value: Tensor) -> int:
    """The number of packed tokens. Refuse tensors with a batch axis."""
    if query.ndim != 3 or key.ndim != 3 or value.ndim != 3:
        shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        raise ValueError(f"{shapes} with cu_seqlens must be [T, H, D] and [T, K, D]; leave out the batch axis")
    return query.shape[0]


def check_are_tensors(**operands: object) -> None:
    """Refuse what is no tensor with all of its numbers in this process, by name."""
    for name, operand in operands.items():
        if not isinstance(operand, Tensor):
            kind = f"{type(operand).__module__}.{type(operand).__qualname__}".removeprefix("builtins.")
            raise ValueError(f"{name} is a {kind}; give a tensor: torch.as_tensor({name})")
        if operand.is_nested:
            raise ValueError(
                f"{name} is a nested tensor; give packed sequences [T, H, D], {name}.values() of the layout "
                f"torch.jagged, and their bounds, cu_seqlens={name}.offsets()"
            )
        if operand.layout is not torch.strided:
            raise ValueError(f"{name} has layout {operand.layout} and must be torch.strided; give {name}.to_dense()")
        if type(operand).__name__ == "DTensor":
            raise ValueError(
                f"{name} is a DTensor, of which each rank has a part; give {name}.full_tensor(), or if ranks share the "
                f"tokens, {name}.to_local() to ring_attention"
            )


@lru_cache(maxsize=256)
def _warn_of_layout(query: tuple[int, ...]) -> None:
    """Once for a shape that looks like [B, H, N, D], which no check can tell from few tokens of many heads."""
    warnings.warn(
        f"query {query} has {query[2]} heads of {query[1]} tokens: the layout is [B, N, H, D]; if it is [B, H, N, D], "
        "call transpose(1, 2) first",
        stacklevel=2,
    )


def check_pattern(pattern: object) -> None:
    """Refuse what is neither None nor a pattern, such as its name, its class or its fields."""
    if pattern is not None and not isinstance(pattern, Pattern):
        example = "such as DilatedPattern(...)"
        raise ValueError(f"pattern {pattern!r:.80} must be an object of dilabench.patterns, {example}")


# The shape of indices, by whether each token selects, or each block of queries.
_SHAPES = {True: "[B, N, K, S]", False: "[K, n, k]"}


def refuse_stand_ins(pattern: Pattern) -> None:
    """Refuse patterns that read more than query, key and value, for which benchmarks draw stand-ins: queries and keys
    of selectors, and the gates of sums.
    """
    if pattern.summands(SequenceShape(1, 1, 1, causal=True, window=(-1, -1))):
        raise ValueError(
            f"pattern {pattern.kind} is a sum of several softmaxes, whose gates and selection are stand-ins, not your "
            "model's; use native_sparse_attention(query, key, value, gates)"
        )
    if pattern.reads_queries:
        raise ValueError(
            f"pattern {pattern.kind} without indices: its selectors read stand-ins, not query and key; give the blocks "
            f"that your model selects, indices={_SHAPES[pattern.selects is None or pattern.selects.per_token]}, or let "
            "native_sparse_attention select them"
        )


def check_kinds(kinds: Iterable[tuple[torch.dtype, torch.device]]) -> None:
    """Refuse dtypes or devices that differ, and dtypes that no kernel computes."""
    found = [*kinds]
    if len({*found}) > 1:
        named = (f"{str(dtype).removeprefix('torch.')} on {device}" for dtype, device in found)
        got = ", ".join(f"{name} {kind}" for name, kind in zip(("query", "key", "value"), named, strict=True))
        raise ValueError(f"query, key and value must share dtype and device, got {got}")
    dtype = found[0][0]
    if dtype not in _DTYPES:
        name = str(dtype).removeprefix("torch.")
        *others, last = map(repr, _DTYPES.values())
        raise ValueError(f"dtype {name!r} should be {', '.join(others)} or {last}")


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast floating tensors except float64 to the dtype of `torch.autocast`, if it is on for the tensor's device, like
    torch's `scaled_dot_product_attention`.
    """
    return tuple(map(_as_autocast, tensors))


def _as_autocast(x: Tensor) -> Tensor:
    device = x.device.type
    if x.dtype == torch.float64 or not (torch.is_floating_point(x) and torch.amp.is_autocast_available(device)):
        return x
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


_INTEGERS = {
    "window": "two integers, (left, right), with -1 for unbounded; (-1, -1) is no window",
    "cu_seqlens": "integers that rise from 0, for example (0, 512, 1024)",
    "cu_seqlens_k": "integers that rise from 0, for example (0, 512, 1024)",
    "key_lengths": "the number of keys of each item, for example (512, 300)",
    "dilation_rates": "a sequence of integers, for example (1, 2)",
}
_SEGMENTS = "a sequence of integers, for example (2048, 4096)"


def integers(name: str, value: Any) -> tuple[int, ...]:
    """An option that is a sequence of integers. Raises ValueError for texts, tensors and other values."""
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Tensor):
        numbers = tuple(value)
        # Bounds may be thousands, and nearly always are plain integers.
        if {*map(type, numbers)} <= {int, torch.SymInt}:
            return numbers
        if not any(isinstance(x, str | Tensor) for x in numbers):
            with suppress(TypeError):
                return tuple(map(index, numbers))
        if all(isinstance(x, str) and len(x) == 1 for x in numbers):
            # A text that was split into characters.
            value = "".join(numbers)
    raise ValueError(f"{name} {value!r:.80} must be {_INTEGERS.get(name, _SEGMENTS)}")


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that are not numbers or texts: one result is cached for all calls with equal options.

    A tensor would be a key by its identity, with the value of the first call, and would get no gradient.
    """
    for name, value in options.items():
        if name in ("segment_lengths", "dilation_rates", "window"):
            numbers = integers(name, value)
            if name == "window" and len(numbers) != 2:
                raise ValueError(f"window {value!r:.80} must be {_INTEGERS['window']}")
        elif isinstance(value, Tensor):
            learned = "; for a learned scale give scale=1 and query * scale" if name == "scale" else ""
            raise ValueError(
                f"{name} is a tensor, {value!r:.80}, and must be a Python number or text, which stays the same and "
                f"gets no gradient: give {name}.item(){learned}"
            )
        elif name == "causal" and not isinstance(value, bool | np.bool_):
            raise ValueError(f"causal {value!r:.80} must be a bool; give True or False")
        elif name in ("scale", "softcap") and isinstance(value, str):
            raise ValueError(f"{name} {value!r} is a text; give a number")
        elif name in ("scale", "softcap") and isinstance(value, int | float | np.floating) and not 0 < value < inf:
            way_out = "; None is no cap" if name == "softcap" else ""
            raise ValueError(f"{name} {value} should be a finite number greater than 0{way_out}")
        elif name == "backend" and not (isinstance(value, str | OwnBackend) or callable(value)):
            raise ValueError(f"backend {value!r} must be a name of `dilabench list backends`, a function, or 'auto'")


def check_call(call: Call) -> None:
    """Refuse options of a call that are no numbers, texts or functions."""
    check_options(call._asdict())


def refuse_types(options: Mapping[str, Any]) -> None:
    """`check_options`, and refuse unhashable values such as lists; torch 2.10 cannot compile `hash`."""
    check_options(options)
    for name, value in () if torch.compiler.is_compiling() else options.items():
        try:
            hash(value)
        except TypeError:
            raise ValueError(f"{name} {value!r:.80} has parts that can change; give numbers and texts") from None


def bounds(cu_seqlens: Sequence[int] | Tensor, tokens: int | None = None, name: str = "cu_seqlens") -> tuple[int, ...]:
    """The bounds as numbers, at least one: an empty tuple means a batch. A tensor is read from its device once.

    tokens: how many there are, if that is known. name: of the option.
    """
    if not isinstance(cu_seqlens, Tensor):
        cu_seqlens = bounds = integers(name, cu_seqlens)
    elif cu_seqlens.is_meta:
        raise ValueError(f"{name} is on meta, and its numbers are read; give a list")
    else:
        bounds = _numbers(cu_seqlens) if cu_seqlens.ndim == 1 else ()
    if not bounds:
        end = "" if tokens is None else f" to {tokens}"
        row = _INTEGERS[name] if name == "key_lengths" else f"one row of bounds that rise from 0{end}"
        raise ValueError(f"{name} {cu_seqlens} must be {row}")
    if isinstance(cu_seqlens, Tensor):
        check_bounds_dtype(cu_seqlens, name)
    return bounds


def packing(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Sequence[int] | Tensor | None,
    max_seqlen: int | None,
    of_keys: Sequence[int] | Tensor | None = None,
) -> tuple[tuple[int, ...], int, Tensor | None]:
    """The bounds of packed sequences as numbers, or if they stay in their tensor, a bound of their lengths (0: none is
    known) and the tensor. of_keys: the bounds of keys, beside which those of queries stay on a GPU. Raises ValueError.
    """
    longest = 0 if max_seqlen is None else rounded_up(max_seqlen, cu_seqlens)
    assert cu_seqlens is not None, "a longest sequence without bounds is refused"
    tokens = check_tokens(query, key, value)
    # A compiled graph takes a tensor of bounds unread, and so serves every packing.
    both_stay = isinstance(of_keys, Tensor) and may_stay(of_keys)
    stays = isinstance(cu_seqlens, Tensor) and (
        torch.compiler.is_compiling() or ((longest or both_stay) and may_stay(cu_seqlens))
    )
    if not isinstance(cu_seqlens, Tensor) or not stays:
        return bounds(cu_seqlens, tokens), 0, None
    if cu_seqlens.ndim != 1:
        raise ValueError(f"cu_seqlens {tuple(cu_seqlens.shape)} must be one row of bounds that rise from 0 to {tokens}")
    check_bounds_dtype(cu_seqlens)
    return (), longest, cu_seqlens


def may_stay(bounds: Tensor) -> bool:
    """Whether reading these bounds would make the host wait for a GPU."""
    return type(bounds) is Tensor and bounds.is_cuda


def check_bounds_dtype(cu_seqlens: Tensor, name: str = "cu_seqlens") -> None:
    """Refuse bounds that are fractions or bools."""
    if cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool:
        raise ValueError(f"{name} has dtype {cu_seqlens.dtype} and must be {_INTEGERS[name]}")


def rounded_up(max_seqlen: int, cu_seqlens: Sequence[int] | Tensor | None) -> int:
    """The next power of two, from 1024 on, so that few graphs of compilers and few plans serve all lengths.

    Raises ValueError for tensors, negative numbers, other types than integers, and if `cu_seqlens` is None. Bounds on
    the host are read if no graph is compiled; then a longer sequence than `max_seqlen` raises ValueError, too.
    """
    if isinstance(max_seqlen, Tensor):
        raise ValueError(f"max_seqlen is a tensor, {max_seqlen!r:.80}; give a number, such as that of all tokens")
    if not isinstance(max_seqlen, int | torch.SymInt):
        try:
            max_seqlen = index(max_seqlen)
        except TypeError:
            raise ValueError(f"max_seqlen {max_seqlen!r:.80} must be a whole number of tokens") from None
    if max_seqlen < 0:
        raise ValueError(f"max_seqlen {max_seqlen} must be the tokens of the longest sequence or more")
    if cu_seqlens is None:
        raise ValueError(
            f"max_seqlen {max_seqlen} without cu_seqlens, the bounds of packed sequences; give both or none"
        )
    if not torch.compiler.is_compiling() and (bounds := _on_host(cu_seqlens)):
        longest = max(map(sub, bounds[1:], bounds), default=0)
        if max_seqlen < longest:
            raise ValueError(
                f"max_seqlen {max_seqlen} is less than {longest}, the tokens of the longest sequence of cu_seqlens; "
                "give that or more"
            )
    longest = 1024
    # A compiler guards comparisons, but would compile for each number of bits.
    while longest < max_seqlen:
        longest *= 2
    return longest


def _on_host(cu_seqlens: Sequence[int] | Tensor) -> tuple[int, ...]:
    """The bounds as numbers; empty for a tensor that is on a device, traced, or no row of integers."""
    if not isinstance(cu_seqlens, Tensor):
        return integers("cu_seqlens", cu_seqlens)
    is_here = type(cu_seqlens) is Tensor and cu_seqlens.is_cpu
    return _numbers(cu_seqlens) if is_here and cu_seqlens.ndim == 1 and not cu_seqlens.is_floating_point() else ()


_read_bounds = OfTensors[tuple[int, ...]]()


def _numbers(bounds: Tensor) -> tuple[int, ...]:
    return _read_bounds.get(bounds, (), lambda: tuple(bounds.tolist()))


def check_is_tensor(sink: object) -> None:
    """Refuse a sink of another type: it is learned, and has a device."""
    if not isinstance(sink, Tensor) or sink.layout is not torch.strided:
        raise ValueError(
            f"sink {sink!r:.80} must be a tensor [H], one logit per query head: give "
            "torch.tensor([...], device=query.device)"
        )


def check_sink(sink: Tensor, query: Tensor, pattern: Pattern | None) -> None:
    """Refuse a sink that is not one logit per head, or that would get no gradient."""
    if tuple(sink.shape) != (query.shape[2],) or not sink.is_floating_point():
        raise ValueError(
            f"sink {sink.dtype} {tuple(sink.shape)} must be one logit per query head, of a floating type; query is "
            f"{tuple(query.shape)}: give [{query.shape[2]}]"
        )
    if sink.device != query.device:
        raise ValueError(f"sink is on {sink.device} and query on {query.device}; move one of them")
    if pattern is not None and pattern.is_detached:
        raise ValueError(
            "sink with merge_grad='detached': a sink acts through the weights that branches are merged with, and "
            "these count as constants; use merge_grad='exact'"
        )
