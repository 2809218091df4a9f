"""A computation under torch.compile: forward and backward as one operator each, one node of a graph without breaks.

Tracing into it would break the graph at every call of a kernel, or be wrong: whether a kernel can read a tensor hangs
on its address, which a trace does not have; pattern cache and buffer pool sit behind locks; and torch refuses to
functionalize writes through the strided views that results are merged into. So the compiler sees none of the inside.
"""

# The annotations of operators are evaluated by torch: no postponed evaluation in this module.

import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from dilabench.impls.call import (
    Call,
    CallFinder,
    Computation,
    PatternFields,
    has_constant_lse,
    is_over_ranks,
    name_of_function,
    read_call,
    written,
)
from dilabench.impls.null_mass import with_lse_gradient, with_sink_gradient
from dilabench.impls.operator_rules import (
    FLOP_COUNTER,
    LIBRARY,
    as_batch_of,
    as_bytes,
    differentiable_operator,
    empty_results,
    first_derivatives,
    from_bytes,
    let_flops_be_counted,
    mapped,
    materialised,
    operator,
    outside_compilers,
    reverse_only,
    shapes_of_gradients,
    traced_in_transform,
    warn_of_packings,
)
from dilabench.kernels.lse import add_null_mass_

ResultT = TypeVar("ResultT")


# An operator takes tensors and numbers, so that what computes goes by its number.
_registered: WeakValueDictionary[int, Any] = WeakValueDictionary()
# The finder of calls on one device has the same number in each process, because the compiler caches on disk.
ON_ONE_DEVICE = 1
# From 2 on: the compiler treats 0 and 1 as constants and compiles for each.
new_number = itertools.count(2).__next__


def register(number: int, computation: Computation | CallFinder) -> None:
    """Let operators find it by its number for as long as it exists elsewhere (weak reference)."""
    _registered[number] = computation


def _computation(number: int, q: Tensor, k: Tensor, v: Tensor, asked: str, *read: Tensor | None) -> Computation:
    """The computation that is registered or found. read: indices, bounds and key_bounds of `CallFinder`."""
    registered: Any = _registered.get(number)
    if registered is None:
        raise RuntimeError(
            "the attention function or the SequenceShards of this call are gone; keep them until its backward pass is "
            "done, and for as long as you call what was compiled from them"
        )
    found: Computation = registered._computation_for(q, k, v, read_call(asked), *read) if asked else registered
    return found


PLAIN = frozenset((Tensor, torch.nn.Parameter))


def is_plain_eager_call(*tensors: Tensor | None) -> bool:
    """Return True if a call is plain: no compiler, tracer, mode or function transform that must see one operator, and
    strided tensors or None. Negative views and zero tensors are excluded, because torch's dispatcher copies them before
    an operator reads them.

    torch takes a hundred microseconds to call an operator, which passes on only results of known number and shape.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_tracing()
    ):
        return False
    for x in tensors:
        if x is not None and (
            type(x) not in PLAIN or x.layout is not torch.strided or x.is_nested or x.is_neg() or x._is_zerotensor()
        ):
            return False
    return True


def eager(
    computation: Computation,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None = None,
    *read: Tensor | None,
    only_out: bool = False,
) -> tuple[Tensor, Tensor]:
    """out and lse [B, H, N], both differentiable (over ranks out alone), without a compiler.

    sink: [H], the logits of a key of value 0. read: further tensors that the backward pass reads; autograd then refuses
    one that was written to in between. only_out: no loss depends on lse, whose gradient torch's own operators lack.
    """
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sink is not None and sink.requires_grad)
    ):
        direct = getattr(computation, "differentiable", None) if only_out and sink is None else None
        found: tuple[Tensor, Tensor] | None = direct(q, k, v) if direct is not None else None
        return WithGradient.apply(computation, q, k, v, sink, *read) if found is None else found
    out, lse, *_ = with_sink(computation, computation.forward, q, k, v, sink)
    return out, lse


def with_sink(
    computation: Computation, forward: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None
) -> Any:
    """The result of `forward` of a computation, with a sink added to it."""
    if sink is None:
        return forward(q, k, v)
    if getattr(computation, "exchanges", False):
        return forward(q, k, v, sink)
    out, lse, *more = forward(q, k, v)
    add_null_mass_(out, lse, sink[:, None].to(lse.dtype))
    return out, lse, *more


class WithGradient(torch.autograd.Function):
    """out and lse of a computation, called as it is. Arguments as of `eager`."""

    @staticmethod
    def forward(
        ctx: Any, computation: Computation, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *read: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        # As `forward_before_backward`, without a call in between.
        forward = getattr(computation, "forward_before_backward", computation.forward)
        out, lse, *more = forward(q, k, v) if sink is None else with_sink(computation, forward, q, k, v, sink)
        ctx.computation, ctx.num_read = computation, len(read)
        ctx.save_for_backward(q, k, v, out, lse, sink, *read, *(more[0] if more else ()))
        if getattr(computation, "exchanges", False):
            # Ranks whose loss depends on lse, and others, would exchange different messages.
            ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sink, *more = ctx.saved_tensors
        none = (None,) * (ctx.num_read + (sink is None))
        if dout is None:
            if dlse is None and not getattr(ctx.computation, "exchanges", False):
                return None, None, None, None, None, *(None,) * ctx.num_read
            dout = torch.zeros_like(out)
        elif dout.is_neg() or dout._is_zerotensor():
            dout = materialised(dout)
        kept = more[ctx.num_read :]
        given = (q, k, v, out, lse, *([kept] if kept else []))
        gradients = ctx.computation.backward
        if dlse is not None:
            dout = as_batch_of(dlse, dout)
            given, gradients = (*given, dlse), partial(with_lse_gradient, gradients)
        if sink is not None:
            given, summed = (*given, sink), getattr(ctx.computation, "summed", None)
            gradients = partial(with_sink_gradient, gradients, summed, dlse is not None)
        return None, *first_derivatives(gradients, dout, *given), *none


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class AttentionComputation(ABC):
    """A `Computation`, found by operators under its number, that autograd can differentiate.

    `keeps_more`: `forward` also gives a list of tensors, which `backward` takes last.
    """

    number: int = field(default_factory=new_number, init=False, repr=False, compare=False)

    keeps_more: ClassVar[bool] = False

    def __post_init__(self) -> None:
        register(self.number, self)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out [B, N, H, D] of q [B, N, H, D] and k, v [B, N, K, D], or packed [T, ·, D]; differentiable."""
        return self._computed(q, k, v, only_out=True)[0]

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out, and lse [B, H, N], packed [H, T] (natural log; float32, float64 for float64)."""
        return self._computed(q, k, v, only_out=False)

    def _computed(self, q: Tensor, k: Tensor, v: Tensor, only_out: bool) -> tuple[Tensor, Tensor]:
        if q.ndim == 3:
            out, lse = self._computed(q[None], k[None], v[None], only_out)
            return out.squeeze(0), lse.squeeze(0)
        # An operator would not pass on the tensors that `forward` keeps.
        if (torch.compiler.is_compiling() or torch._C._is_tracing()) and not self.keeps_more:
            out, lse, _ = _attention_op(q, k, v, None, None, None, None, self.number, *_NO_CALL)
            return out, lse.detach()
        return outside_compilers(_materialised_eager, self, q, k, v, only_out)

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """out [B, N, H, D] in q's dtype and lse [B, H, N], outside autograd; packed sequences are one item.

        A row that sees no key has out 0 and lse -inf.
        """

    @abstractmethod
    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv in the dtypes of q, k, v, from an out and lse that may belong to a larger softmax."""


