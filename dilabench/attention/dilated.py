"""Dilated attention for your own models: a function, and two modules with torch's conventions.

    from dilabench.attention import dilated_attention

    out = dilated_attention(q, k, v, segment_lengths=(2048, 4096), dilation_rates=(1, 2), causal=True)

Exact forward and backward of LongNet's dilated attention (one softmax over the union of all branches' keys): the fused
Triton kernel if it is the fastest (CUDA), else strided views over the best dense kernel of the device. Works under
torch.compile without graph breaks: forward and backward are one custom operator each.
"""

# The annotations of operators are evaluated by torch: no postponed evaluation in this module.

from collections.abc import Sequence
from functools import lru_cache
from operator import sub
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from dilabench.attention import operands
from dilabench.choice.computation import automatic, backend_of, check_backend, name_of, over
from dilabench.choice.measured import doublings_of_mean
from dilabench.choice.ways import AUTO, Way
from dilabench.contracts import Attend, Packings
from dilabench.errors import ConfigError
from dilabench.impls.multihead import ProjectedAttention
from dilabench.impls.no_pairs import NOTHING_SEEN, SHAPES_ONLY, FirstRows
from dilabench.impls.one_operator import (
    DILATED,
    Computation,
    Options,
    WithGradient,
    as_one_operator,
    is_plain_eager_call,
    register,
)
from dilabench.impls.operator_rules import refuse_forward_mode
from dilabench.kernels.streams import is_captured
from dilabench.patterns.dense import DENSE
from dilabench.patterns.dilated import DilatedPattern
from dilabench.validation import validated
from dilabench.workload.spec import UNBOUNDED, Window, Workload, attended_pairs

__all__ = ["DilatedAttention", "MultiheadDilatedAttention", "dilated_attention"]


# Options of the call that are fields of `DilatedPattern`.
IN_PATTERN = ("segment_lengths", "dilation_rates", "heads", "offset", "offset_by", "padding", "merge_grad")


class AttentionOptions(TypedDict, total=False):
    """Keyword options of `dilated_attention`, described there."""

    causal: bool
    window: Window
    scale: float | None
    dropout_p: float
    heads: Literal["all", "grouped"]
    offset: Literal["modulo", "blocked"]
    offset_by: Literal["head", "kv_head"]
    padding: Literal["masked", "zero_key"]
    merge_grad: Literal["exact", "detached"]
    backend: str | Attend


