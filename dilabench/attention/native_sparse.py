"""Native sparse attention (NSA, Yuan et al. 2025, arXiv:2502.11089) as a function, and as a module with its own
projections.

    from dilabench.attention import native_sparse_attention

    out = native_sparse_attention(q, k, v, gates)

Each token attends to compressed keys, to selected blocks of keys and to a window of the last keys, each with its own
softmax; gates weigh the three results. The blocks are those that the heads of a group attend to most in compressed
form; which ones has no gradient.
"""

# The annotations of operators are evaluated by torch: no postponed evaluation in this module.

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dilabench.attention import operands
from dilabench.attention.cache import KeyValueCache
from dilabench.attention.call import attend
from dilabench.attention.sequences import key_bounds, spans_of
from dilabench.impls.call import Call, pattern_of
from dilabench.impls.last_rows import Span
from dilabench.impls.multihead import check_embeddings, check_sizes
from dilabench.impls.operator_rules import LIBRARY, one_after_another, operator
from dilabench.impls.selected.selecting import Choosing, select_by_compression
from dilabench.impls.summed import block_means
from dilabench.patterns.answers import Compression, SelectedKeys
from dilabench.patterns.dense import DENSE
from dilabench.patterns.selected_blocks import check_block
from dilabench.patterns.token_selectors import TOKEN_SELECTORS

__all__ = ["BlockCompression", "NativeSparseAttention", "native_sparse_attention"]

BRANCHES = 3
_BLOCKS = TOKEN_SELECTORS["compressed"]


def native_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gates: Tensor,
    *,
    compressed_key: Tensor | None = None,
    compressed_value: Tensor | None = None,
    window_key: Tensor | None = None,
    window_value: Tensor | None = None,
    compression_length: int = 32,
    compression_stride: int = 16,
    block_size: int = 64,
    top_k: int = 16,
    window: int = 512,
    scale: float | None = None,
    indices: Tensor | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    cu_seqlens_k: Sequence[int] | Tensor | None = None,
    key_lengths: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """Causal out [B, M, H, D] = sum_c gates[..., c] · attention_c, of query [B, M, H, D] and key, value [B, N, K, D].
    The queries are the last M tokens.

    gates: [B, M, H, 3], of the compressed, the selected and the window branch (a sigmoid in the paper; equation 5).
    compressed_key, compressed_value: [B, C, K, D], the compressed form of blocks of `compression_length` tokens, one
        every `compression_stride`; C = (N - length) // stride + 1 of them are whole. By default it is the means of
        `key` and `value` (the paper learns it: `BlockCompression`). A token sees those whose tokens are all behind it.
    key, value: of the selected branch. window_key, window_value: of the window, [B, N, K, D]; by default the same.
    block_size, top_k: blocks of keys that each token and key/value head selects, the first one, the token's own and the
        one before it always among them (equations 8 to 12). `indices`, int [B, M, K, S] as of `attention`: given ones.
    window: how many keys up to its own a token sees in the window. scale: of the scores; 1/sqrt(D) by default.
    cu_seqlens: ascending bounds of packed sequences from 0, on tensors without the batch axis: [T, H, D], gates
        [T, H, 3], indices [T, K, S], and compressed keys [C, K, D] of each sequence, one after another. Blocks restart
        in each. Tokens behind the last bound get 0. Compressed attention and selection are launched for each sequence.
    cu_seqlens_k, key_lengths: other bounds of keys, and the number of keys of each item of a cache, as of `attention`.

    Gradients of query, keys, values, compressed ones and gates are exact for the blocks that were selected. Works under
    torch.compile without a graph break, with bounds in a list. Raises ValueError for shapes that do not fit.

    >>> import torch
    >>> from dilabench.attention import native_sparse_attention
    >>> q, k, v = (torch.randn(1, 200, heads, 16) for heads in (4, 2, 2))
    >>> native_sparse_attention(q, k, v, torch.rand(1, 200, 4, 3), top_k=3, window=20).shape
    torch.Size([1, 200, 4, 16])
    """
    operands.check_are_tensors(query=query, key=key, value=value, gates=gates)
    packed = cu_seqlens is not None
    if packed:
        operands.check_tokens(query, key, value)
    batch = [x[None] if packed else x for x in (query, key, value)]
    operands.check_operands(*(x.shape for x in batch))
    operands.check_kinds((x.dtype, x.device) for x in batch)
    if gates.shape != (*query.shape[:-1], BRANCHES):
        raise ValueError(f"gates {tuple(gates.shape)} must be {(*query.shape[:-1], BRANCHES)}: one for each branch")
    if gates.device != query.device:
        raise ValueError(f"gates are on {gates.device} and query on {query.device}; move one of them")
    operands.refuse_types({"scale": scale})
    least = {"block_size": "one key", "top_k": "the token's own block", "window": "the token itself"}
    for (name, meaning), number in zip(least.items(), (block_size, top_k, window), strict=True):
        if not isinstance(number, int | torch.SymInt) or number < 1:
            raise ValueError(f"{name} {number!r:.80} must be a whole number of at least 1, {meaning}")
    check_block(block_size)
    spans_of_block = compression_length, compression_stride
    compression = Compression(*spans_of_block)
    factor = query.shape[-1] ** -0.5 if scale is None else float(scale)
    spans = _spans(batch, cu_seqlens, cu_seqlens_k, key_lengths)
    queries = [of_queries.of(batch[0]) for of_queries, _ in spans]
    lengths = [of_keys.length for _, of_keys in spans]
    keys, values = (
        [block_means(of_keys.of(whole), *spans_of_block) for _, of_keys in spans]
        if given is None
        else _compressed(given, spans, compression, packed)
        for whole, given in ((batch[1], compressed_key), (batch[2], compressed_value))
    )
    over = pattern_of("compressed_keys", length=compression_length, stride=compression_stride)
    parts = [
        attend(q, k, v, over, scale=scale, key_lengths=None if q.shape[1] == length else [length] * q.shape[0])[0]
        for q, k, v, length in zip(queries, keys, values, lengths, strict=True)
    ]
    compressed = _joined(parts, query, 0.0)
    if indices is None:
        of_blocks = block_size, top_k, _BLOCKS.initial, _BLOCKS.local
        found = [
            selected_by_compression(q, k, spans_of_block, factor, (*of_blocks, length))
            for q, k, length in zip(queries, keys, lengths, strict=True)
        ]
        if len(found) > 1:
            widest = max(x.shape[3] for x in found)
            found = [nn.functional.pad(x, (0, widest - x.shape[3]), value=-1) for x in found]
        indices = _joined(found, query, -1)
    options: Any = {"causal": True, "scale": scale, "cu_seqlens": cu_seqlens}
    options |= {"cu_seqlens_k": cu_seqlens_k, "key_lengths": key_lengths}
    selected, _ = attend(query, key, value, SelectedKeys(block_size, True), indices=indices, **options)
    near, _ = attend(
        query,
        key if window_key is None else window_key,
        value if window_value is None else window_value,
        DENSE,
        window=(window - 1, 0),
        **options,
    )
    gated = zip((compressed, selected, near), gates.unbind(-1), strict=True)
    first, *others = (part * gate[..., None] for part, gate in gated)
    return sum(others, start=first)


