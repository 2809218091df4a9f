"""Attention over key blocks that are selected per query token, for `attention.function`: one operator under compilers.

Forward and backward are an operator each, which make their plan from the indices when they run; a plain call keeps it
between the two.
"""

# The annotations of operators are evaluated by torch: no postponed evaluation in this module.

import ast
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilabench.attention import operands
from dilabench.choice.ways import AUTO
from dilabench.impls.no_pairs import NOTHING_SEEN, SHAPES_ONLY
from dilabench.impls.null_mass import sink_gradient
from dilabench.impls.one_operator import Computation, WithGradient, is_plain_eager_call
from dilabench.impls.operator_rules import (
    LIBRARY,
    contiguous_like,
    differentiable_operator,
    empty_results,
    first_derivatives,
    one_after_another,
    operator,
    refuse_forward_mode,
)
from dilabench.impls.selected.compressed import CompressedAttention
from dilabench.impls.selected.selected_blocks import computation_for
from dilabench.impls.selected.selecting import Choosing, Compression, select_by_compression
from dilabench.impls.selected.selection import Selection
from dilabench.kernels.lse import add_null_mass_
from dilabench.patterns.pattern import Pattern
from dilabench.patterns.selected_blocks import check_block
from dilabench.workload.spec import Window, check_window

SELECTED_BY_INDICES = "pattern=SelectedBlocksPattern(block_size=...), per token, or TopKBlocksPattern, per query block"


class _Options(NamedTuple):
    """The options of a computation besides its tensors. `compression`: length and stride, if keys are compressed."""

    block: int
    causal: bool
    window: tuple[int, ...]
    scale: float
    cu_seqlens: tuple[int, ...] = ()
    compression: tuple[int, ...] = ()


def selected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    block_size: int,
    *,
    causal: bool,
    window: Window,
    scale: float | None,
    sink: Tensor | None,
    cu_seqlens: Sequence[int] | Tensor | None,
    backend: Any = AUTO,
) -> tuple[Tensor, Tensor]:
    """out and lse, which carries no gradient, of query [B, N, H, D] and key, value [B, N, K, D] (packed: [T, H, D]).

    indices: integers [B, N, K, S] or [N, K, S] (packed: [T, K, S], counted in each sequence from 0). Raises ValueError
    for what does not fit.
    """
    if backend != AUTO:
        raise ValueError(f"backend {backend!r} with blocks selected per token, whose kernels call none; leave it out")
    operands.check_are_tensors(query=query, key=key, value=value, indices=indices)
    packed = cu_seqlens is not None
    if packed:
        operands.check_tokens(query, key, value)
        query, key, value = query[None], key[None], value[None]
    refuse_forward_mode(query, key, value)
    if torch._C._is_any_autocast_enabled():
        query, key, value = operands.as_autocast(query, key, value)
    sides = operands.integers("window", window)
    operands.refuse_types({"causal": causal, "window": sides, "scale": scale})
    operands.check_scale(scale)
    operands.check_operands(query.shape, key.shape, value.shape)
    operands.check_kinds((x.dtype, x.device) for x in (query, key, value))
    by_item = _checked(indices, query, key)
    if sink is not None:
        operands.check_is_tensor(sink)
        operands.check_sink(sink, query, "exact")
    # A compiled graph takes a tensor of bounds unread, and so serves every packing.
    of_graph = cu_seqlens if isinstance(cu_seqlens, Tensor) and torch.compiler.is_compiling() else None
    bounds = () if cu_seqlens is None or of_graph is not None else operands.bounds(cu_seqlens, query.shape[1])
    check_block(block_size)
    check_window(sides, causal)
    if bounds:
        operands.without_empty(bounds, query.shape[1])
    factor = float(query.shape[-1] ** -0.5 if scale is None else scale)
    options = _Options(block_size, causal, sides, factor, bounds)
    out, lse = _attend(query, key, value, by_item, sink, of_graph, options)
    return (out.squeeze(0), lse.detach().squeeze(0)) if packed else (out, lse.detach())


def of_tokens(
    pattern: Pattern, indices: Tensor | None, query: Tensor, key: Tensor, cu_seqlens: Sequence[int] | Tensor | None
) -> tuple[Tensor, int] | None:
    """The indices of each token and the block size, also if packed queries select in blocks; None for other patterns,
    and if their own selection is computed. Raises ValueError for indices of a pattern that selects no blocks, and
    without indices as `operands.refuse_stand_ins`.
    """
    selected = pattern.selects
    if indices is None:
        operands.refuse_stand_ins(pattern)
    if selected is None:
        if indices is not None:
            raise ValueError(f"indices with pattern {pattern.kind}: they are blocks of {SELECTED_BY_INDICES}")
    elif selected.per_token:
        if indices is not None:
            return indices, selected.block_size
    elif indices is not None and cu_seqlens is not None:
        return _of_query_blocks(indices, selected.block_size, query, key, cu_seqlens), selected.block_size
    return None


