"""A computation under torch.compile: forward and backward as one operator each, one node of a graph without breaks.

Tracing into it would break the graph at every call of a kernel, or be wrong: whether a kernel can read a tensor hangs
on its address, which a trace does not have; pattern cache and buffer pool sit behind locks; and torch refuses to
functionalize writes through the strided views that results are merged into. So the compiler sees none of the inside.
"""

# The annotations of operators are evaluated by torch: no postponed evaluation in this module.

import ast
import itertools
import logging
import math
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from dilabench.impls.null_mass import sink_gradient
from dilabench.impls.operator_rules import (
    FLOP_COUNTER,
    LIBRARY,
    differentiable_operator,
    first_derivatives,
    let_flops_be_counted,
    mapped,
    operator,
)
from dilabench.kernels.lse import add_null_mass_

ResultT = TypeVar("ResultT")

logger = logging.getLogger(__name__)


@runtime_checkable
class Computation(Protocol):
    """Attention outside autograd; the backward pass needs only out and lse of the forward pass.

    `forward` gives out [B, N, H, D] and lse [B, H, N] first, then perhaps a list of tensors, which `backward` takes
    last; `backward` gives dq, dk, dv. It may have `forward_before_backward`, too: `forward` that prepares for
    `backward`. If `exchanges` is true, its ranks exchange gradients even if no loss depends on out.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any: ...
    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class Options(NamedTuple):
    """The key of a computation, with the shapes of its tensors.

    As of `attention.dilated_attention`, 0 for no `max_seqlen`. `algorithm`: over ranks, by name; '' on one device.
    """

    segment_lengths: tuple[int, ...] = ()
    dilation_rates: tuple[int, ...] = ()
    causal: bool = False
    window: tuple[int, ...] = ()
    scale: float | None = None
    heads: str = ""
    offset: str = ""
    offset_by: str = ""
    padding: str = ""
    merge_grad: str = ""
    cu_seqlens: tuple[int, ...] = ()
    wants_gradient: bool = False
    algorithm: str = ""
    max_seqlen: int = 0
    backend: str = ""


_NONE = Options()


class FoundByOptions(Protocol):
    """The factory of computations for options and tensors."""

    def _computation_for(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Computation: ...
    def _pairs_for(self, query: torch.Size, key: torch.Size, options: Options) -> int:
        """(query, key) pairs that a call of these shapes attends to, over batch and heads."""
        ...


class Kept(int):
    """A number of `new_number`, which keeps what is registered under it."""

    registered: FoundByOptions

    @classmethod
    def of(cls, registered: FoundByOptions) -> "Kept":
        """Register it under a new number."""
        number = cls(new_number())
        number.registered = registered
        register(number, registered)
        return number


# An operator takes tensors and numbers, so that what computes goes by its number.
_registered: WeakValueDictionary[int, Any] = WeakValueDictionary()
# The number of a computation that stays for the whole process: equal in each process, because the compiler caches on
# disk.
DILATED = 1
# From 2 on: the compiler treats 0 and 1 as constants and compiles for each.
new_number = itertools.count(2).__next__


def register(number: int, computation: Computation | FoundByOptions) -> None:
    """Let operators find it by its number for as long as it exists elsewhere (weak reference)."""
    _registered[int(number)] = computation


def _computation(
    number: int, query: Tensor, key: Tensor, value: Tensor, options: Options, bounds: Tensor | None = None
) -> Computation:
    registered: Any = _registered.get(number)
    if registered is None:
        raise RuntimeError(
            "the attention function or the SequenceShards of this call are gone; keep them until its backward pass is "
            "done, and for as long as you call what was compiled from them"
        )
    find = getattr(registered, "_computation_for", None)
    arguments = (query, key, value, options) if bounds is None else (query, key, value, options, bounds)
    found: Computation = find(*arguments) if find else registered
    return found


def outside_compilers(function: Callable[..., ResultT], *arguments: Any) -> ResultT:
    """Call it as it is, with a break of the graph where a compiler traces the call."""
    if not torch.compiler.is_compiling():
        return function(*arguments)
    # As a decorator it would load the compiler when a module is imported.
    apart: Callable[..., ResultT] = torch.compiler.disable(function)
    return apart(*arguments)


_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def is_plain_eager_call(*tensors: Tensor) -> bool:
    """Return True if a call is plain: no compiler, tracer, mode or function transform that must see one operator.
    Negative views and zero tensors are excluded, because torch's dispatcher copies them before an operator reads them.

    torch takes a hundred microseconds to call an operator, which passes on only results of known number and shape.
    """
    looked_at = (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_tracing()
    )
    if looked_at or not _PLAIN.issuperset(map(type, tensors)):
        return False
    return not (any(map(Tensor.is_neg, tensors)) or any(map(Tensor._is_zerotensor, tensors)))


def materialised(x: Tensor) -> Tensor:
    """x, or a copy where its memory does not hold its values (a negative view, a zero tensor); differentiable."""
    x = x.resolve_neg()
    return x.clone() if x._is_zerotensor() else x


def eager(computation: Computation, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse as `differentiable` gives them, without a compiler."""
    q, k, v = materialised(q), materialised(k), materialised(v)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        out, lse = WithGradient.apply(computation, q, k, v)
    else:
        out, lse, *_ = computation.forward(q, k, v)
    return out, lse