def _shapes_of_indices(
    q: Tensor, keys: Tensor, _spans: Sequence[int], _scale: float, choosing: Sequence[int]
) -> Tensor:
    block, top_k, _, _, tokens = choosing
    width = torch.sym_min(top_k, -(-tokens // block))
    return q.new_empty((q.shape[0], q.shape[1], keys.shape[2], width), dtype=torch.int32)


@operator("select_by_compression", _shapes_of_indices)
def selected_by_compression(
    query: Tensor, keys: Tensor, compression: Sequence[int], scale: float, choosing: Sequence[int]
) -> Tensor:
    """Indices int32 [B, N, K, S] of `selecting.select_by_compression`; choosing: block, top_k, initial, local,
    tokens.
    """
    block, top_k, initial, local, tokens = choosing
    of_blocks = Choosing(block, top_k, causal=True, initial=initial, local=local)
    return select_by_compression(query.detach(), keys.detach(), Compression(*compression), scale, of_blocks, tokens)


torch.library.register_vmap("dilabench::select_by_compression", one_after_another(selected_by_compression), lib=LIBRARY)


def _spans(
    batch: Sequence[Tensor],
    cu_seqlens: Sequence[int] | Tensor | None,
    cu_seqlens_k: Sequence[int] | Tensor | None,
    key_lengths: Sequence[int] | Tensor | None,
) -> list[tuple[Span, Span]]:
    """The queries and keys of each sequence; of none, of one without tokens. batch: query, key, value [B, ·, ·, D]."""
    query, key, _ = batch
    rows, tokens = query.shape[1], key.shape[1]
    packed = cu_seqlens is not None
    given = cu_seqlens_k is not None or key_lengths is not None
    if packed or given:
        bounds = () if cu_seqlens is None else operands.bounds(cu_seqlens, rows)
        ends, unread = key_bounds(key, packed, cu_seqlens_k, key_lengths) if given else (bounds, None)
        if unread is not None:
            ends = operands.bounds(unread, tokens)
        call = Call(DENSE, causal=True, cu_seqlens=bounds, key_bounds=ends)
        found = [*spans_of(tuple((x.shape, x.dtype, x.device) for x in batch), call)]  # type: ignore[arg-type]
        return found or [(Span(slice(0, 1), slice(0, 0)),) * 2]
    operands.check_rows(rows, tokens, Call(DENSE, causal=True))
    items = slice(0, query.shape[0])
    return [(Span(items, slice(0, rows)), Span(items, slice(0, tokens)))]


def _bounds(cu_seqlens: Sequence[int] | Tensor, tokens: int) -> tuple[int, ...]:
    """The bounds of the sequences that are not empty; (0, 0) if all are empty."""
    bounds = operands.without_empty(operands.bounds(cu_seqlens, tokens), tokens)
    return bounds if len(bounds) > 1 else (0, 0)


def _sequences(x: Tensor, bounds: tuple[int, ...]) -> list[Tensor]:
    """[B, n, ·, D] of x [B, N, ·, D], or with bounds [1, n, ·, D] of each sequence in x [T, ·, D]."""
    return [x[None, start:stop] for start, stop in pairwise(bounds)] if bounds else [x]


def _compressed(
    given: Tensor, spans: Sequence[tuple[Span, Span]], compression: Compression, packed: bool
) -> list[Tensor]:
    """Compressed keys or values [sequences, C, K, D] of each span."""
    counts = [compression.count(keys.length) for _, keys in spans]
    if not packed:
        if given.ndim != 4:
            raise ValueError(f"compressed keys or values {tuple(given.shape)} must be [B, C, K, D]")
        # `attend` refuses tensors that do not fit.
        whole = len(spans) == 1
        return [given if whole else given[keys.items, :count] for (_, keys), count in zip(spans, counts, strict=True)]
    totals = [keys.sequences * count for (_, keys), count in zip(spans, counts, strict=True)]
    if given.ndim != 3 or given.shape[0] != sum(totals):
        raise ValueError(
            f"compressed keys or values {tuple(given.shape)} must be [C, K, D] with C = {sum(totals)}, the blocks of "
            "all packed sequences"
        )
    parts = given.split(totals)
    return [part.reshape(keys.sequences, -1, *given.shape[1:]) for part, (_, keys) in zip(parts, spans, strict=True)]


def _joined(parts: Sequence[Tensor], query: Tensor, behind: float) -> Tensor:
    """The parts [sequences, M, ·, ·] in the form of query, [B, M, ·, ·] or [T, ·, ·]; further rows are `behind`."""
    if query.ndim == 4:
        joined = torch.cat([*parts]) if len(parts) > 1 else parts[0]
        missing = query.shape[0] - joined.shape[0]
        return nn.functional.pad(joined, (0, 0, 0, 0, 0, 0, 0, missing), value=behind) if missing else joined
    joined = torch.cat([part.flatten(0, 1) for part in parts])
    return nn.functional.pad(joined, (0, 0, 0, 0, 0, query.shape[0] - joined.shape[0]), value=behind)


class BlockCompression(nn.Module):
    """NSA's learned compression: an MLP over the tokens of a block, to which it adds an encoding of their places."""

    def __init__(
        self,
        head_dim: int,
        length: int = 32,
        stride: int = 16,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.compression = Compression(length, stride)
        self.places = nn.Parameter(torch.empty(length, head_dim, device=device, dtype=dtype))
        self.hidden = nn.Linear(length * head_dim, head_dim, device=device, dtype=dtype)
        self.out = nn.Linear(head_dim, head_dim, device=device, dtype=dtype)
        nn.init.normal_(self.places, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, K, D] of x [B, N, K, D]."""
        if self.compression.count(x.shape[1]):
            blocks = x.unfold(1, self.compression.length, self.compression.stride).transpose(-1, -2)
        else:
            # The layers run even so: their gradients are 0, and DDP waits for them.
            blocks = x[:, :0, :, None].expand(-1, -1, -1, self.compression.length, -1)
        # [B, C, K, length, D]
        out: Tensor = self.out(nn.functional.gelu(self.hidden((blocks + self.places).flatten(-2))))
        return out


class NativeSparseAttention(nn.Module):
    """NSA with its projections: queries, keys and values of each branch, gates, and learned compression.

    Each of the three branches has its own keys and values, and each head a gate for each branch, a sigmoid of the
    token. Options as of `native_sparse_attention`. `position`: what encodes positions in queries and keys
    [B, N, heads, D], rotary embeddings for example; none by default. Raises ValueError when sizes do not divide.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        head_dim: int | None = None,
        compression_length: int = 32,
        compression_stride: int = 16,
        block_size: int = 64,
        top_k: int = 16,
        window: int = 512,
        bias: bool = False,
        position: Callable[[Tensor], Tensor] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(embed_dim=embed_dim, num_heads=num_heads, num_kv_heads=num_kv_heads)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}")
        if head_dim is None:
            if embed_dim % num_heads:
                raise ValueError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}; give head_dim")
            head_dim = embed_dim // num_heads
        check_sizes(head_dim=head_dim)
        self.embed_dim = embed_dim
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.position = position
        self.compression_length, self.compression_stride = compression_length, compression_stride
        self.block_size, self.top_k, self.window = block_size, top_k, window
        made: Any = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, num_heads * head_dim, bias=bias, **made)
        of_branches = BRANCHES * num_kv_heads * head_dim
        self.k_proj = nn.Linear(embed_dim, of_branches, bias=bias, **made)
        self.v_proj = nn.Linear(embed_dim, of_branches, bias=bias, **made)
        self.gate_proj = nn.Linear(embed_dim, num_heads * BRANCHES, **made)
        spans = compression_length, compression_stride
        self.compress_key = BlockCompression(head_dim, *spans, **made)
        self.compress_value = BlockCompression(head_dim, *spans, **made)
        self.out_proj = nn.Linear(num_heads * head_dim, embed_dim, bias=bias, **made)

    def forward(
        self, x: Tensor, *, cu_seqlens: Sequence[int] | Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """[B, N, E] of x [B, N, E], or with bounds of packed sequences [T, E] of x [T, E].

        `position` gets each sequence alone, [1, n, heads, D]. cache: of the tokens before x. Tokens that are
        given one after another get the results of one call over all of them, and only blocks that become whole are
        compressed; `position` then gets zeros in place of the tokens before. Raises ValueError for other shapes, for
        what is no tensor, and for a cache together with bounds.
        """
        if cache is not None and cu_seqlens is not None:
            raise ValueError("cache with cu_seqlens: it holds a batch of equal lengths; give one")
        before = 0 if cache is None else len(cache)
        bounds: tuple[int, ...] = ()
        if cu_seqlens is None:
            way_out = "packed sequences [T, E] take cu_seqlens, one sequence is [1, N, E]"
            check_embeddings("[B, N, E]", self.embed_dim, way_out, x=x)
        else:
            check_embeddings("[T, E]", self.embed_dim, "leave out the batch axis, or cu_seqlens", x=x)
            bounds = _bounds(cu_seqlens, x.shape[0])
        heads = (BRANCHES, self.num_kv_heads, self.head_dim)
        query = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        keys = self.k_proj(x).unflatten(-1, heads).unbind(-3)
        values = self.v_proj(x).unflatten(-1, heads).unbind(-3)
        if self.position is not None:
            query, *keys = (self._placed(part, bounds, before) for part in (query, *keys))
        first = 0
        if cache is not None:
            joined = (torch.cat([*parts], 2) for parts in (keys, values))
            keys, values = (part.chunk(BRANCHES, 2) for part in cache.append(*joined))
            # The first token of the first block that was not whole before.
            first = self.compress_key.compression.count(before) * self.compression_stride
        compressed_key, compressed_value = (
            torch.cat([*map(compress, _sequences(part[:, first:] if first else part, bounds))], 1)
            for compress, part in ((self.compress_key, keys[0]), (self.compress_value, values[0]))
        )
        if cache is not None:
            cache.compressed = KeyValueCache() if cache.compressed is None else cache.compressed
            compressed_key, compressed_value = cache.compressed.append(compressed_key, compressed_value)
        if bounds:
            compressed_key, compressed_value = compressed_key[0], compressed_value[0]
        gates = self.gate_proj(x).sigmoid().unflatten(-1, (self.num_heads, BRANCHES))
        out = native_sparse_attention(
            query,
            keys[1],
            values[1],
            gates,
            compressed_key=compressed_key,
            compressed_value=compressed_value,
            window_key=keys[2],
            window_value=values[2],
            compression_length=self.compression_length,
            compression_stride=self.compression_stride,
            block_size=self.block_size,
            top_k=self.top_k,
            window=self.window,
            cu_seqlens=cu_seqlens,
        )
        result: Tensor = self.out_proj(out.flatten(-2))
        return result

    def _placed(self, part: Tensor, bounds: tuple[int, ...], before: int) -> Tensor:
        """A part with its positions encoded; its first token has position `before`."""
        assert self.position is not None, "else nothing is encoded"
        padded = nn.functional.pad(part, (0, 0, 0, 0, before, 0)) if before else part
        encoded = _joined([*map(self.position, _sequences(padded, bounds))], padded, 0.0)
        return encoded[:, before:] if before else encoded
