"""FlashAttention 3 (module flash_attn_interface, distribution flash_attn_3): float16 and bfloat16 on Hopper.

Adapted to the library's documented interface in its form with `window_size_left` and `is_causal`, and tested against
that recorded signature; the kernel itself could not be run where this was written.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dilabench.backends.adapt import CUDA_KERNEL, Sequences, adapted, adapted_packed, varlen_arguments
from dilabench.backends.band import Band


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    band: Band,
    scale: float,
    sequences: Sequences | None = None,
) -> tuple[Tensor, Tensor]:
    from flash_attn_interface import _flash_attn_forward

    out, lse, *_ = _flash_attn_forward(
        q,
        k,
        v,
        **varlen_arguments(sequences),
        softmax_scale=scale,
        causal=band.causal,
        window_size_left=band.left,
        window_size_right=band.right,
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
    sequences: Sequences | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn_interface import _flash_attn_backward

    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    _flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        **varlen_arguments(sequences),
        dq=dq,
        dk=dk,
        dv=dv,
        softmax_scale=scale,
        is_causal=band.causal,
        window_size_left=band.left,
        window_size_right=band.right,
    )
    return dq, dk, dv


attend, attend_backward = adapted(_forward, _backward, CUDA_KERNEL)
packed = adapted_packed(_forward, _backward, replace(CUDA_KERNEL, aligns_ends=True))
