"""`gather-multihead` and `strided-multihead`: projections around attention, as a torch module on embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from dilabench.contracts import AttentionFn, BuildContext
from dilabench.workload.spec import Workload

SEED = 0


def check_embeddings(shape: str, width: int, way_out: str, **embeddings: object) -> None:
    """Raise ValueError for embeddings, by name, that are no tensor or not `shape` ('[B, N, E]') with E = `width`."""
    for name, x in embeddings.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} is a {type(x).__module__}.{type(x).__qualname__}; give a tensor {shape}")
        if x.ndim != shape.count(",") + 1:
            raise ValueError(f"{name} {tuple(x.shape)} must be {shape} with E = {width}; {way_out}")
        if x.shape[-1] != width:
            raise ValueError(f"{name} {tuple(x.shape)} must be {shape} with E = {width}, the embed_dim of the module")


def check_sizes(least: int = 1, /, **sizes: Any) -> None:
    """Raise ValueError for sizes, by name, that are no whole numbers of at least `least`."""
    for name, size in sizes.items():
        whole = None
        with suppress(TypeError):
            # numpy's integers are whole numbers, too.
            whole = index(size)
        if whole is None or isinstance(size, Tensor) or whole < least:
            raise ValueError(f"{name} {size!r:.80} must be a whole number of at least {least}")


class ProjectedAttention(nn.Module):
    """Query, key, value and output projections around an attention function.

    `attention` is called with q [B, N, H, D] and k, v [B, N, K, D], where D = embed_dim / num_heads. With `norm` its
    result is layer-normalised over all heads before the output projection, as LongNet's sub-layer norm does. Raises
    ValueError for sizes that are no whole numbers above 0, or that do not divide.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        attention: AttentionFn,
        *,
        num_kv_heads: int | None = None,
        bias: bool = True,
        norm: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_sizes(embed_dim=embed_dim, num_heads=num_heads, num_kv_heads=num_kv_heads)
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.attention = attention
        kv_dim = num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.k_proj = nn.Linear(embed_dim, kv_dim, bias=bias, device=device, dtype=dtype)
        self.v_proj = nn.Linear(embed_dim, kv_dim, bias=bias, device=device, dtype=dtype)
        self.norm = nn.LayerNorm(embed_dim, device=device, dtype=dtype) if norm else nn.Identity()
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Xavier-uniform weights and zero biases, drawn from the generator (torch's global one by default)."""
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            nn.init.xavier_uniform_(linear.weight, generator=generator)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        if isinstance(self.norm, nn.LayerNorm):
            self.norm.reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """[B, N, E] of query [B, N, E]; without a key it is the query, without a value it is the key.

        With `cu_seqlens`, ascending bounds of packed sequences from 0: [T, E] of query [T, E]. cache: given to the
        attention function, which adds keys and values to it. Raises ValueError for
        other shapes and for what is no tensor.
        """
        key = query if key is None else key
        value = key if value is None else value
        if cu_seqlens is None:
            way_out = "packed sequences [T, E] take cu_seqlens, one sequence is [1, N, E]"
            check_embeddings("[B, N, E]", self.embed_dim, way_out, query=query, key=key, value=value)
        else:
            way_out = "leave out the batch axis, or cu_seqlens"
            check_embeddings("[T, E]", self.embed_dim, way_out, query=query, key=key, value=value)
        q = self.q_proj(query).unflatten(-1, (self.num_heads, self.head_dim))
        k = self.k_proj(key).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = self.v_proj(value).unflatten(-1, (self.num_kv_heads, self.head_dim))
        # Not every attention function takes bounds, or a cache.
        options = {name: given for name, given in (("cu_seqlens", cu_seqlens), ("cache", cache)) if given is not None}
        return self.out_proj(self.norm(self.attention(q, k, v, **options).flatten(-2)))


def build_gather(workload: Workload, context: BuildContext) -> ProjectedAttention:
    """The module around `gather`."""
    from dilabench.impls import gather

    return _seeded(workload, context, gather.build(workload, context))


def build_strided(workload: Workload, context: BuildContext) -> ProjectedAttention:
    """The module around `strided`."""
    from dilabench.impls import strided

    return _seeded(workload, context, strided.build(workload, context))


def _seeded(workload: Workload, context: BuildContext, attention: AttentionFn) -> ProjectedAttention:
    """The same parameters on every device and in every process: drawn on the CPU in float32, then converted."""
    module = ProjectedAttention(
        workload.num_heads * workload.head_dim, workload.num_heads, attention, num_kv_heads=workload.num_kv_heads
    )
    module.reset_parameters(torch.Generator().manual_seed(SEED))
    return module.to(context.device, getattr(torch, workload.dtype))
