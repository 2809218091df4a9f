"""Attention of every pattern, by one function.

    from dilabench.attention import attention
    from dilabench.patterns import WindowSinkPattern

    out = attention(q, k, v, pattern=WindowSinkPattern(sinks=4, window_size=1024), causal=True)

Patterns are the objects that the benchmark's workloads use (`dilabench.patterns`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, cast, overload

import torch
from torch import Tensor

from dilabench.attention import operands
from dilabench.attention.dilated import IN_PATTERN, dilated_attention
from dilabench.attention.selected import SELECTED_BY_INDICES, of_tokens, selected_attention
from dilabench.choice.computation import backend_of, implementation_of
from dilabench.choice.descriptors import load_target
from dilabench.choice.ways import AUTO, Way
from dilabench.contracts import Attend, AttendBackward, BuildContext, LoadedBackend
from dilabench.errors import ConfigError
from dilabench.impls.no_pairs import NOTHING_SEEN, SHAPES_ONLY, FirstRows
from dilabench.impls.null_mass import sink_gradient
from dilabench.impls.one_operator import (
    Computation,
    Kept,
    as_one_operator,
    eager,
    forward_before_backward,
    materialised,
    outside_compilers,
)
from dilabench.impls.one_operator import Options as OperatorOptions
from dilabench.impls.operator_rules import first_derivatives, refuse_forward_mode
from dilabench.kernels.lse import add_null_mass_
from dilabench.patterns.dense import DENSE
from dilabench.patterns.dilated import DilatedPattern
from dilabench.patterns.pattern import Pattern
from dilabench.patterns.registry import pattern_type
from dilabench.workload.spec import UNBOUNDED, Window, Workload, attended_pairs

__all__ = ["attention", "block_sparse_attention"]

# Dense attention's fields of a dilated pattern.
NO_BRANCHES: dict[str, Any] = {"segment_lengths": (), "dilation_rates": ()}


class CallOptions(TypedDict, total=False):
    """Keyword options of `attention` besides its pattern, described there."""

    causal: bool
    window: Window
    scale: float | None
    sink: Tensor | None
    indices: Tensor | None


class AttentionOptions(CallOptions, total=False):
    """Keyword options of `attention`, described there."""

    pattern: Pattern | None
    cu_seqlens: Sequence[int] | Tensor | None
    max_seqlen: int | None
    backend: str | Attend


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[True], **options: Unpack[AttentionOptions]
) -> tuple[Tensor, Tensor]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pattern: Pattern | None = None,
    causal: bool = False,
    window: Window = UNBOUNDED,
    scale: float | None = None,
    sink: Tensor | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    max_seqlen: int | None = None,
    indices: Tensor | None = None,
    return_lse: bool = False,
    backend: str | Attend = AUTO,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of any pattern: out [B, N, H, D] of query [B, N, H, D] and key, value [B, N, K, D].

    K divides H: each key/value head serves H/K query heads. Gradients of query, key, value and sink are exact.
    pattern: which query attends to which key; None is every one (dense). The objects of `dilabench.patterns`:
        DilatedPattern (LongNet), BlockSparsePattern, SelectedBlocksPattern (NSA, MoBA, DSA, MSA: per token),
        TopKBlocksPattern (VSA), WindowSinkPattern (StreamingLLM), ColumnBoundsPattern (FlashMask).
    causal: a query attends only to keys up to its own position.
    window: (left, right) in positions, -1 unbounded: (1023, 0) is a causal window of 1024 keys.
    scale: factor of the scores; 1/sqrt(D) by default.
    sink: [H], per head the logit of one more key whose value is 0 (gpt-oss); gets a gradient. inf: out and gradients 0.
    cu_seqlens: bounds of packed sequences, from 0; query and out are [T, H, D], key and value [T, K, D]. The pattern
        restarts in each; equal bounds are empty, rows beyond the last get 0.
    max_seqlen: of the longest sequence, or more: calls of dense and dilated patterns then wait for no bounds on a GPU.
        Less is refused if bounds are numbers or on a CPU, outside torch.compile; bounds on a GPU are not read for it.
    indices: integers that replace the pattern's selector and top_k. SelectedBlocksPattern: [B, N, K, S], [N, K, S] or
        packed [T, K, S], the S key blocks of each query token and key/value head, required if its selector reads
        queries. TopKBlocksPattern: [n, k] or [K, n, k], the k key blocks of each of n query blocks. With cu_seqlens
        blocks count from 0 in each sequence, and n is the sum over sequences. A repeated index counts once, -1 means no
        block; other numbers without a block are refused on a CPU and ignored on a GPU.
    return_lse: also return lse [B, H, N] (packed: [H, T]), the natural logarithm of each query's sum of exponentials,
        without a gradient. A query that attends to no key has out 0 and lse -inf.
    backend: for dense and dilated patterns a name of `dilabench list backends`, or a function
        `(q, k, v, *, causal, window, scale) -> (out, lse)` of dense attention; 'auto' is the fastest way known.

    Dense and dilated patterns, and SelectedBlocksPattern with indices, work under torch.compile without a graph break;
    others break the graph at the call. NaN or inf in the value of a hidden key may make rows NaN that do not see it, as
    in torch's attention (docs/explanation/semantics.md). Under autocast query, key and value are cast first. NSA's sum
    of three is `native_sparse_attention`: NativeSparsePattern has drawn gates and is refused. Raises ValueError for
    shapes, patterns or options that do not fit together.

    >>> import torch
    >>> from dilabench.attention import attention
    >>> from dilabench.patterns import DilatedPattern
    >>> q, k, v = (torch.randn(1, 64, 4, 16) for _ in range(3))
    >>> out, lse = attention(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([1, 64, 4, 16]), torch.Size([1, 4, 64]))
    >>> pattern = DilatedPattern(segment_lengths=(16, 64), dilation_rates=(1, 4))
    >>> attention(q, k, v, pattern=pattern).shape
    torch.Size([1, 64, 4, 16])
    """
    operands.check_pattern(pattern)
    dilated = None if pattern is None else DilatedPattern.match(pattern)
    if pattern is None or pattern == DENSE or dilated is not None:
        if indices is not None:
            raise ValueError(f"indices are blocks of {SELECTED_BY_INDICES}; give that pattern")
        fields = NO_BRANCHES if dilated is None else {name: getattr(dilated, name) for name in IN_PATTERN}
        out, lse = dilated_attention(
            query,
            key,
            value,
            causal=causal,
            window=window,
            scale=scale,
            sink=sink,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            backend=backend,
            return_lse=True,
            **fields,
        )
        return (out, lse.detach()) if return_lse else out
    if max_seqlen is not None:
        operands.rounded_up(max_seqlen, cu_seqlens)
    selected = of_tokens(pattern, indices, query, key, cu_seqlens)
    if selected is not None:
        given: Any = {"causal": causal, "window": window, "scale": scale, "sink": sink, "cu_seqlens": cu_seqlens}
        out, lse = selected_attention(query, key, value, *selected, backend=backend, **given)
    else:
        if sink is not None:
            operands.check_is_tensor(sink)
        if backend != AUTO:
            raise ValueError(f"backend {backend!r} with pattern {pattern.kind}, whose kernels call none; leave it out")
        operands.check_are_tensors(query=query, key=key, value=value)
        bounds: tuple[int, ...] = ()
        if cu_seqlens is not None:
            bounds = operands.bounds(cu_seqlens, operands.check_tokens(query, key, value))
            query, key, value = query[None], key[None], value[None]
        refuse_forward_mode(query, key, value)
        if torch._C._is_any_autocast_enabled():
            query, key, value = operands.as_autocast(query, key, value)
        inputs = (query, key, value) if sink is None else (query, key, value, sink)
        wants_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        sides = operands.integers("window", window)
        operands.refuse_types({"causal": causal, "window": sides, "scale": scale})
        options = _Options(causal, sides, scale, bounds, wants_gradient)  # type: ignore[arg-type]
        out, lse = outside_compilers(_attend, pattern, options, query, key, value, sink, indices)
        if cu_seqlens is not None:
            out, lse = out.squeeze(0), lse.squeeze(0)
    return (out, lse.detach()) if return_lse else out


