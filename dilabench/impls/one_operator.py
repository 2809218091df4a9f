"""A computation under torch.compile: forward and backward as one operator each, one node of a graph without breaks.

Tracing into it would break the graph at every call of a kernel, or be wrong: whether a kernel can read a tensor hangs
on its address, which a trace does not have; pattern cache and buffer pool sit behind locks; and torch refuses to
functionalize writes through the strided views that results are merged into. So the compiler sees none of the inside.
"""

# The annotations of operators are evaluated by torch: no postponed evaluation in this module.

import itertools
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol, TypeVar, runtime_checkable
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import forward_ad

ResultT = TypeVar("ResultT")

_LIBRARY = torch.library.Library("dilabench", "FRAGMENT")


def operator(name: str, shapes: Callable[..., Any]) -> Callable[[Callable[..., ResultT]], Callable[..., ResultT]]:
    """Make a function that writes to none of its arguments, and whose results share memory with nothing, the operator
    of this name; ``shapes`` gives empty results.

    As `torch.library.custom_op`, which looks at every call whether results are arguments: a third of a compiled call
    (17 of 49 microseconds on one host).
    """

    def define(function: Callable[..., ResultT]) -> Callable[..., ResultT]:
        defined = _defined(name, function, _untraced(function), "CompositeExplicitAutograd")
        torch.library.register_fake(f"dilabench::{name}", shapes, lib=_LIBRARY)
        return defined

    return define


def differentiable_operator(name: str) -> Callable[[Callable[..., ResultT]], Callable[..., ResultT]]:
    """Make a function of operators and autograd functions the operator of this name: one node where a compiler looks
    first, and nothing in the graph that runs, which has what the function calls instead.

    A derivative that is registered with an operator stays in that graph, and is asked, in Python, at every call.
    """
    return lambda function: _defined(name, function, function, "CompositeImplicitAutograd")


def _defined(
    name: str, function: Callable[..., ResultT], kernel: Callable[..., ResultT], key: str
) -> Callable[..., ResultT]:
    schema = torch.library.infer_schema(function, mutates_args=())
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, key)
    defined: Callable[..., ResultT] = getattr(torch.ops.dilabench, name).default
    return defined


def _untraced(function: Callable[..., ResultT]) -> Callable[..., ResultT]:
    """The function, which no compiler traces where one looks at what is called by what it broke a graph at."""

    def run(*arguments: Any) -> ResultT:
        # As a decorator it would load the compiler when a module is imported.
        return (compilers_own() if "torch._dynamo" in sys.modules else function)(*arguments)

    @cache
    def compilers_own() -> Callable[..., ResultT]:
        found: Callable[..., ResultT] = torch.compiler.disable(function)
        return found

    return run