# The arguments of the operator for a computation that is found by its number alone.
_NO_CALL: tuple[Any, ...] = ("", (), (), False, (), None, (), 0, False, "", "", (), None)


def _materialised_eager(
    computation: Computation, q: Tensor, k: Tensor, v: Tensor, only_out: bool
) -> tuple[Tensor, Tensor]:
    return eager(computation, materialised(q), materialised(k), materialised(v), only_out=only_out)


def as_one_operator(
    number: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    pattern: PatternFields,
    sink: Tensor | None = None,
    indices: Tensor | None = None,
    bounds: Tensor | None = None,
    key_bounds: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out [B, N, H, D] and lse [B, H, N], by the finder that is registered under a number; differentiable.

    pattern: instead of the call's, which is not read. sink: [H], the logits of a key of value 0. indices: of selected
    blocks. bounds, key_bounds: `Call.cu_seqlens` and `Call.key_bounds` as tensors: one graph serves all.
    """
    if not torch.compiler.is_compiling() and FLOP_COUNTER in sys.modules:
        let_flops_be_counted(_pairs)
    backend = call.backend if isinstance(call.backend, str) else name_of_function(call.backend.function)
    of_sequences = call.cu_seqlens, call.max_seqlen, call.wants_gradient, backend, call.algorithm
    options = (*pattern, call.causal, call.window, call.scale, *of_sequences, call.key_bounds, call.softcap)
    function: Any = None
    if torch._C._are_functorch_transforms_active():
        function = _ReverseOnly
        if torch.compiler.is_compiling():
            (q, k, v, sink), is_traced = traced_in_transform(q, k, v, sink)
            function = _Differentiable if is_traced else None
    if function is not None:
        out, lse, _ = function.apply(q, k, v, sink, indices, bounds, key_bounds, number, written(*options))
    else:
        out, lse, _ = _attention_op(q, k, v, sink, indices, bounds, key_bounds, number, *options)
    return out, lse


def _shapes_of_results(q: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    asked: str = others[-1]
    # How much comes of other ranks is known to no trace: it depends on all of their tokens.
    kept = torch.library.get_ctx().new_dynamic_size() if asked and read_call(asked).algorithm else 0
    return *empty_results(q, others[1]), q.new_empty(kept, dtype=torch.uint8)


@operator("attention_forward", _shapes_of_results)
def _forward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None,
    indices: Tensor | None,
    bounds: Tensor | None,
    key_bounds: Tensor | None,
    number: int,
    asked: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, and the bytes of what ranks want kept for the backward pass."""
    computation = _computation(number, query, key, value, asked, indices, bounds, key_bounds)
    call = read_call(asked) if asked else None
    forward = getattr(computation, "forward_before_backward", None) if call and call.wants_gradient else None
    out, lse, *more = with_sink(computation, forward or computation.forward, query, key, value, sink)
    passed_on = call is not None and call.algorithm and more and more[0]
    kept = as_bytes(computation, *more) if passed_on else query.new_empty(0, dtype=torch.uint8)
    return out.contiguous(), lse.contiguous(), kept


@operator("attention_backward", shapes_of_gradients)
def _backward_op(
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    kept: Tensor,
    indices: Tensor | None,
    bounds: Tensor | None,
    key_bounds: Tensor | None,
    number: int,
    asked: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from the results of the forward operator."""
    computation: Any = _computation(number, query, key, value, asked, indices, bounds, key_bounds)
    more = [from_bytes(computation, kept)] if is_over_ranks(asked) else []
    given: tuple[Any, ...] = (query, key, value, out, lse, *more)
    if dlse is None:
        dq, dk, dv = computation.backward(dout, *given)
    else:
        dq, dk, dv = with_lse_gradient(computation.backward, dout, *given, dlse)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@operator("sum_over_ranks", lambda x, _number: torch.empty_like(x))
def _sum_over_ranks_op(x: Tensor, number: int) -> Tensor:
    """The sum of a tensor over the ranks of the `SequenceShards` of this number."""
    summed: Tensor = _registered[number].summed(x)
    return summed


def _is_alone(read: Sequence[Tensor | None], number: int, asked: str) -> bool:
    """Whether a larger batch is another computation, or keeps more: a detached merge keeps each branch's result."""
    if number != ON_ONE_DEVICE or any(x is not None for x in read):
        return True
    call = read_call(asked)
    return bool(call.cu_seqlens or call.key_bounds) or call.pattern.is_detached


# Query, key and value; dout, dlse, those, out and lse.
torch.library.register_vmap("dilabench::attention_forward", mapped(_forward_op, range(3), _is_alone), lib=LIBRARY)
torch.library.register_vmap("dilabench::attention_backward", mapped(_backward_op, range(7), _is_alone), lib=LIBRARY)


def _pairs(number: int, query: torch.Size, key: torch.Size, indices: torch.Size | None, asked: str) -> int:
    pairs: int = _registered[number]._pairs_for(query, key, read_call(asked), indices)
    return pairs


if FLOP_COUNTER in sys.modules:
    let_flops_be_counted(_pairs)


class _Differentiable(torch.autograd.Function):
    """The operator with its derivative, also for the transforms of torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        indices: Tensor | None,
        bounds: Tensor | None,
        key_bounds: Tensor | None,
        number: int,
        asked: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _forward_op(query, key, value, sink, indices, bounds, key_bounds, number, asked)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        query, key, value, sink, *read, ctx.number, ctx.asked = inputs
        ctx.save_for_backward(query, key, value, *output, *read, sink)
        if has_constant_lse(ctx.asked):
            ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any, dout: Tensor | None, dlse: Tensor | None, _dkept: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *saved, sink = ctx.saved_tensors
        if dout is None:
            if dlse is None and not is_over_ranks(ctx.asked):
                return (None,) * 9
            dout = torch.zeros_like(saved[3])

        def gradients(dout: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            of_lse = None if dlse is None else tensors[9]
            return _backward_op(dout, of_lse, *tensors[:9], ctx.number, ctx.asked)

        given, function = saved, gradients
        if dlse is not None:
            given, dout = [*given, dlse], as_batch_of(dlse, dout)
        if sink is not None:
            summed = partial(_sum_over_ranks_op, number=ctx.number) if is_over_ranks(ctx.asked) else None
            given, function = [*given, sink], partial(with_sink_gradient, gradients, summed, dlse is not None)
        found = first_derivatives(function, dout, *given)
        return *found, *(None for _ in range(9 - len(found)))


_ReverseOnly = reverse_only(_Differentiable)


@differentiable_operator("attention")
def _attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None,
    indices: Tensor | None,
    bounds: Tensor | None,
    key_bounds: Tensor | None,
    number: int,
    pattern: str,
    sizes: Sequence[int],
    fractions: Sequence[float],
    causal: bool,
    window: Sequence[int],
    scale: float | None,
    cu_seqlens: Sequence[int],
    max_seqlen: int,
    wants_gradient: bool,
    backend: str,
    algorithm: str,
    key_bounds_as_numbers: Sequence[int],
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if cu_seqlens and torch._C._len_torch_dispatch_stack() > 0:
        warn_of_packings(tuple(map(int, cu_seqlens)))
    of_pattern, of_mask = (pattern, sizes, fractions), (causal, window, scale)
    others: Any = cu_seqlens, max_seqlen, wants_gradient, backend, algorithm, key_bounds_as_numbers, softcap
    asked = written(*of_pattern, *of_mask, *others) if pattern else ""
    # A trace must see all results whose size it does not know.
    out, lse, kept = _Differentiable.apply(query, key, value, sink, indices, bounds, key_bounds, number, asked)
    return out, lse, kept