@overload
def dilated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    sink: Tensor | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    max_seqlen: int | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...
@overload
def dilated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    sink: Tensor | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    max_seqlen: int | None = None,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...
def dilated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    causal: bool = False,
    window: Window = UNBOUNDED,
    scale: float | None = None,
    dropout_p: float = 0.0,
    heads: Literal["all", "grouped"] = "all",
    offset: Literal["modulo", "blocked"] = "modulo",
    offset_by: Literal["head", "kv_head"] = "head",
    padding: Literal["masked", "zero_key"] = "masked",
    merge_grad: Literal["exact", "detached"] = "exact",
    sink: Tensor | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    max_seqlen: int | None = None,
    return_lse: bool = False,
    backend: str | Attend = AUTO,
) -> Tensor | tuple[Tensor, Tensor]:
    """LongNet's dilated attention: out [B, N, H, D] of query [B, N, H, D] and key, value [B, N, K, D], K dividing H.

    With `cu_seqlens`, ascending from 0: packed sequences, out [T, H, D] of query [T, H, D] and key, value [T, K, D].
    Segments restart in each sequence. Equal bounds are empty sequences; out is 0 for rows beyond the last bound. A
    tensor on a GPU is read from it at the first call, which waits for the GPU, unless `max_seqlen` is given and all
    sequences are one launch (dense attention, `fused`): then nothing waits. `max_seqlen`: tokens of the longest
    sequence, or more, such as T. Less is refused if the bounds are numbers or on a CPU, outside torch.compile; bounds
    that are not read are not checked, and must end at T. B, N or T may be 0.

    `segment_lengths` and `dilation_rates` pair up to branches; any sizes work, also segments that do not divide N or
    rates that do not divide segments. Without any branch it is dense attention. `window` is (left, right) in positions,
    -1 unbounded; `scale` defaults to 1/sqrt(D). `heads`: every head in every branch, or heads split over the branches.
    `offset`: the residue that a head keeps is h mod r (the paper) or h // ceil(H/r) (the authors' code), counted by
    query head or by key/value head.
    `padding`: whether positions that a segment lacks to a multiple of its rate are attended as zero keys (the authors'
    code). `merge_grad`: whether gradients flow through the weights that branches are merged with, or these count as
    constants (the authors' code); only the former computes pairs once that branches share, and only the latter keeps
    the result of every branch for the backward pass.
    `sink`: [H], the logits of a key of value 0 that each head's rows see besides (gpt-oss's learned sinks); it gets a
    gradient. `backend` is a name of `dilabench list backends`, or a function `(q, k, v, *, causal, window, scale) ->
    (out, lse)` of dense attention (`contracts.Attend`), of which torch.compile makes a graph each; 'auto' takes the
    fastest way: on a GPU it measures them all at the first call of a configuration, which takes seconds once per
    machine (`choice.first_use`). The last bits of the query's gradient may differ from call to call, as
    FlashAttention's do, unless torch is set to deterministic algorithms (`torch.use_deterministic_algorithms`).
    `return_lse`: also return lse [B, H, N] (packed: [H, T]), as `attention` does. NaN or inf in the value of a key that
    a row does not see may make that row NaN, as in torch's own attention.

    Raises ValueError for shapes or options that do not fit, for a dropout other than 0, for a sink with detached
    gradients, and for a backend that cannot serve the call.
    """
    if dropout_p != 0.0:
        raise ValueError(
            f"dropout_p {dropout_p} is not supported: attention weights are never materialised, so that none can be "
            "dropped; use 0, and nn.Dropout on the output"
        )
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        operands.check_are_tensors(query=query, key=key, value=value)
    if torch._C._is_any_autocast_enabled():
        query, key, value = operands.as_autocast(query, key, value)
    if sink is not None:
        operands.check_is_tensor(sink)
    if cu_seqlens is not None:
        operands.check_tokens(query, key, value)
        query, key, value = query[None], key[None], value[None]
    longest, unread = 0 if max_seqlen is None else operands.rounded_up(max_seqlen, cu_seqlens), None
    # A compiled graph takes a tensor of bounds unread, and so serves every packing.
    if isinstance(cu_seqlens, Tensor) and (
        torch.compiler.is_compiling() or (longest and operands.may_stay(cu_seqlens))
    ):
        if cu_seqlens.ndim != 1:
            raise ValueError(f"cu_seqlens {tuple(cu_seqlens.shape)} must be one row of bounds that rise from 0")
        operands.check_bounds_dtype(cu_seqlens)
        unread = cu_seqlens
    bounds = () if cu_seqlens is None or unread is not None else operands.bounds(cu_seqlens, query.shape[1])
    if forward_ad._current_level >= 0:
        refuse_forward_mode(query, key, value, *(() if sink is None else (sink,)))
    wants_gradient = torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad or (sink is not None and sink.requires_grad)
    )
    try:
        lengths, rates, sides = tuple(segment_lengths), tuple(dilation_rates), tuple(window)
    except TypeError:
        of_integers = {"segment_lengths": segment_lengths, "dilation_rates": dilation_rates, "window": window}
        lengths, rates, sides = (operands.integers(name, value) for name, value in of_integers.items())
    # A plain tuple, because creating `Options` takes several times as long.
    options: tuple[Any, ...] = (
        lengths,
        rates,
        causal,
        sides,
        scale,
        heads,
        offset,
        offset_by,
        padding,
        # The outputs are the same, and more kernels support it.
        "exact" if merge_grad == "detached" and not wants_gradient else merge_grad,
        bounds,
        wants_gradient,
        "",
        0 if unread is None else longest,
        backend,
    )
    if sink is None and is_plain_eager_call(query, key, value):
        of_query, of_key = (query.shape, query.dtype, query.device), (key.shape, key.dtype, key.device)
        try:
            tensors = of_query, of_key, (value.shape, value.dtype, value.device)
            computation = _computation(tensors, options) if unread is None else _of_tensor(tensors, options, unread)
        except TypeError:
            operands.refuse_types(Options(*options)._asdict())
            raise
        if wants_gradient:
            out, lse = WithGradient.apply(computation, query, key, value)
        else:
            out, lse = computation.forward(query, key, value)[:2]
    else:
        operands.check_operands(query.shape, key.shape, value.shape)
        operands.refuse_types(Options(*options)._asdict())
        if sink is not None:
            operands.check_sink(sink, query, merge_grad)
        if not torch.compiler.is_compiling() and torch._C._is_tracing():
            # The trace may later run with gradients.
            options = (*options[:9], merge_grad, bounds, True, *options[12:])
        if not isinstance(backend, str):
            # Operators accept only texts.
            options = (*options[:-1], name_of(backend))
        out, lse = as_one_operator(DILATED, query, key, value, options, sink, unread)
    if cu_seqlens is not None:
        out, lse = out.squeeze(0), lse.squeeze(0)
    return (out, lse) if return_lse else out