@runtime_checkable
class Computation(Protocol):
    """Attention outside autograd; the backward pass needs no more than out and lse of the forward pass.

    `forward` gives out [B, N, H, D] and lse [B, H, N] first, `backward` dq, dk, dv. It may have
    `forward_before_backward`, too: `forward` that prepares for `backward`.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any: ...
    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]: ...


# An operator takes tensors and numbers, so that a computation goes by its number.
_computations: WeakValueDictionary[int, Computation] = WeakValueDictionary()
new_number = itertools.count().__next__


def register(number: int, computation: Computation) -> None:
    """Let operators find the computation by its number for as long as it exists elsewhere (weak reference)."""
    _computations[number] = computation


def differentiable(
    computation: Computation, number: int, q: Tensor, k: Tensor, v: Tensor, keeps_more: bool = False
) -> tuple[Tensor, Tensor]:
    """out [B, N, H, D] and lse [B, H, N], which carries no gradient, by a registered computation; for autograd.

    keeps_more: `forward` gives a list of tensors besides, which `backward` takes last. One operator does not hand these
    on, so that the compiler leaves such a computation alone.
    """
    if torch.compiler.is_compiling() and not keeps_more:
        return as_one_operator(number, q, k, v)
    return outside_compilers(eager, computation, q, k, v)


def outside_compilers(function: Callable[..., ResultT], *arguments: Any) -> ResultT:
    """Call it as it is, with a break of the graph where a compiler traces the call."""
    if not torch.compiler.is_compiling():
        return function(*arguments)
    # As a decorator it would load the compiler when a module is imported.
    apart: Callable[..., ResultT] = torch.compiler.disable(function)
    return apart(*arguments)


_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def nothing_looks_on(*tensors: Tensor) -> bool:
    """Whether a call is no more than a call: no compiler, mode or function transform that must see one operator.

    An operator takes torch a hundred microseconds to call, and hands on only results of known number and shape.
    """
    looked_at = (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )
    return not looked_at and _PLAIN.issuperset(map(type, tensors))


def eager(computation: Computation, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse as `differentiable` gives them, without a compiler."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return with_gradient(computation, q, k, v)
    out, lse, *_ = computation.forward(q, k, v)
    return out, lse


def forward_before_backward(computation: Computation, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """`Computation.forward`, which `Computation.backward` follows: together with that, where it has such a form."""
    together = getattr(computation, "forward_before_backward", None)
    # Memory that is traced is that of this pass.
    return together(q, k, v) if together and nothing_looks_on(q, k, v) else computation.forward(q, k, v)


def with_gradient(computation: Computation, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """As `eager` where one of them requires a gradient."""
    out, lse = _Function.apply(computation, q, k, v)
    return out, lse


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, computation: Computation, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, *more = forward_before_backward(computation, q, k, v)
        ctx.computation = computation
        ctx.save_for_backward(q, k, v, out, lse, *(kept for several in more for kept in several))
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, _dlse: None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return None, None, None, None
        q, k, v, out, lse, *kept = ctx.saved_tensors

        def gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
            found: tuple[Tensor, ...] = ctx.computation.backward(*tensors, *([kept] if kept else []))
            return found

        return None, *first_derivatives(gradients, dout, q, k, v, out, lse)


def first_derivatives(gradients: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """The gradients of these tensors, which refuse to be differentiated: autograd would leave terms out in silence."""
    # Grad mode is off in a backward pass but for `create_graph` and torch.func.
    return _Gradients.apply(gradients, *tensors) if torch.is_grad_enabled() else gradients(*tensors)


class _Gradients(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(gradients: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
        return gradients(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(_ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(
            "attention has first derivatives only; where gradients are differentiated in turn, as in a penalty on "
            "them, write attention in plain PyTorch"
        )


def refuse_forward_mode(*tensors: Tensor) -> None:
    """Raise RuntimeError where one of them has a tangent, which an operator would drop in silence."""
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(
            "attention has no forward-mode derivatives (torch.func.jvp, jacfwd, hessian): use reverse mode, "
            "torch.func.vjp or jacrev"
        )


def as_one_operator(number: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out [B, N, H, D] and lse [B, H, N], which carries no gradient, by the registered computation; differentiable."""
    out, lse = _attention_op(q, k, v, number)
    return out, lse.detach()


def _computation(number: int) -> Computation:
    computation = _computations.get(number)
    if computation is None:
        raise RuntimeError("the attention function is gone; keep it for as long as you call what was compiled from it")
    return computation


def shapes_of_results(q: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    """Empty out and lse for q [B, N, H, D]."""
    B, N, H, _ = q.shape
    return contiguous_like(q), q.new_empty(
        (B, H, N), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32
    )


@operator("attention_forward", shapes_of_results)
def _forward_op(q: Tensor, k: Tensor, v: Tensor, number: int) -> tuple[Tensor, Tensor]:
    out, lse = _computation(number).forward(q, k, v)[:2]
    return out.contiguous(), lse.contiguous()


def shapes_of_gradients(_dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Empty dq, dk and dv."""
    return contiguous_like(q), contiguous_like(k), contiguous_like(v)


@operator("attention_backward", shapes_of_gradients)
def _backward_op(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, number: int
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = _computation(number).backward(dout, q, k, v, out, lse)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


class _OfNumber(torch.autograd.Function):
    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, number: int) -> tuple[Tensor, Tensor]:
        return _forward_op(q, k, v, number)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, ctx.number = inputs
        ctx.save_for_backward(q, k, v, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
        def gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
            return _backward_op(*tensors, ctx.number)

        return *first_derivatives(gradients, dout, *ctx.saved_tensors), None


@differentiable_operator("attention")
def _attention_op(q: Tensor, k: Tensor, v: Tensor, number: int) -> tuple[Tensor, Tensor]:
    out, lse = _OfNumber.apply(q, k, v, number)
    return out, lse


def contiguous_like(x: Tensor) -> Tensor:
    """Empty, in the shape and type of x."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
