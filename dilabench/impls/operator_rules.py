"""How operators of torch are made, and what autograd and torch's tools ask of one of attention: batches of gradients,
samples of vmap, FLOPs.

Second and forward-mode derivatives are refused.
"""

# The annotations of operators are evaluated by torch: no postponed evaluation in this module.

import itertools
import logging
import math
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dilabench.workload.work import flops_per_pair

ResultT = TypeVar("ResultT")

logger = logging.getLogger(__name__)

LIBRARY = torch.library.Library("dilabench", "FRAGMENT")

# It loads Triton, so it is imported only for counting.
FLOP_COUNTER = "torch.utils.flop_counter"


def operator(name: str, shapes: Callable[..., Any]) -> Callable[[Callable[..., ResultT]], Callable[..., ResultT]]:
    """Make a function that writes to none of its arguments, and whose results share memory with nothing, the operator
    of this name; ``shapes`` gives empty results.

    As `torch.library.custom_op`, which looks at every call whether results are arguments: a third of a compiled call
    (17 of 49 microseconds on one host).
    """

    def define(function: Callable[..., ResultT]) -> Callable[..., ResultT]:
        defined = _defined(name, function, _untraced(function), "CompositeExplicitAutograd")
        torch.library.register_fake(f"dilabench::{name}", shapes, lib=LIBRARY)
        return defined

    return define


def differentiable_operator(name: str) -> Callable[[Callable[..., ResultT]], Callable[..., ResultT]]:
    """Make a function of operators and autograd functions the operator of this name: one node in the compiler's first
    graph, which the final graph replaces by the function's own calls.

    A derivative that is registered with an operator stays in that graph, and runs in Python at every call.
    """
    return lambda function: _defined(name, function, function, "CompositeImplicitAutograd")


def _defined(
    name: str, function: Callable[..., ResultT], kernel: Callable[..., ResultT], key: str
) -> Callable[..., ResultT]:
    schema = torch.library.infer_schema(function, mutates_args=())
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, kernel, key)
    defined: Callable[..., ResultT] = getattr(torch.ops.dilabench, name).default
    return defined


def _untraced(function: Callable[..., ResultT]) -> Callable[..., ResultT]:
    """The function, which no compiler traces: after a break of the graph it would inspect what is called there."""

    def run(*arguments: Any) -> ResultT:
        # As a decorator it would load the compiler when a module is imported.
        return (compilers_own() if "torch._dynamo" in sys.modules else function)(*arguments)

    @cache
    def compilers_own() -> Callable[..., ResultT]:
        found: Callable[..., ResultT] = torch.compiler.disable(function)
        return found

    return run


