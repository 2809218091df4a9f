"""FlashAttention 3 (module flash_attn_interface, distribution flash_attn_3): float16 and bfloat16 on Hopper.

Adapted to the library's documented interface in its form with `window_size_left` and `is_causal`, and tested against
that recorded signature; the kernel itself could not be run where this was written.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dilabench.backends.adapt import CUDA_KERNEL, Call, adapted, adapted_packed


def _forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    from flash_attn_interface import _flash_attn_forward

    out, lse, *_ = _flash_attn_forward(q, k, v, **_options(call), causal=call.band.causal)
    return out, lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn_interface import _flash_attn_backward

    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    _flash_attn_backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, **_options(call), is_causal=call.band.causal)
    return dq, dk, dv


def _options(call: Call) -> dict[str, Any]:
    """The arguments that the library's forward and backward have in common."""
    return {
        **call.varlen(),
        "softmax_scale": call.scale,
        "window_size_left": call.band.left,
        "window_size_right": call.band.right,
        "softcap": call.softcap,
    }


PLAIN = replace(CUDA_KERNEL, softcap=True)
attend, attend_backward = adapted(_forward, _backward, PLAIN)
packed = adapted_packed(_forward, _backward, replace(PLAIN, aligns_ends=True))
