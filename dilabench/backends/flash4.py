"""FlashAttention 4 (flash_attn.cute, CuTe DSL): float16 and bfloat16 on Hopper and newer, head dim up to 256.

The first call of each class of shapes compiles for some 10 s, once on a machine: the library keeps what it compiled on
disk if it is told so before it is imported, as here (FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=0 keeps nothing;
FLASH_ATTENTION_CUTE_DSL_CACHE_DIR says where). K, V, out and dout are read through any outer strides; tensors past 2^32
elements came out right on an H200.
"""

from __future__ import annotations

import os
from dataclasses import replace

from torch import Tensor

from dilabench.backends.adapt import CUDA_KERNEL, Sequences, adapted, adapted_packed, varlen_arguments
from dilabench.backends.band import Band

os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    band: Band,
    scale: float,
    out: Tensor | None = None,
    sequences: Sequences | None = None,
) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    # The outputs after lse belong to other kernels of the library; their number differs between its versions.
    out, lse, *_ = _flash_attn_fwd(
        q,
        k,
        v,
        **varlen_arguments(sequences),
        softmax_scale=scale,
        causal=band.causal,
        window_size_left=_bound(band.left),
        window_size_right=_bound(band.right),
        return_lse=True,
        out=out,
    )
    return out, lse


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    band: Band,
    scale: float,
    dq: Tensor | None = None,
    sequences: Sequences | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    dq, dk, dv, *_ = _flash_attn_bwd(
        q,
        k,
        v,
        out,
        dout,
        lse,
        softmax_scale=scale,
        causal=band.causal,
        window_size_left=_bound(band.left),
        window_size_right=_bound(band.right),
        **varlen_arguments(sequences),
        dq=dq,
    )
    return dq, dk, dv


def _bound(side: int) -> int | None:
    """A side of the window as the library writes it: None is unbounded."""
    return side if side >= 0 else None


PLAIN = replace(CUDA_KERNEL, forward_span=None, backward_span=None, aligns_ends=True, places_results=True)
attend, attend_backward = adapted(_forward, _backward, PLAIN)
packed = adapted_packed(_forward, _backward, PLAIN)
