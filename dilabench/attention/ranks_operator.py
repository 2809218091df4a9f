"""Attention over ranks under torch.compile: forward and backward as one operator each, with all their messages inside.

The operators get the number of the tokens' shards and find the function at run time, by the shapes that they meet. So
a trace reads nothing of the shards but that number: packed documents of other lengths are shards of another number, for
which nothing is compiled anew.
"""

# The annotations of operators are evaluated by torch: no postponed evaluation in this module.

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from dilabench.impls.one_operator import contiguous_like, first_derivatives, shapes_of_gradients
from dilabench.impls.ring.schedule.function import ShardedAttention

# Each algorithm keeps some number of tensors for the backward pass, but an operator has a fixed number of results. The
# most that those of dilabench keep is five (`ulysses`); the rest are empty.
MOST_KEPT = 5


class Options(NamedTuple):
    """What determines the computation besides tensors and shards."""

    causal: bool
    window: tuple[int, ...]
    scale: float | None
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    algorithm: str
    backend: str


class Functions(Protocol):
    """Shards of a sequence, with the functions that attend over them."""

    def _function_for(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> ShardedAttention: ...


_shards: WeakValueDictionary[int, Functions] = WeakValueDictionary()
# From 2 on: the compiler holds 0 and 1 for constants, each of which it compiles for.
_new_number = itertools.count(2).__next__


def number_of(shards: Functions) -> int:
    """A number by which operators find these shards for as long as they exist elsewhere (weak reference)."""
    number = _new_number()
    _shards[number] = shards
    return number


def as_one_operator(number: int, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
    """out in the shape of query, differentiable, also by torch.func.grad and vjp."""
    # What is copied here is what the backward pass reads; inside it would be copied once more there.
    tensors = query.contiguous(), key.contiguous(), value.contiguous()
    if torch._C._are_functorch_transforms_active():
        out: Tensor = _Transformed.apply(*tensors, number, options)[0]
    else:
        out = _forward_op(*tensors, number, *options)[0]
    return out


def _function(number: int, query: Tensor, key: Tensor, value: Tensor, options: Sequence[Any]) -> ShardedAttention:
    shards = _shards.get(number)
    if shards is None:
        raise RuntimeError("the SequenceShards of this call are gone; keep them until its backward pass is done")
    causal, window, scale, segment_lengths, dilation_rates, *names = options
    lists = tuple(window), scale, tuple(segment_lengths), tuple(dilation_rates)
    return shards._function_for(query, key, value, Options(causal, *lists, *names))


@torch.library.custom_op("dilabench::attention_over_ranks", mutates_args=())
def _forward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    number: int,
    causal: bool,
    window: Sequence[int],
    scale: float | None,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    algorithm: str,
    backend: str,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """out, lse, and the bytes of what the backward pass wants kept."""
    options = causal, window, scale, segment_lengths, dilation_rates, algorithm, backend
    function = _function(number, query, key, value, options)
    out, lse, kept = function.forward(query, key, value)
    if len(kept) > MOST_KEPT:
        raise RuntimeError(f"the algorithm keeps {len(kept)} tensors, and a compiled call {MOST_KEPT} at most")
    function.kept = tuple((x.shape, x.dtype) for x in kept)
    kept_bytes = [x.contiguous().flatten().view(torch.uint8) for x in kept]
    nothing = [query.new_empty(0, dtype=torch.uint8) for _ in range(MOST_KEPT - len(kept))]
    return out, lse, kept_bytes + nothing


@_forward_op.register_fake
def _forward_shapes(query: Tensor, *_others: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    *lead, rows, heads, _ = query.shape
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    new_size = torch.library.get_ctx().new_dynamic_size
    # How much comes of other ranks is known to no trace: it depends on all of their tokens.
    kept = [query.new_empty(new_size(), dtype=torch.uint8) for _ in range(MOST_KEPT)]
    return contiguous_like(query), query.new_empty((*lead, heads, rows), dtype=lse_dtype), kept


@torch.library.custom_op("dilabench::attention_over_ranks_backward", mutates_args=())
def _backward_op(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    kept: Sequence[Tensor],
    number: int,
    causal: bool,
    window: Sequence[int],
    scale: float | None,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    algorithm: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from the results of the forward operator."""
    options = causal, window, scale, segment_lengths, dilation_rates, algorithm, backend
    function = _function(number, query, key, value, options)
    as_they_were = tuple(x.view(dtype).view(shape) for x, (shape, dtype) in zip(kept, function.kept, strict=False))
    dq, dk, dv = function.backward(dout, query, key, value, out, lse, as_they_were)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


_backward_op.register_fake(shapes_of_gradients)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Sequence[Tensor]]) -> None:
    query, key, value, *ctx.options = inputs
    out, lse, kept = output
    ctx.save_for_backward(query, key, value, out, lse, *kept)


def _differentiate(ctx: Any, dout: Tensor, *_others: Any) -> tuple[Any, ...]:
    query, key, value, out, lse, *kept = ctx.saved_tensors

    def gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
        return _backward_op(*tensors, kept, *ctx.options)

    # Beside lists of tensors torch takes an empty list of numbers for one as well.
    of_options: Iterator[Any] = ([] if option == [] else None for option in ctx.options)
    return *first_derivatives(gradients, dout, query, key, value, out, lse), *of_options


torch.library.register_autograd(_forward_op, _differentiate, setup_context=_save_for_backward)


class _Transformed(torch.autograd.Function):
    """The operator for torch.func.grad and vjp, which do not find the derivative that is registered with it."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, number: int, options: Options) -> tuple[Tensor, ...]:
        out, lse, kept = _forward_op(query, key, value, number, *options)
        return out, lse, *kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        query, key, value, number, options = inputs
        out, lse, *kept = output
        ctx.mark_non_differentiable(lse, *kept)
        _save_for_backward(ctx, (query, key, value, number, *options), (out, lse, kept))

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *_others: Any) -> tuple[Any, ...]:
        return *_differentiate(ctx, dout)[:3], None, None
