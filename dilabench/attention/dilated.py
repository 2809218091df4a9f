"""Dilated attention for your own models: a function, and two modules with torch's conventions.

    from dilabench.attention import dilated_attention

    out = dilated_attention(q, k, v, segment_lengths=(2048, 4096), dilation_rates=(1, 2), causal=True)

Exact forward and backward of LongNet's dilated attention (one softmax over the union of all branches' keys): the fused
Triton kernel if it is the fastest (CUDA), else strided views over the best dense kernel of the device. Works under
torch.compile without graph breaks: forward and backward are one custom operator each.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor, nn

from dilabench.attention import operands
from dilabench.attention.cache import KeyValueCache
from dilabench.attention.call import as_constant, attend
from dilabench.attention.sequences import KeyLengths
from dilabench.contracts import Attend
from dilabench.impls.call import PatternFields, pattern_of
from dilabench.impls.multihead import ProjectedAttention
from dilabench.patterns.dense import DENSE
from dilabench.patterns.dilated import DilatedPattern
from dilabench.patterns.pattern import Pattern
from dilabench.workload.spec import AUTO, UNBOUNDED, Window

__all__ = ["DilatedAttention", "KeyValueCache", "MultiheadDilatedAttention", "dilated_attention"]


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
    cu_seqlens_k: Sequence[int] | Tensor | None = None,
    key_lengths: KeyLengths | None = None,
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
    cu_seqlens_k: Sequence[int] | Tensor | None = None,
    key_lengths: KeyLengths | None = None,
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
    cu_seqlens_k: Sequence[int] | Tensor | None = None,
    key_lengths: KeyLengths | None = None,
    return_lse: bool = False,
    backend: str | Attend = AUTO,
) -> Tensor | tuple[Tensor, Tensor]:
    """LongNet's dilated attention: out [B, M, H, D] of query [B, M, H, D] and key, value [B, N, K, D], K dividing H.

    Fewer queries than keys are the last rows: `dilated_attention(q[:, -M:], k, v, ...)` equals
    `dilated_attention(q, k, v, ...)[:, -M:]`. Places count from the first key. `key_lengths` [B], of a cache, and
    `cu_seqlens_k`, of packed sequences, are as of `attention`.

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
    (out, lse)` of dense attention (`contracts.Attend`; torch.compile makes a graph for each). 'auto' takes the
    fastest way: on a GPU it measures them all at the first call of a configuration, which takes seconds once per
    machine (`choice.first_use`). The last bits of the query's gradient may differ from call to call, as
    FlashAttention's do, unless torch is set to deterministic algorithms (`torch.use_deterministic_algorithms`).
    `return_lse`: also return lse [B, H, M] (packed: [H, T]), as `attention` does. NaN or inf in the value of a key that
    a row does not see may make that row NaN, as in torch's own attention.

    Raises ValueError for shapes or options that do not fit, for a dropout other than 0, for a sink with detached
    gradients, and for a backend that cannot serve the call.
    """
    if dropout_p != 0.0:
        raise ValueError(
            f"dropout_p {dropout_p} is not supported: attention weights are never materialised, so that none can be "
            "dropped; use 0, and nn.Dropout on the output"
        )
    lengths, rates = segment_lengths, dilation_rates
    if type(lengths) is not tuple or type(rates) is not tuple:
        lengths = operands.integers("segment_lengths", lengths)
        rates = operands.integers("dilation_rates", rates)
    pattern: Pattern | PatternFields = DENSE
    if lengths or rates:
        fields = lengths, rates, heads, offset, offset_by, padding, merge_grad
        try:
            pattern = _of_branches(*fields) if torch.compiler.is_compiling() else _kept_branches(*fields)
        except TypeError:
            operands.refuse_types(dict(zip(IN_PATTERN, fields, strict=True)))
            raise
    out, lse = attend(
        query,
        key,
        value,
        pattern,
        causal=causal,
        window=window,
        scale=scale,
        sink=sink,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        cu_seqlens_k=cu_seqlens_k,
        key_lengths=key_lengths,
        backend=backend,
        only_out=not return_lse,
    )
    return (out, as_constant(lse, pattern)) if return_lse else out


def _of_branches(*fields: Any) -> Pattern | PatternFields:
    named = dict(zip(IN_PATTERN, fields, strict=True))
    return pattern_of("dilated", **named) if torch.compiler.is_compiling() else DilatedPattern(**named)


_kept_branches = lru_cache(maxsize=256)(_of_branches)


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
        cu_seqlens_k: Sequence[int] | Tensor | None = None,
        key_lengths: KeyLengths | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """out [B, M, H, D] of query [B, M, H, D] and key, value [B, N, K, D]; with `cu_seqlens` [T, H, D] of [T, H, D]
        and [T, K, D]. Bounds and lengths as for `dilated_attention`.

        cache: what key and value of these tokens are added to, and whose keys and values the queries then see. With
        causal=True, tokens that are given one after another get the results of one call over all of them. Raises
        ValueError for a cache together with bounds or lengths.
        """
        if cache is not None:
            if any(x is not None for x in (cu_seqlens, cu_seqlens_k, key_lengths)):
                raise ValueError("cache with cu_seqlens or key_lengths: it holds a batch of equal lengths; give one")
            key, value = cache.append(key, value)
        return dilated_attention(
            query,
            key,
            value,
            segment_lengths=self.segment_lengths,
            dilation_rates=self.dilation_rates,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            cu_seqlens_k=cu_seqlens_k,
            key_lengths=key_lengths,
            **self.options,
        )

    def extra_repr(self) -> str:
        """The branches and options, for `print(module)`."""
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"segment_lengths={self.segment_lengths}, dilation_rates={self.dilation_rates}{options}"


class MultiheadDilatedAttention(ProjectedAttention):
    """Multi-head self-attention on embeddings [B, N, E]: projections around `DilatedAttention`.

    Returns one tensor [B, N, E]; called with `cu_seqlens`, [T, E] of packed sequences [T, E]; with a `cache`
    (`KeyValueCache`) [B, M, E] of M more tokens. `norm` adds LongNet's
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