def forward_before_backward(computation: Computation, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """`Computation.forward` before `Computation.backward`: prepared together, if it has such a form."""
    return getattr(computation, "forward_before_backward", computation.forward)(q, k, v)


def empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for out and lse of q [B, N, H, D]."""
    *lead, rows, heads, _ = q.shape
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return contiguous_like(q), q.new_empty((*lead, heads, rows), dtype=dtype)


class WithGradient(torch.autograd.Function):
    """out and lse of a computation, q, k and v, called as it is; lse carries no gradient."""

    @staticmethod
    def forward(ctx: Any, computation: Computation, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, *more = forward_before_backward(computation, q, k, v)
        ctx.computation = computation
        ctx.save_for_backward(q, k, v, out, lse, *(more[0] if more else ()))
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, _dlse: None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *kept = ctx.saved_tensors
        if dout is None:
            if not getattr(ctx.computation, "exchanges", False):
                return None, None, None, None
            dout = torch.zeros_like(out)
        elif dout.is_neg() or dout._is_zerotensor():
            dout = materialised(dout)
        return None, *first_derivatives(ctx.computation.backward, dout, q, k, v, out, lse, *([kept] if kept else []))


def as_one_operator(
    number: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: tuple[Any, ...] = _NONE,
    sink: Tensor | None = None,
    bounds: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out [B, N, H, D] and lse [B, H, N], which carries no gradient, by what is registered under this number.

    Differentiable, also by torch.func. options: the fields of `Options`. sink: [H], the logits of a key of value 0.
    bounds: [S + 1], `Options.cu_seqlens` as a tensor for `_computation_for`, so that one graph serves all packings.
    """
    if not torch.compiler.is_compiling() and FLOP_COUNTER in sys.modules:
        let_flops_be_counted(_pairs)
    if isinstance(number, Kept) or torch._C._are_functorch_transforms_active():
        out, lse, _ = _Differentiable.apply(q, k, v, sink, bounds, number, _written(options))
    else:
        out, lse, _ = _attention_op(q, k, v, sink, bounds, number, *options)
    return out, lse.detach()


def _written(options: tuple[Any, ...]) -> str:
    """`Options` as a text that means the same in every process, for the compiler keeps what it compiles on disk.

    One text costs a compiled call less than a dozen options, and compilers write it themselves.
    """
    # A length that the compiler holds for a variable is a constant from here on.
    return repr(
        tuple([tuple([int(n) for n in option]) if isinstance(option, (list, tuple)) else option for option in options])
    )


@lru_cache(maxsize=256)
def _read(asked: str) -> Options:
    return Options._make(ast.literal_eval(asked))


def _shapes_of_results(
    q: Tensor, _k: Tensor, _v: Tensor, _sink: Tensor | None, _bounds: Tensor | None, _number: int, asked: str
) -> tuple[Tensor, Tensor, Tensor]:
    # How much comes of other ranks is known to no trace: it depends on all of their tokens.
    kept = torch.library.get_ctx().new_dynamic_size() if _read(asked).algorithm else 0
    return *empty_results(q), q.new_empty(kept, dtype=torch.uint8)


@operator("attention_forward", _shapes_of_results)
def _forward_op(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, bounds: Tensor | None, number: int, asked: str
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, and the bytes of what ranks want kept for the backward pass."""
    options = _read(asked)
    computation = _computation(number, query, key, value, options, bounds)
    forward = getattr(computation, "forward_before_backward", None) if options.wants_gradient else None
    out, lse, *more = (forward or computation.forward)(query, key, value)
    if sink is not None:
        add_null_mass_(out, lse, sink[:, None].to(lse.dtype))
    kept = (
        _as_bytes(computation, *more)
        if options.algorithm and more and more[0]
        else query.new_empty(0, dtype=torch.uint8)
    )
    return out.contiguous(), lse.contiguous(), kept


def _shapes_of_gradients(_dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_others: Any) -> tuple[Tensor, ...]:
    return contiguous_like(q), contiguous_like(k), contiguous_like(v)


@operator("attention_backward", _shapes_of_gradients)
def _backward_op(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    kept: Tensor,
    bounds: Tensor | None,
    number: int,
    asked: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from the results of the forward operator."""
    options = _read(asked)
    computation: Any = _computation(number, query, key, value, options, bounds)
    more = [_from_bytes(computation, kept)] if options.algorithm else []
    dq, dk, dv = computation.backward(dout, query, key, value, out, lse, *more)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def _is_alone(number: int, asked: str) -> bool:
    """Whether a larger batch is another computation, or keeps more: a detached merge keeps each branch's result."""
    options = _read(asked)
    return bool(number != DILATED or options.cu_seqlens or options.algorithm or options.merge_grad == "detached")


# Query, key and value; dout, those, out and lse.
torch.library.register_vmap("dilabench::attention_forward", mapped(_forward_op, range(3), _is_alone), lib=LIBRARY)
torch.library.register_vmap("dilabench::attention_backward", mapped(_backward_op, range(6), _is_alone), lib=LIBRARY)


def _pairs(number: int, query: torch.Size, key: torch.Size, asked: str) -> int:
    pairs: int = _registered[number]._pairs_for(query, key, _read(asked))
    return pairs


if FLOP_COUNTER in sys.modules:
    let_flops_be_counted(_pairs)

# Each tensor begins at a multiple of this many bytes, for any type.
_ALIGNED = 16


def _as_bytes(computation: Any, kept: Sequence[Tensor]) -> Tensor:
    """Tensors in one, whose shapes and types the computation remembers: they are the same in each of its calls."""
    computation.kept = tuple((x.shape, x.dtype) for x in kept)
    parts = [x.contiguous().flatten().view(torch.uint8) for x in kept]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([torch.nn.functional.pad(part, (0, -len(part) % _ALIGNED)) for part in parts])


def _from_bytes(computation: Any, kept: Tensor) -> tuple[Tensor, ...]:
    found, first = [], 0
    for shape, dtype in computation.kept:
        size = math.prod(shape) * dtype.itemsize
        found.append(kept[first : first + size].view(dtype).view(shape))
        first += size + -size % _ALIGNED
    return tuple(found)


class _Differentiable(torch.autograd.Function):
    """The operator with its derivative, also for the transforms of torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        bounds: Tensor | None,
        number: int,
        asked: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _forward_op(query, key, value, sink, bounds, number, asked)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        query, key, value, sink, bounds, ctx.number, ctx.asked = inputs
        ctx.save_for_backward(query, key, value, *output, bounds, sink)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _dlse: Tensor, _dkept: Tensor | None) -> tuple[Tensor | None, ...]:
        *saved, sink = ctx.saved_tensors

        def gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
            of_inputs = _backward_op(*tensors[:8], ctx.number, ctx.asked)
            if sink is None:
                return of_inputs
            dout, _, _, _, out, lse, _, _, sinks = tensors
            return *of_inputs, sink_gradient(dout, out, lse, sinks)

        found = first_derivatives(gradients, dout, *saved, *(() if sink is None else (sink,)))
        return *found, *(None for _ in range(7 - len(found)))


@differentiable_operator("attention")
def _attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None,
    bounds: Tensor | None,
    number: int,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    causal: bool,
    window: Sequence[int],
    scale: float | None,
    heads: str,
    offset: str,
    offset_by: str,
    padding: str,
    merge_grad: str,
    cu_seqlens: Sequence[int],
    wants_gradient: bool,
    algorithm: str,
    max_seqlen: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if cu_seqlens and torch._C._len_torch_dispatch_stack() > 0:
        _warn_of_packings(tuple(map(int, cu_seqlens)))
    # A trace must see all results whose size it does not know.
    rules = heads, offset, offset_by, padding, merge_grad, cu_seqlens, wants_gradient, algorithm, max_seqlen, backend
    asked = _written((segment_lengths, dilation_rates, causal, window, scale, *rules))
    out, lse, kept = _Differentiable.apply(query, key, value, sink, bounds, number, asked)
    return out, lse, kept


_packings: set[tuple[int, ...]] = set()


def _warn_of_packings(cu_seqlens: tuple[int, ...]) -> None:
    """Log a warning when the number of compiled lists of bounds reaches torch's limit of graphs per function."""
    limit = torch._dynamo.config.recompile_limit
    if len(_packings) < limit and cu_seqlens not in _packings:
        _packings.add(cu_seqlens)
        if len(_packings) == limit:
            logger.warning(
                "%d lists cu_seqlens are compiled, each as a separate graph, and torch limits the number of graphs "
                "per function: "
                "for another list it raises FailOnRecompileLimitHit with fullgraph=True, and runs the function "
                "uncompiled without. Give cu_seqlens as a tensor, which one graph takes any bounds in, or raise "
                "torch._dynamo.config.recompile_limit",
                limit,
            )


def contiguous_like(x: Tensor) -> Tensor:
    """Empty, in the shape and type of x."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