def _of_query_blocks(
    indices: Tensor, block_size: int, query: Tensor, key: Tensor, cu_seqlens: Sequence[int] | Tensor
) -> Tensor:
    """[T, K, k] of packed query [T, H, D] and key [T, K, D], from [n, k] or [K, n, k] of each block of `block_size`
    queries: n blocks of all sequences, one after another. Under a compiler bounds in a tensor stay unread, and n is not
    checked.
    """
    check_block(block_size)
    operands.check_are_tensors(query=query, key=key, indices=indices)
    tokens, kv_heads = operands.check_tokens(query, key, key), key.shape[1]
    if isinstance(cu_seqlens, Tensor) and torch.compiler.is_compiling():
        bounds = cu_seqlens.to(device=query.device, dtype=torch.int64)
    else:
        numbers = operands.without_empty(operands.bounds(cu_seqlens, tokens), tokens)
        blocks = sum(-(-(stop - start) // block_size) for start, stop in pairwise(numbers))
        operands.check_indices(indices, kv_heads, blocks, block_size, query.device)
        bounds = torch.tensor(numbers, device=query.device)
    token = torch.arange(tokens, device=query.device)
    sequence = torch.searchsorted(bounds, token, right=True) - 1
    blocks_of = (bounds.diff(append=bounds[-1:]) + block_size - 1) // block_size
    block = (blocks_of.cumsum(0) - blocks_of)[sequence] + (token - bounds[sequence]) // block_size
    by_head = indices if indices.ndim == 3 else indices[None]
    # Tokens behind the last sequence see no key.
    block = block.clamp_max(by_head.shape[1] - 1)
    return by_head.transpose(0, 1)[block].expand(-1, kv_heads, -1)


def compressed_attention(
    query: Tensor, keys: Tensor, values: Tensor, compression: Compression, scale: float
) -> tuple[Tensor, Tensor]:
    """out and lse of query [B, N, H, D] over compressed keys and values [B, C, K, D], each seen from its last token on.

    Raises ValueError for another number of keys.
    """
    wanted = compression.count(query.shape[1])
    if keys.shape != values.shape or keys.shape[1] != wanted or keys.shape[::3] != query.shape[::3]:
        raise ValueError(
            f"compressed keys {tuple(keys.shape)} and values {tuple(values.shape)} must be [B, C, K, D] with C = "
            f"{wanted} for query {tuple(query.shape)}, {compression}"
        )
    options = _Options(1, True, (-1, -1), scale, compression=(compression.length, compression.stride))
    return _attend(query, keys, values, None, None, None, options)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor | None,
    sink: Tensor | None,
    bounds: Tensor | None,
    options: _Options,
) -> tuple[Tensor, Tensor]:
    """out and lse: of eager tensors directly, of others by operators."""
    if sink is None and is_plain_eager_call(query, key, value, *(() if indices is None else (indices,))):
        _check_blocks(indices, query, options)
        computation = _computation(query, key, indices, options)
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            out, lse = WithGradient.apply(computation, query, key, value)
        else:
            out, lse, *_ = computation.forward(query, key, value)
    elif torch._C._are_functorch_transforms_active():
        out, lse = _Differentiable.apply(query, key, value, indices, sink, bounds, _written(*options))
    else:
        out, lse = _selected_op(query, key, value, indices, sink, bounds, *options)
    return out, lse


def _checked(indices: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The indices with an axis for batch items."""
    batch, rows, kv_heads = query.shape[0], query.shape[1], key.shape[2]
    by_item = indices[None] if indices.ndim == 3 else indices
    wanted = f"integers [{rows}, {kv_heads}, S] or [{batch}, {rows}, {kv_heads}, S]: S key blocks for each of {rows} "
    if indices.is_floating_point() or indices.dtype == torch.bool or by_item.ndim != 4:
        raise ValueError(f"indices {indices.dtype} {tuple(indices.shape)} must be {wanted}tokens and {kv_heads} heads")
    fits = by_item.shape[0] in (1, batch) and tuple(by_item.shape[1:3]) == (rows, kv_heads)
    if not fits or (rows and not by_item.shape[3]):
        raise ValueError(f"indices {tuple(indices.shape)} must be {wanted}tokens and {kv_heads} heads of keys")
    if query.shape[2] % kv_heads:
        raise ValueError(f"query has {query.shape[2]} heads, not a multiple of the {kv_heads} of key and value")
    if indices.device != query.device:
        raise ValueError(f"indices are on {indices.device} and query on {query.device}; move one of them")
    return by_item


def _check_blocks(indices: Tensor | None, query: Tensor, options: _Options) -> None:
    """Refuse blocks that a sequence does not have, on a CPU."""
    if indices is None or indices.device.type != "cpu" or not query.numel():
        return
    # Rows of no sequence see nothing.
    blocks = torch.full((query.shape[1], 1, 1), -(-query.shape[1] // options.block))
    for first, last in pairwise(options.cu_seqlens):
        blocks[first:last] = -(-(last - first) // options.block)
    operands.check_blocks(indices, blocks)


def _computation(query: Tensor, key: Tensor, indices: Tensor | None, options: _Options) -> Computation:
    if query.is_meta or not query.numel():
        return SHAPES_ONLY
    if indices is None:
        return CompressedAttention(Compression(*options.compression), options.scale) if key.numel() else NOTHING_SEEN
    left, right = options.window
    selection = Selection(indices, options.block, options.causal, (left, right))
    return computation_for(query, selection, options.scale, options.cu_seqlens)


def _written(
    block: int,
    causal: bool,
    window: Sequence[int],
    scale: float,
    cu_seqlens: Sequence[int],
    compression: Sequence[int],
) -> str:
    """As a text that means the same in every process, for the compiler keeps what it compiles on disk."""
    sides, bounds, spans = (tuple(map(int, numbers)) for numbers in (window, cu_seqlens, compression))
    return repr((int(block), causal, sides, scale, bounds, spans))


@lru_cache(maxsize=256)
def _read(asked: str) -> _Options:
    return _Options._make(ast.literal_eval(asked))


def _asked(asked: str, bounds: Tensor | None) -> _Options:
    options = _read(asked)
    return options if bounds is None else options._replace(cu_seqlens=operands.bounds(bounds, int(bounds[-1])))


def _shapes_of_results(q: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    return empty_results(q)


@operator("selected_forward", _shapes_of_results)
def _forward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor | None,
    sink: Tensor | None,
    bounds: Tensor | None,
    asked: str,
) -> tuple[Tensor, Tensor]:
    """out and lse."""
    options = _asked(asked, bounds)
    _check_blocks(indices, query, options)
    out, lse, *_ = _computation(query, key, indices, options).forward(query, key, value)
    if sink is not None:
        add_null_mass_(out, lse, sink[:, None].to(lse.dtype))
    return out.contiguous(), lse.contiguous()


def _shapes_of_gradients(_dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_others: Any) -> tuple[Tensor, ...]:
    return contiguous_like(q), contiguous_like(k), contiguous_like(v)


@operator("selected_backward", _shapes_of_gradients)
def _backward_op(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    indices: Tensor | None,
    bounds: Tensor | None,
    asked: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from the results of the forward operator."""
    computation = _computation(query, key, indices, _asked(asked, bounds))
    dq, dk, dv = computation.backward(dout, query, key, value, out, lse)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


# A larger batch could share a call, but for indices that its items share, and for packed sequences.
torch.library.register_vmap("dilabench::selected_forward", one_after_another(_forward_op), lib=LIBRARY)
torch.library.register_vmap("dilabench::selected_backward", one_after_another(_backward_op), lib=LIBRARY)


class _Differentiable(torch.autograd.Function):
    """The operator with its derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        indices: Tensor | None,
        sink: Tensor | None,
        bounds: Tensor | None,
        asked: str,
    ) -> tuple[Tensor, Tensor]:
        return _forward_op(query, key, value, indices, sink, bounds, asked)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        query, key, value, indices, sink, bounds, ctx.asked = inputs
        ctx.save_for_backward(query, key, value, *output, indices, bounds, sink)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
        *saved, sink = ctx.saved_tensors

        def gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
            of_inputs = _backward_op(*tensors[:8], ctx.asked)
            if sink is None:
                return of_inputs
            dout, _, _, _, out, lse, _, _, sinks = tensors
            return *of_inputs, sink_gradient(dout, out, lse, sinks)

        dq, dk, dv, *of_sink = first_derivatives(gradients, dout, *saved, *(() if sink is None else (sink,)))
        return dq, dk, dv, None, of_sink[0] if of_sink else None, None, None


@differentiable_operator("selected")
def _selected_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor | None,
    sink: Tensor | None,
    bounds: Tensor | None,
    block: int,
    causal: bool,
    window: Sequence[int],
    scale: float,
    cu_seqlens: Sequence[int],
    compression: Sequence[int],
) -> tuple[Tensor, Tensor]:
    asked = _written(block, causal, window, scale, cu_seqlens, compression)
    out, lse = _Differentiable.apply(query, key, value, indices, sink, bounds, asked)
    return out, lse


def _shapes_of_indices(
    q: Tensor, keys: Tensor, _spans: Sequence[int], _scale: float, choosing: Sequence[int]
) -> Tensor:
    block, top_k, _, _ = choosing
    width = torch.sym_min(top_k, -(-q.shape[1] // block))
    return q.new_empty((q.shape[0], q.shape[1], keys.shape[2], width), dtype=torch.int32)


@operator("select_by_compression", _shapes_of_indices)
def selected_by_compression(
    query: Tensor, keys: Tensor, compression: Sequence[int], scale: float, choosing: Sequence[int]
) -> Tensor:
    """Indices int32 [B, N, K, S] of `selecting.select_by_compression`; choosing: block, top_k, initial, local."""
    block, top_k, initial, local = choosing
    of_blocks = Choosing(block, top_k, causal=True, initial=initial, local=local)
    return select_by_compression(query.detach(), keys.detach(), Compression(*compression), scale, of_blocks)


torch.library.register_vmap("dilabench::select_by_compression", one_after_another(selected_by_compression), lib=LIBRARY)
