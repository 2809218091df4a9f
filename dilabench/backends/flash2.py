"""The flash-attn package, version 2.7 or newer: float16 and bfloat16 on sm_80 and newer, head dim up to 256.

Adapted to the library's documented interface (flash_attn.flash_attn_interface) and tested against its recorded
signature; the kernel itself could not be run where this was written.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dilabench.backends.adapt import CUDA_KERNEL, Call, adapted, adapted_packed


def _forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    from flash_attn import flash_attn_interface as library

    function = library._flash_attn_varlen_forward if call.sequences else library._flash_attn_forward
    out, lse, *_ = function(q, k, v, **_options(call), return_softmax=False)
    return out, lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn import flash_attn_interface as library

    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    function = library._flash_attn_varlen_backward if call.sequences else library._flash_attn_backward
    function(dout, q, k, v, out, lse, dq, dk, dv, **_options(call), deterministic=False)
    return dq, dk, dv


def _options(call: Call) -> dict[str, Any]:
    """The arguments that the library's forward and backward have in common."""
    return {
        **call.varlen(),
        "dropout_p": 0.0,
        "softmax_scale": call.scale,
        "causal": call.band.causal,
        "window_size_left": call.band.left,
        "window_size_right": call.band.right,
        "softcap": call.softcap,
        "alibi_slopes": None,
    }


PLAIN = replace(CUDA_KERNEL, softcap=True)
attend, attend_backward = adapted(_forward, _backward, PLAIN)
packed = adapted_packed(_forward, _backward, replace(PLAIN, aligns_ends=True))
