"""The flash-attn package, version 2.7 or newer: float16 and bfloat16 on sm_80 and newer, head dim up to 256.

Adapted to the library's documented interface (flash_attn.flash_attn_interface) and tested against its recorded
signature; the kernel itself could not be run where this was written.
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
    from flash_attn import flash_attn_interface as library

    call = library._flash_attn_forward if sequences is None else library._flash_attn_varlen_forward
    out, lse, *_ = call(
        q,
        k,
        v,
        **varlen_arguments(sequences),
        dropout_p=0.0,
        softmax_scale=scale,
        causal=band.causal,
        window_size_left=band.left,
        window_size_right=band.right,
        softcap=0.0,
        alibi_slopes=None,
        return_softmax=False,
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
    from flash_attn import flash_attn_interface as library

    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    call = library._flash_attn_backward if sequences is None else library._flash_attn_varlen_backward
    call(
        dout,
        q,
        k,
        v,
        out,
        lse,
        dq,
        dk,
        dv,
        **varlen_arguments(sequences),
        dropout_p=0.0,
        softmax_scale=scale,
        causal=band.causal,
        window_size_left=band.left,
        window_size_right=band.right,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
    )
    return dq, dk, dv


attend, attend_backward = adapted(_forward, _backward, CUDA_KERNEL)
packed = adapted_packed(_forward, _backward, replace(CUDA_KERNEL, aligns_ends=True))