@overload
def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: str = "local_window",
    block_size: int = 128,
    density: float = 0.1,
    seed: int = 0,
    return_lse: Literal[False] = False,
    **options: Unpack[CallOptions],
) -> Tensor: ...
@overload
def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: str = "local_window",
    block_size: int = 128,
    density: float = 0.1,
    seed: int = 0,
    return_lse: Literal[True],
    **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...
def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: str = "local_window",
    block_size: int = 128,
    density: float = 0.1,
    seed: int = 0,
    return_lse: bool = False,
    **options: Unpack[CallOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over blocks: `attention` with a BlockSparsePattern, or with the blocks that `indices` name.

    With `indices` [n, k] or [K, n, k], each block of `block_size` queries attends to its k blocks of keys, and `mask`,
    `density` and `seed` are not used. Without, `mask` names one that is drawn: local_window, global_local,
    dilated_sparse, strided, hierarchical or random, with a share of `density` of the visible blocks. On a GPU
    `block_size` is a multiple of 16. The other options are as for `attention`. Raises ValueError.

    >>> import torch
    >>> from dilabench.attention import block_sparse_attention
    >>> q, k, v = (torch.randn(1, 64, 4, 16) for _ in range(3))
    >>> own_and_first = torch.stack([torch.arange(4), torch.zeros(4, dtype=torch.long)], dim=-1)  # [n, k] = [4, 2]
    >>> block_sparse_attention(q, k, v, indices=own_and_first, block_size=16, causal=True).shape
    torch.Size([1, 64, 4, 16])
    """
    # The pattern is made once for all calls with equal numbers.
    operands.refuse_types({"mask": mask, "block_size": block_size, "density": density, "seed": seed})
    given = options.get("indices") is not None
    masked = {"mask": mask, "block_size": block_size, "density": density, "mask_seed": seed}
    pattern = _selection_of(block_size) if given else _made("block_sparse", **masked)
    result: Tensor | tuple[Tensor, Tensor] = attention(  # type: ignore[call-overload]
        query, key, value, pattern=pattern, return_lse=return_lse, **options
    )
    return result


@lru_cache(maxsize=64)
def _made(kind: str, **fields: Any) -> Pattern:
    try:
        return pattern_type(kind).from_request(fields)
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _selection_of(block_size: int) -> Pattern:
    """A pattern for blocks that a caller gives."""
    return _made("topk_blocks", block_size=block_size, selector="random", top_k=1)


class _Options(NamedTuple):
    """As `operands.Options`."""

    causal: bool
    window: Window
    scale: float | None
    cu_seqlens: tuple[int, ...]
    wants_gradient: bool


def _attend(
    pattern: Pattern,
    options: _Options,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None,
    indices: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """out and lse of a pattern that is neither dense nor dilated."""
    if torch._C._is_tracing():
        raise ValueError(
            f"pattern {pattern.kind} under torch.jit.trace, which would record none of its kernels; trace dense or "
            "dilated attention, or use torch.compile"
        )
    query, key, value = materialised(query), materialised(key), materialised(value)
    tensors = tuple((x.shape, x.dtype, x.device) for x in (query, key, value))
    function: Computation
    if indices is not None:
        function = _selected(pattern, tensors, options, indices)
    else:
        function = (_of_packing if options.cu_seqlens else _function)(pattern, tensors, options)
    if sink is not None:
        operands.check_sink(sink, query, "detached" if pattern.is_detached else "exact")
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() > 0:
        # An operator is what torch's modes and function transforms see.
        number = Kept.of(_OfPattern(function, operands.workload_of(pattern, tensors, options)))
        operator_options = OperatorOptions(wants_gradient=options.wants_gradient)
        return as_one_operator(number, query, key, value, operator_options, sink)
    if sink is None:
        return eager(function, query, key, value)
    out, lse = _WithSink.apply(function, query, key, value, materialised(sink))
    return out, lse


@lru_cache(maxsize=64)
def _function(pattern: Pattern, tensors: tuple[operands.Kind, ...], options: _Options) -> Computation:
    """The function for tensors of these shapes, made once."""
    (shape, _, device), *_ = tensors
    try:
        workload = operands.workload_of(pattern, tensors, options)
        if device.type == "meta" or workload is None:
            return SHAPES_ONLY if device.type == "meta" or 0 in shape else NOTHING_SEEN
        if workload.seq_len < shape[1]:
            # The rows of the sequences are computed, and zeros follow them.
            inside = tuple((torch.Size((1, workload.seq_len, *shape[2:])), *kind) for shape, *kind in tensors)
            within = options._replace(cu_seqlens=workload.cu_seqlens or ())
            return FirstRows(workload.seq_len, _of_packing(pattern, inside, within))
        implementation = implementation_of(workload, device)
        way = Way(implementation.name, None, workload)
        backend = backend_of(AUTO, way, device) if implementation.uses_backend else None
        build = load_target(implementation.target)
        computation: Computation = build(workload, BuildContext(device=device, backend=backend))
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return computation


# For packed sequences, whose lists grow with the tokens: only the latest few stay.
_of_packing = lru_cache(maxsize=8)(_function.__wrapped__)


def _selected(pattern: Pattern, tensors: tuple[operands.Kind, ...], options: _Options, indices: Tensor) -> Computation:
    """The function over the key blocks that `indices` name."""
    from dilabench.kernels.block_sparse.selected import SelectedPlan

    assert pattern.selects is not None, "`attention` takes indices only of patterns that select"
    (_, length, _, _), size, heads = tensors[0][0], pattern.selects.block_size, tensors[1][0][2]
    operands.check_indices(indices, heads, -(-length // size), size, tensors[0][2])
    if indices.is_meta or 0 in tensors[0][0]:
        # Built like a pattern with drawn indices, which refuses shapes that do not fit.
        return _function(_selection_of(size), tensors, options)
    # In the form that dilabench's selectors return.
    operands.check_blocks(indices, -(-length // size))
    by_head = (materialised(indices) if indices.ndim == 3 else indices[None]).to(torch.int32).contiguous()
    plan = SelectedPlan(by_head, size, length, options.causal, options.window)
    union, rows = _over_blocks(_selection_of(size), tensors, options)
    planned = replace(rows, plan=plan)
    return replace(union, rows=lambda _device: (planned,))


@lru_cache(maxsize=64)
def _over_blocks(pattern: Pattern, tensors: tuple[operands.Kind, ...], options: _Options) -> tuple[Any, Any]:
    """The `BlockUnion` and its `PlannedRows` for tensors of these shapes, which lack only their plan."""
    from dilabench.impls.block_sparse.block_sparse import kernels_for
    from dilabench.impls.block_sparse.union import BlockUnion, planned_over_everything

    device = tensors[0][2]
    try:
        workload = operands.workload_of(pattern, tensors, options)
        assert workload is not None, "tensors without elements have no blocks"
        implementation_of(workload, device)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    name, forward, backward = kernels_for(device)
    union = BlockUnion(
        backend=LoadedBackend(name, cast(Attend, forward), cast(AttendBackward, backward)),
        rows=lambda _device: (),
        covered=True,
        causal=options.causal,
        window=options.window,
        scale=workload.softmax_scale,
    )
    (rows,) = planned_over_everything(workload, cast(Any, None))
    return union, rows


@dataclass(frozen=True)
class _OfPattern:
    """The computation of a pattern and its work, looked up by the operators."""

    computation: Computation
    workload: Workload | None

    def _computation_for(self, _query: Tensor, _key: Tensor, _value: Tensor, _options: OperatorOptions) -> Computation:
        return self.computation

    def _pairs_for(self, _query: torch.Size, _key: torch.Size, _options: OperatorOptions) -> int:
        return attended_pairs(self.workload) if self.workload else 0


class _WithSink(torch.autograd.Function):
    """out and lse of a computation with a sink [H] in addition to its keys."""

    @staticmethod
    def forward(
        ctx: Any, computation: Computation, query: Tensor, key: Tensor, value: Tensor, sink: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, lse = forward_before_backward(computation, query, key, value)[:2]
        add_null_mass_(out, lse, sink[:, None].to(lse.dtype))
        ctx.computation = computation
        ctx.save_for_backward(query, key, value, out, lse, sink)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
        def gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
            dout, *_, out, lse, sink = tensors
            return *ctx.computation.backward(*tensors[:6]), sink_gradient(dout, out, lse, sink)

        return None, *first_derivatives(gradients, materialised(dout), *ctx.saved_tensors)