class DilatedAttention(nn.Module):
    """`dilated_attention` with its branches and options fixed. Has no parameters."""

    def __init__(
        self, segment_lengths: Sequence[int], dilation_rates: Sequence[int], **options: Unpack[AttentionOptions]
    ) -> None:
        super().__init__()
        unknown = set(options) - set(AttentionOptions.__annotations__)
        if unknown:
            known = ", ".join(AttentionOptions.__annotations__)
            raise TypeError(f"unknown option {', '.join(sorted(unknown))}; known: {known}")
        operands.refuse_types(options)
        self.segment_lengths = operands.integers("segment_lengths", segment_lengths)
        self.dilation_rates = operands.integers("dilation_rates", dilation_rates)
        self.options = options

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """out [B, N, H, D] of query [B, N, H, D] and key, value [B, N, K, D]; with `cu_seqlens` [T, H, D] of [T, H, D]
        and [T, K, D]. `cu_seqlens` and `max_seqlen` as for `dilated_attention`.
        """
        return dilated_attention(
            query,
            key,
            value,
            segment_lengths=self.segment_lengths,
            dilation_rates=self.dilation_rates,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            **self.options,
        )

    def extra_repr(self) -> str:
        """The branches and options, for `print(module)`."""
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"segment_lengths={self.segment_lengths}, dilation_rates={self.dilation_rates}{options}"