def first_derivatives(gradients: Callable[..., tuple[Tensor, ...]], dout: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """The gradients for these tensors, which refuse to be differentiated: autograd would leave terms out in silence.

    `given` may hold dlse; if dlse is a batch, dout is a batch too (`as_batch_of`).
    A batch of gradients (`torch.autograd.grad(..., is_grads_batched=True)`) is computed one after another.
    """
    if not torch.compiler.is_compiling() and torch._C._functorch.is_legacy_batchedtensor(dout):
        if torch.is_grad_enabled():
            # Its results would carry no graph, not even one that raises an error.
            raise RuntimeError(_FIRST_ONLY)
        return _gradients_of_each(gradients, dout, *given)
    # Grad mode is off in a backward pass but for `create_graph` and torch.func.
    return _Gradients.apply(gradients, dout, *given) if torch.is_grad_enabled() else gradients(dout, *given)


_FIRST_ONLY = (
    "attention has first derivatives only; for second derivatives (create_graph=True, a gradient penalty) use an "
    "implementation in plain PyTorch"
)


class _GradientsOfOne:
    """The gradients for one dout, which an operator finds by its number."""

    def __init__(self, gradients: Callable[..., tuple[Tensor, ...]], given: list[Any], of_lse: int | None) -> None:
        self.gradients, self.given, self.of_lse = gradients, given, of_lse
        self.number = next(_numbers)
        _of_one[self.number] = self


_of_one: WeakValueDictionary[int, _GradientsOfOne] = WeakValueDictionary()
_numbers = itertools.count()


def _gradients_of_each(gradients: Callable[..., tuple[Tensor, ...]], dout: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """The gradients for a batched dout or dlse: torch calls the operator once for each of the batch."""
    of_lse = next((at for at, x in enumerate(given) if _is_batched(x)), None)
    gradients_of_one = _GradientsOfOne(gradients, [*given], of_lse)
    dlse = None if of_lse is None else given[of_lse]
    *found, of_sink = _gradients_op(dout, dlse, gradients_of_one.number)
    return (*found, of_sink) if of_sink.shape[-1] else tuple(found)


def _is_batched(x: Any) -> bool:
    return isinstance(x, Tensor) and torch._C._functorch.is_legacy_batchedtensor(x)


def as_batch_of(dlse: Tensor, dout: Tensor) -> Tensor:
    """dout [B, N, H, D], as a batch of gradients if dlse [B, H, N] is one."""
    if torch.compiler.is_compiling() or not torch._C._functorch.is_legacy_batchedtensor(dlse):
        return dout
    return dout + torch.zeros_like(dlse).transpose(1, 2).unsqueeze(-1).to(dout.dtype)


def _gradients_of_one(dout: Tensor, dlse: Tensor | None, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    entry = _of_one[number]
    if entry.of_lse is not None:
        entry.given[entry.of_lse] = dlse
    dq, dk, dv, *of_sink = entry.gradients(dout, *entry.given)
    return dq, dk, dv, of_sink[0] if of_sink else dout.new_empty(0)


_gradients_op = _defined("gradients_of_one", _gradients_of_one, _gradients_of_one, "CompositeExplicitAutograd")


def reverse_only(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """The function, with an error for forward mode that names the way out. torch.compile traces no such function."""

    class ReverseOnly(function):  # type: ignore[valid-type, misc]
        @staticmethod
        def jvp(_ctx: Any, *_: Any) -> None:
            raise RuntimeError(NO_FORWARD_MODE)

    return ReverseOnly


@reverse_only
class _Gradients(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(gradients: Callable[..., tuple[Tensor, ...]], *given: Any) -> tuple[Tensor, ...]:
        return gradients(*given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(_ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(_FIRST_ONLY)


def _transforms() -> int:
    return len(torch._C._functorch.get_interpreter_stack() or ())


# A compiler enters transforms as it traces them.
_transforms._dynamo_marked_constant = True  # type: ignore[attr-defined]


def traced_in_transform(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor | None], bool]:
    """Views of these while a compiler traces a transform of torch.func, and whether an autograd function in the graph
    gets their gradients.

    Dynamo knows only of new tensors that `torch.func.grad` wants their gradients. Else it takes an autograd function
    for its forward pass, as for parts of a batch, and it maps none: an operator is mapped there, or breaks the graph.
    """
    q, k, v = q.view_as(q), k.view_as(k), v.view_as(v)
    sink = None if sink is None else sink.view_as(sink)
    asks = q.requires_grad or k.requires_grad or v.requires_grad or (sink is not None and sink.requires_grad)
    return (q, k, v, sink), asks and _transforms() == 1


NO_FORWARD_MODE = (
    "attention has no forward-mode derivatives (torch.func.jvp, jacfwd, hessian): use reverse mode, torch.func.vjp or "
    "jacrev"
)


def refuse_forward_mode(*tensors: Tensor) -> None:
    """Raise RuntimeError where one of them has a tangent, which an operator would drop in silence."""
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(NO_FORWARD_MODE)


Rule = Callable[..., tuple[Any, Any]]


def one_after_another(op: Callable[..., Any]) -> Rule:
    """The rule by which `torch.func.vmap` calls an operator once for each sample."""

    def rule(info: Any, in_dims: tuple[Any, ...], *given: Any) -> tuple[Any, Any]:
        arguments = [*zip(given, in_dims, strict=True)]
        samples = [op(*(_sample(x, dim, at) for x, dim in arguments)) for at in range(info.batch_size)]
        if isinstance(samples[0], Tensor):
            return torch.stack(samples), 0
        results = tuple(map(torch.stack, zip(*samples, strict=True)))
        return results, (0,) * len(results)

    return rule


def mapped(
    op: Callable[..., tuple[Tensor, ...]],
    batched: Sequence[int],
    is_alone: Callable[[Sequence[Tensor | None], int, str], bool],
) -> Rule:
    """The rule by which `torch.func.vmap` maps an operator.

    Samples become rows of one larger batch on two conditions: only the arguments `batched`, which begin with a batch
    axis, differ between them, and the last five (indices, bounds, key bounds, number and options) allow it. Otherwise
    they are computed one after another.
    """

    alone = one_after_another(op)

    def rule(info: Any, in_dims: tuple[int | None, ...], *given: Any) -> tuple[Any, Any]:
        *tensors, number, asked = given
        size = info.batch_size
        of_tensors = [*zip(tensors, in_dims[: len(tensors)], strict=True)]
        differ = {at for at, (x, dim) in enumerate(of_tensors) if dim is not None and x.numel()}
        if differ <= {*batched} and not is_alone(tensors[-3:], number, asked):
            joined = [
                _joined(x, dim, size) if at in batched and x is not None else _sample(x, dim, 0)
                for at, (x, dim) in enumerate(of_tensors)
            ]
            # The tensors kept for the backward pass, [0], have no batch axis.
            results = tuple(
                x.unflatten(0, (size, x.shape[0] // size)) if x.ndim > 1 else x.expand(size, 0)
                for x in op(*joined, number, asked)
            )
            return results, (0,) * len(results)
        return alone(info, in_dims, *given)

    return rule


def _joined(x: Tensor, dim: int | None, size: int) -> Tensor:
    """The samples [B, ...] of an axis as one batch."""
    return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)


def _sample(x: Any, dim: int | None, at: int) -> Any:
    # An argument that is a list has an entry for each number.
    return x.select(dim, at) if isinstance(dim, int) else x


@cache
def _register_flop_formulas(pairs: Callable[..., int]) -> tuple[Any, ...]:
    """Give `torch.utils.flop_counter` the work of the operators, by the pairs of their patterns; the operators."""
    from torch.utils.flop_counter import register_flop_formula

    def counted(q: Any, k: Any, indices: Any, *others: Any) -> int:
        *_bounds, number, asked = others
        of_indices = None if indices is None else torch.Size(indices)
        return pairs(number, torch.Size(q), torch.Size(k), of_indices, asked)

    def of_forward(q: Any, k: Any, v: Any, _sink: Any, indices: Any, *others: Any, **_: Any) -> int:
        return int(flops_per_pair("forward", q[-1], v[-1])) * counted(q, k, indices, *others)

    def of_backward(_dout: Any, _dlse: Any, q: Any, k: Any, v: Any, *others: Any, **_: Any) -> int:
        _out, _lse, _kept, *read, number, asked = others
        return int(flops_per_pair("backward", q[-1], v[-1])) * counted(q, k, *read, number, asked)

    forward, backward = torch.ops.dilabench.attention_forward, torch.ops.dilabench.attention_backward
    register_flop_formula(forward)(of_forward)
    register_flop_formula(backward)(of_backward)
    return forward, backward


def let_flops_be_counted(pairs: Callable[..., int]) -> None:
    """Register the formulas, also with a `FlopCounterMode` that is on: it has copied those that there were before."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    from torch.utils.flop_counter import flop_registry

    operators = _register_flop_formulas(pairs)
    for mode in _get_current_dispatch_mode_stack():
        counted = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if isinstance(counted, dict):
            counted.update({op: flop_registry[op] for op in operators if op not in counted})


def outside_compilers(function: Callable[..., ResultT], *arguments: Any) -> ResultT:
    """Call it as it is, with a break of the graph where a compiler traces the call."""
    if not torch.compiler.is_compiling():
        return function(*arguments)
    # As a decorator it would load the compiler when a module is imported.
    apart: Callable[..., ResultT] = torch.compiler.disable(function)
    return apart(*arguments)


def materialised(x: Tensor) -> Tensor:
    """x, or a copy where its memory does not hold its values (a negative view, a zero tensor); differentiable."""
    x = x.resolve_neg()
    return x.clone() if x._is_zerotensor() else x


def forward_before_backward(computation: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """`Computation.forward` before `Computation.backward`: prepared together, if it has such a form."""
    return getattr(computation, "forward_before_backward", computation.forward)(q, k, v)


def empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for out and lse of q [B, N, H, D], in the width of v."""
    *lead, rows, heads, _ = q.shape
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*lead, rows, heads, v.shape[-1])), q.new_empty((*lead, heads, rows), dtype=dtype)


def contiguous_like(x: Tensor) -> Tensor:
    """Empty, in the shape and type of x."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def last_dim_contiguous(x: Tensor) -> Tensor:
    """x itself, or a copy where its last dim has gaps: views of its rows are given to kernels that read no others."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


# Each tensor begins at a multiple of this many bytes, for any type.
_ALIGNED = 16


def as_bytes(computation: Any, kept: Sequence[Tensor]) -> Tensor:
    """Tensors in one, whose shapes and types the computation remembers: they are the same in each of its calls."""
    computation.kept = tuple((x.shape, x.dtype) for x in kept)
    parts = [x.contiguous().flatten().view(torch.uint8) for x in kept]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([torch.nn.functional.pad(part, (0, -len(part) % _ALIGNED)) for part in parts])


def from_bytes(computation: Any, kept: Tensor) -> tuple[Tensor, ...]:
    """The tensors of `as_bytes`, as views.

    Raises RuntimeError if the computation is another one than before: it was dropped in between.
    """
    if kept.numel() and not computation.kept:
        raise RuntimeError(
            "more different calls were made between this forward pass and its backward pass than are kept; make fewer, "
            "or separate SequenceShards for some of them"
        )
    found, first = [], 0
    for shape, dtype in computation.kept:
        size = math.prod(shape) * dtype.itemsize
        found.append(kept[first : first + size].view(dtype).view(shape))
        first += size + -size % _ALIGNED
    return tuple(found)


_packings: set[tuple[int, ...]] = set()


def warn_of_packings(cu_seqlens: tuple[int, ...]) -> None:
    """Log a warning when the number of compiled lists of bounds reaches torch's limit of graphs per function."""
    limit = torch._dynamo.config.recompile_limit
    if len(_packings) < limit and cu_seqlens not in _packings:
        _packings.add(cu_seqlens)
        if len(_packings) == limit:
            logger.warning(
                "%d lists cu_seqlens are compiled, each as a separate graph, and torch limits the number of graphs per "
                "function: for another list it raises FailOnRecompileLimitHit with fullgraph=True, and else runs the "
                "function uncompiled. Give cu_seqlens as a tensor, which one graph takes any bounds in, or raise "
                "torch._dynamo.config.recompile_limit",
                limit,
            )


def shapes_of_gradients(
    _dout: Tensor, _dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_others: Any
) -> tuple[Tensor, ...]:
    """dq, dk and dv as traces know them, for `attention_backward`."""
    return contiguous_like(q), contiguous_like(k), contiguous_like(v)
