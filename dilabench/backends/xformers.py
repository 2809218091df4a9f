"""xformers' memory-efficient attention: the library chooses among its kernels (FlashAttention 2 or 3, cutlass).

K/V heads are repeated for grouped queries: the library's backward has no grouped form.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from dilabench.backends.adapt import CUDA_KERNEL, Call, adapted
from dilabench.backends.band import Band


def _forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    from xformers.ops import fmha

    bias = _bias(call.band, q.shape[1])
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(q, k, v, bias, scale=call.scale)
    # The cutlass kernel pads lse to a multiple of 32 queries.
    return out, lse[:, :, : q.shape[1]]


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    from xformers.ops import fmha

    bias = _bias(call.band, q.shape[1])
    dq, dk, dv = fmha.memory_efficient_attention_backward(dout, out.contiguous(), lse, q, k, v, bias, scale=call.scale)
    return dq, dk, dv


def _bias(band: Band, length: int) -> Any:
    """The library's name for a band over equally many queries and keys."""
    from xformers.ops.fmha import attn_bias

    if band.full:
        return None
    if not band.windowed:
        return attn_bias.LowerTriangularMask()
    if band.causal:
        return attn_bias.LowerTriangularFromBottomRightLocalAttentionMask(band.left + 1)
    left, right = (side if side >= 0 else length for side in (band.left, band.right))
    return attn_bias.LocalAttentionFromBottomRightMask(window_left=left, window_right=right)


attend, attend_backward = adapted(_forward, _backward, replace(CUDA_KERNEL, grouped_heads=False))
