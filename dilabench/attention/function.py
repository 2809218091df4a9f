"""Attention of every pattern, by one function.

    from dilabench.attention import attention
    from dilabench.patterns import WindowSinkPattern

    out = attention(q, k, v, pattern=WindowSinkPattern(sinks=4, window_size=1024), causal=True)

Patterns are the objects that the benchmark's workloads use (`dilabench.patterns`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, TypedDict, Unpack, overload

from torch import Tensor

from dilabench.attention import operands
from dilabench.attention.call import as_constant, attend
from dilabench.attention.sequences import KeyLengths, attend_there
from dilabench.contracts import Attend
from dilabench.impls.call import AnyPattern, pattern_of
from dilabench.impls.operator_rules import outside_compilers
from dilabench.patterns.answers import SelectedKeys
from dilabench.patterns.dense import DENSE
from dilabench.patterns.pattern import Pattern
from dilabench.workload.spec import AUTO, UNBOUNDED, Window

__all__ = ["attention", "block_sparse_attention"]


class CallOptions(TypedDict, total=False):
    """Keyword options of `attention` besides its pattern, described there."""

    causal: bool
    window: Window
    scale: float | None
    softcap: float | None
    sink: Tensor | None
    indices: Tensor | None


class AttentionOptions(CallOptions, total=False):
    """Keyword options of `attention`, described there."""

    pattern: Pattern | None
    cu_seqlens: Sequence[int] | Tensor | None
    max_seqlen: int | None
    cu_seqlens_k: Sequence[int] | Tensor | None
    key_lengths: KeyLengths | None
    key_padding: Tensor | None
    query_padding: Tensor | None
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
    softcap: float | None = None,
    sink: Tensor | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    max_seqlen: int | None = None,
    cu_seqlens_k: Sequence[int] | Tensor | None = None,
    key_lengths: KeyLengths | None = None,
    key_padding: Tensor | None = None,
    query_padding: Tensor | None = None,
    indices: Tensor | None = None,
    return_lse: bool = False,
    backend: str | Attend = AUTO,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of any pattern: out [B, M, H, Dv] of query [B, M, H, D], key [B, N, K, D], value [B, N, K, Dv].

    K divides H: each key/value head serves H/K query heads. Values may have another width than keys in dense attention,
    with windows too (MLA: 192 and 128, or 576 and 512); elsewhere Dv is D. Gradients of query, key, value and sink are
    exact. Fewer queries than keys are the last rows, for prefill in chunks and decoding: `attention(q[:, -M:], k, v,
    ...)` equals `attention(q, k, v, ...)[:, -M:]`. More than keys are refused, unless dense without causal or window.
    pattern: which query attends to which key; None is every one (dense). The objects of `dilabench.patterns`:
        DilatedPattern (LongNet), BlockSparsePattern, SelectedBlocksPattern (NSA, MoBA, DSA, MSA: per token),
        TopKBlocksPattern (VSA), WindowSinkPattern (StreamingLLM), ColumnBoundsPattern (FlashMask).
    causal: a query attends only to keys up to its own position.
    window: (left, right) in positions, -1 unbounded: (1023, 0) is a causal window of 1024 keys.
    scale: factor of the scores; 1/sqrt(D) by default.
    softcap: scores s become softcap · tanh(s / softcap), after the scale and before masks (Gemma 2: 50). Dense
        attention takes it, with windows too, and on a GPU dilated attention.
    sink: [H], per head the logit of one more key whose value is 0 (gpt-oss); gets a gradient. inf: out and gradients 0.
    cu_seqlens: bounds of packed sequences, from 0; query and out are [T, H, D], key and value [T, K, D]. The pattern
        restarts in each; equal bounds are empty, rows beyond the last get 0.
    max_seqlen: of the longest sequence, or more: calls of dense and dilated patterns then wait for no bounds on a GPU.
        Less is refused if bounds are numbers or on a CPU, outside torch.compile; bounds on a GPU are not read for it.
    cu_seqlens_k: with cu_seqlens, the bounds of the keys [T_k, K, D] of as many sequences, whose queries are their last
        rows.
    key_lengths: [B], of a cache [B, N, K, D] how many keys each item has; its queries are the last rows of these.
        [B, 2] with padding before them: the first that is there, from which patterns count, and the end. Keys and
        values before and behind are not read. Tensors on a GPU of these two are not read, and not checked, for few
        queries of dense and dilated patterns without gradients; else they are read, which waits for the GPU.
    key_padding: bool [B, N], True for keys that are there. These are packed, as with cu_seqlens and at their cost: a
        pattern starts at the first key that is there. Windows and patterns take padding at the ends of an item, none
        between its tokens. A mask is read once for each content, which waits for a GPU and breaks a compiled graph.
    query_padding: bool [B, M], True for rows with a query; others are 0, with lse -inf. By default all, or with
        key_padding under a causal mask, a window or a pattern key_padding[:, -M:], the only one possible there.
    indices: integers that replace the pattern's selector and top_k. SelectedBlocksPattern: [B, M, K, S], [M, K, S] or
        packed [T, K, S], the S key blocks of each query token and key/value head, required if its selector reads
        queries. TopKBlocksPattern: [n, k] or [K, n, k], the k key blocks of each of n query blocks. With cu_seqlens
        or key_lengths blocks count from 0 in each sequence, and n is the sum over sequences. Blocks of queries are
        those that hold a query, cut where blocks of keys are. A repeated index counts once, -1 means no
        block; other numbers without a block are refused on a CPU and ignored on a GPU.
    return_lse: also return lse [B, H, M] (packed: [H, T]), the natural logarithm of each query's sum of exponentials,
        differentiable. A query that attends to no key has out 0 and lse -inf. A gradient of lse costs a second backward
        pass; with merge_grad='detached' it has none, for the weights of branches, which are made of it, are constants.
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
    if not (pattern is None or isinstance(pattern, Pattern)):
        operands.check_pattern(pattern)
    if key_padding is not None or query_padding is not None:
        options = {"causal": causal, "window": window, "scale": scale, "softcap": softcap, "sink": sink}
        options |= {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "cu_seqlens_k": cu_seqlens_k}
        options |= {"key_lengths": key_lengths, "indices": indices, "backend": backend}
        masks = key_padding, query_padding, DENSE if pattern is None else pattern, options
        out, lse = outside_compilers(attend_there, attend, (query, key, value), *masks)
        return (out, as_constant(lse, pattern)) if return_lse else out
    out, lse = attend(
        query,
        key,
        value,
        DENSE if pattern is None else pattern,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        sink=sink,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        cu_seqlens_k=cu_seqlens_k,
        key_lengths=key_lengths,
        indices=indices,
        backend=backend,
        only_out=not return_lse,
    )
    return (out, as_constant(lse, pattern)) if return_lse else out


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
    """Attention over blocks: out [B, N, H, D] of query [B, N, H, D] and key, value [B, N, K, D], K dividing H.

    As `attention` with a BlockSparsePattern, or with the blocks that `indices` name.

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
    fields = {"mask": mask, "block_size": block_size, "density": density, "seed": seed}
    try:
        pattern = _of_blocks(options.get("indices") is not None, **fields)
    except TypeError:
        operands.refuse_types(fields)
        raise
    out, lse = attend(query, key, value, pattern, **options)
    return (out, lse) if return_lse else out


@lru_cache(maxsize=64)
def _of_blocks(given: bool, mask: str, block_size: int, density: float, seed: int) -> AnyPattern:
    """The pattern of `block_sparse_attention`, or the unit of blocks that are given."""
    operands.refuse_types({"mask": mask, "block_size": block_size, "density": density, "seed": seed})
    if given:
        return SelectedKeys(block_size, False)
    return pattern_of("block_sparse", mask=mask, block_size=block_size, density=density, mask_seed=seed)