class MultiheadDilatedAttention(ProjectedAttention):
    """Multi-head self-attention on embeddings [B, N, E]: projections around `DilatedAttention`.

    Returns one tensor [B, N, E]; called with `cu_seqlens`, [T, E] of packed sequences [T, E]. `norm` adds LongNet's
    layer norm before the output projection; the other options are as for `dilated_attention`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        num_kv_heads: int | None = None,
        bias: bool = True,
        norm: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[AttentionOptions],
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            DilatedAttention(segment_lengths, dilation_rates, **options),
            num_kv_heads=num_kv_heads,
            bias=bias,
            norm=norm,
            device=device,
            dtype=dtype,
        )


class _ByOptions:
    """The computations that the operators look up by tensors and options."""

    def _computation_for(
        self, query: Tensor, key: Tensor, value: Tensor, options: Options, bounds: Tensor | None = None
    ) -> Computation:
        of_query, of_key = (query.shape, query.dtype, query.device), (key.shape, key.dtype, key.device)
        tensors = of_query, of_key, (value.shape, value.dtype, value.device)
        return _computation(tensors, options) if bounds is None else _of_tensor(tensors, options, bounds)

    def _pairs_for(self, query: torch.Size, key: torch.Size, options: Options) -> int:
        # The number of pairs is the same for every dtype and device.
        of_query, of_key = ((shape, torch.float32, torch.device("cpu")) for shape in (query, key))
        workload = _workload((of_query, of_key, of_key), options)
        return attended_pairs(workload) if workload else 0


_by_options = _ByOptions()
register(DILATED, _by_options)


@lru_cache(maxsize=64)
def _computation(
    tensors: tuple[tuple[torch.Size, torch.dtype, torch.device], ...], call_options: tuple[Any, ...]
) -> Computation:
    """The computation for query, key and value, each by shape, dtype and device, and `Options`, made once for all
    calls.

    Raises ValueError for tensors and options that do not fit together.
    """
    options = Options(*call_options)
    if options.cu_seqlens and options.backend == AUTO:
        of_documents = _of_documents(tensors, options)
        if of_documents is not None:
            return of_documents
    operands.check_options(options._asdict())
    try:
        workload = _workload(tensors, options)
        device = tensors[0][2]
        check_backend(options.backend)
        if device.type == "meta":
            return SHAPES_ONLY
        if workload is None:
            return NOTHING_SEEN
        if workload.seq_len < tensors[0][0][1]:
            # The rows of the sequences are computed, and zeros follow them.
            inside = tuple(((1, workload.seq_len, *shape[2:]), *kind) for shape, *kind in tensors)
            return FirstRows(
                workload.seq_len, _computation(inside, (*call_options[:10], workload.cu_seqlens, *call_options[11:]))
            )
        if options.backend == AUTO:
            return automatic(workload, device)[1]
        # A named backend may support only the forward pass.
        implementation = "dense" if workload.pattern == DENSE else "strided"
        backend = backend_of(options.backend, Way(implementation, None, workload.replace(mode="forward")), device)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return over(backend, implementation, workload, device)


def _of_documents(tensors: tuple[operands.Kind, ...], options: Options) -> Computation | None:
    """The computation of packed sequences that the fastest implementation derives from bounds alone, or None."""
    tokens = tensors[0][0][1]
    bounds = operands.without_empty(options.cu_seqlens, tokens)
    if len(bounds) < 3 or bounds[-1] < tokens:
        return None
    packings = _packings_like(tensors, options, len(bounds) - 1, max(map(sub, bounds[1:], bounds)))
    return None if packings is None else packings.of(bounds)


def _of_tensor(tensors: tuple[operands.Kind, ...], call_options: tuple[Any, ...], bounds: Tensor) -> Computation:
    """As `_computation` for packed sequences with these bounds, which are read if their numbers are needed."""
    options, tokens = Options(*call_options), tensors[0][0][1]
    if options.max_seqlen and options.backend == AUTO and operands.may_stay(bounds) and len(bounds) > 1:
        longest = min(options.max_seqlen, tokens)
        packings = _packings_like(tensors, options, len(bounds) - 1, longest)
        if packings is not None:

            def made() -> Computation:
                # Another object, so that the result does not hold the tensor that it is kept for.
                there = bounds.detach().to(torch.int32).contiguous()
                return packings.of(there, tokens, longest)

            is_copied = bounds.dtype != torch.int32 or not bounds.is_contiguous()
            if is_copied and is_captured(bounds):
                # A graph copies them at each replay.
                return made()
            return _of_bounds.get(bounds, (packings, longest), made)
    options = options._replace(cu_seqlens=operands.bounds(bounds, tokens), max_seqlen=0)
    return _computation(tensors, tuple(options))


_of_bounds = operands.OfTensors[Computation]()


def _packings_like(
    tensors: tuple[operands.Kind, ...], options: Options, sequences: int, longest: int
) -> Packings | None:
    """`_packings` for this number of sequences, the longest of this many tokens or fewer."""
    tokens = tensors[0][0][1]
    rounded = min([1 << (longest - 1).bit_length(), *(w for w in options.segment_lengths if w >= longest)])
    shared = options._replace(cu_seqlens=(), max_seqlen=0)
    return _packings(tensors, shared, min(rounded, tokens - 1), doublings_of_mean(tokens, sequences))


@lru_cache(maxsize=64)
def _packings(tensors: tuple[operands.Kind, ...], options: Options, longest: int, doublings: int) -> Packings | None:
    """The shared part of computations for packings of similar mean length with the longest of `longest` tokens, of the
    implementation that is fastest for one of them.
    """
    tokens = tensors[0][0][1]
    other_sequences = min(max(1, round(tokens / 2**doublings) - 1), tokens - longest)
    bounds = (0, *(longest + (tokens - longest) * at // other_sequences for at in range(other_sequences + 1)))
    operands.check_options(options._asdict())
    try:
        workload = _workload(tensors, options._replace(cu_seqlens=bounds))
        if workload is None or tensors[0][2].type == "meta":
            return None
        return getattr(automatic(workload, tensors[0][2])[1], "packings", None)
    except (ConfigError, ValueError):
        # These are refused for the representative packing, not for the caller's.
        return None


def _workload(tensors: Sequence[operands.Kind], options: Options) -> Workload | None:
    """As `operands.workload_of`."""
    fields = {name: getattr(options, name) for name in IN_PATTERN}
    is_dense = not (options.segment_lengths or options.dilation_rates)
    return operands.workload_of(DENSE if is_dense else validated(DilatedPattern, fields), tensors, options)
