"""FlashAttention 4 (flash_attn.cute, CuTe DSL): float16 and bfloat16 on Hopper and newer, head dim up to 256.

The first call of each class of shapes compiles for some 10 s, once per machine: the library caches compiled kernels on
disk if this is enabled before its import, as here (FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=0 disables it,
FLASH_ATTENTION_CUTE_DSL_CACHE_DIR sets the folder). K, V, out and dout are read through any outer strides; tensors past
2^32 elements gave correct results on an H200.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from torch import Tensor

from dilabench.backends.adapt import CUDA_KERNEL, Call, adapted, adapted_packed

os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


def _forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    # The outputs after lse belong to other kernels of the library; their number differs between its versions.
    out, lse, *_ = _flash_attn_fwd(q, k, v, **_options(call), return_lse=True, out=call.place)
    return out, lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    dq, dk, dv, *_ = _flash_attn_bwd(q, k, v, out, dout, lse, **_options(call), dq=call.place)
    return dq, dk, dv


def _options(call: Call) -> dict[str, Any]:
    """The arguments that the library's forward and backward have in common."""
    # None is an unbounded side of the window.
    left, right = (side if side >= 0 else None for side in (call.band.left, call.band.right))
    return {
        **call.varlen(),
        "softmax_scale": call.scale,
        "causal": call.band.causal,
        "window_size_left": left,
        "window_size_right": right,
    }


PLAIN = replace(CUDA_KERNEL, forward_span=None, backward_span=None, aligns_ends=True, places_results=True)
attend, attend_backward = adapted(_forward, _backward, PLAIN)
# Over packed sequences of head dim 48, 4.0.0b36 wrote dq for the first 64 tokens alone (fp16, not causal, H200).
# 64 and 128 are right there.
packed = adapted_packed(_forward, _backward, replace(PLAIN, head_dim_multiple=64))
