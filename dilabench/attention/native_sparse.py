"""Native sparse attention (NSA, Yuan et al. 2025, arXiv:2502.11089) as a function, and as a module with its own
projections.

    from dilabench.attention import native_sparse_attention

    out = native_sparse_attention(q, k, v, gates)

Each token attends to compressed keys, to selected blocks of keys and to a window of the last keys, each with its own
softmax; gates weigh the three results. The blocks are those that the heads of a group attend to most in compressed
form; which ones has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dilabench.attention import operands
from dilabench.attention.dilated import dilated_attention
from dilabench.attention.selected import compressed_attention, selected_attention, selected_by_compression
from dilabench.impls.multihead import check_embeddings
from dilabench.impls.selected.selecting import Compression
from dilabench.impls.summed import block_means
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
) -> Tensor:
    """Causal out [B, N, H, D] = sum_c gates[..., c] · attention_c, of query [B, N, H, D] and key, value [B, N, K, D].

    gates: [B, N, H, 3], of the compressed, the selected and the window branch (a sigmoid in the paper; equation 5).
    compressed_key, compressed_value: [B, C, K, D], the compressed form of blocks of `compression_length` tokens, one
        every `compression_stride`, of which C = (N - length) // stride + 1 are whole; by default the means of `key` and
        `value` (the paper learns it: `BlockCompression`). A token sees those whose tokens are all behind it.
    key, value: of the selected branch. window_key, window_value: of the window, [B, N, K, D]; by default the same.
    block_size, top_k: blocks of keys that each token and key/value head selects, the first one, the token's own and the
        one before it always among them (equations 8 to 12). `indices`, int [B, N, K, S] as of `attention`: given ones.
    window: how many keys up to its own a token sees in the window. scale: of the scores; 1/sqrt(D) by default.

    Gradients of query, keys, values, compressed ones and gates are exact for the blocks that were selected. Works under
    torch.compile without a graph break. Raises ValueError for shapes that do not fit.

    >>> import torch
    >>> from dilabench.attention import native_sparse_attention
    >>> q, k, v = (torch.randn(1, 200, heads, 16) for heads in (4, 2, 2))
    >>> native_sparse_attention(q, k, v, torch.rand(1, 200, 4, 3), top_k=3, window=20).shape
    torch.Size([1, 200, 4, 16])
    """
    operands.check_are_tensors(query=query, key=key, value=value, gates=gates)
    operands.check_operands(query.shape, key.shape, value.shape)
    operands.check_kinds((x.dtype, x.device) for x in (query, key, value))
    if gates.shape != (*query.shape[:3], BRANCHES):
        raise ValueError(f"gates {tuple(gates.shape)} must be {(*query.shape[:3], BRANCHES)}: one for each branch")
    if gates.device != query.device:
        raise ValueError(f"gates are on {gates.device} and query on {query.device}; move one of them")
    operands.check_options({"scale": scale})
    operands.check_scale(scale)
    least = {"block_size": "one key", "top_k": "the token's own block", "window": "the token itself"}
    for (name, meaning), number in zip(least.items(), (block_size, top_k, window), strict=True):
        if not isinstance(number, int | torch.SymInt) or number < 1:
            raise ValueError(f"{name} {number!r:.80} must be a whole number of at least 1, {meaning}")
    check_block(block_size)
    spans = compression_length, compression_stride
    compression = Compression(*spans)
    factor = query.shape[-1] ** -0.5 if scale is None else float(scale)
    keys = block_means(key, *spans) if compressed_key is None else compressed_key
    values = block_means(value, *spans) if compressed_value is None else compressed_value
    compressed, _ = compressed_attention(query, keys, values, compression, factor)
    if indices is None:
        blocks = block_size, top_k, _BLOCKS.initial, _BLOCKS.local
        indices = selected_by_compression(query, keys, spans, factor, blocks)
    unbounded = {"window": (-1, -1), "sink": None, "cu_seqlens": None}
    selected, _ = selected_attention(query, key, value, indices, block_size, causal=True, scale=factor, **unbounded)  # type: ignore[arg-type]
    near = dilated_attention(
        query,
        key if window_key is None else window_key,
        value if window_value is None else window_value,
        segment_lengths=(),
        dilation_rates=(),
        causal=True,
        window=(window - 1, 0),
        scale=factor,
    )
    parts = zip((compressed, selected, near), gates.unbind(-1), strict=True)
    first, *others = (part * gate[..., None] for part, gate in parts)
    return sum(others, start=first)


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
        if not self.compression.count(x.shape[1]):
            return x[:, :0]
        # [B, C, K, D, length]
        blocks = x.unfold(1, self.compression.length, self.compression.stride).transpose(-1, -2)
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
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}")
        if head_dim is None:
            if embed_dim % num_heads:
                raise ValueError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}; give head_dim")
            head_dim = embed_dim // num_heads
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

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, E] of x [B, N, E]. Raises ValueError for other shapes and for what is no tensor."""
        way_out = "packed sequences (cu_seqlens) are not supported, one sequence is [1, N, E]"
        check_embeddings("[B, N, E]", self.embed_dim, way_out, x=x)
        heads = (BRANCHES, self.num_kv_heads, self.head_dim)
        query = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        keys = self.k_proj(x).unflatten(-1, heads).unbind(-3)
        values = self.v_proj(x).unflatten(-1, heads).unbind(-3)
        if self.position is not None:
            query, keys = self.position(query), tuple(map(self.position, keys))
        gates = self.gate_proj(x).sigmoid().unflatten(-1, (self.num_heads, BRANCHES))
        out = native_sparse_attention(
            query,
            keys[1],
            values[1],
            gates,
            compressed_key=self.compress_key(keys[0]),
            compressed_value=self.compress_value(values[0]),
            window_key=keys[2],
            window_value=values[2],
            compression_length=self.compression_length,
            compression_stride=self.compression_stride,
            block_size=self.block_size,
            top_k=self.top_k,
            window=self.window,
        )
        result: Tensor = self.out_proj(out.flatten(-2))
        return result
