"""torch's flash attention kernel for CPUs, in float32 where that is faster than in half precision.

On an AMD EPYC with AVX-512 (two threads, torch 2.13, 8,192 rows in segments of 32 to 1,024, head dims 32 to 192) the
backward pass in float16 took 2.8 to 11 times as long as in float32 with all conversions, the forward pass 1.3 to 2.6
times: without float16 instructions, products are computed element by element. In bfloat16 the backward pass took 1.0 to
8.5 times as long up to head dim 128 for fewer than 192 rows, where the kernel takes blocks of 32 queries, and 0.6 to
1.3 times for more.
"""

from __future__ import annotations

import platform

import torch
from torch import Tensor

_forward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# From this many queries on the kernel takes blocks of 64.
_LARGER_BLOCKS = 192
_LARGEST_HEAD_DIM = 128
# Both were measured only on x86, and without tile registers, which multiply bfloat16 several times as fast.
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
_MULTIPLIES_FLOAT16 = not _IS_X86 or torch.ops.mkldnn._is_mkldnn_fp16_supported()
_MULTIPLIES_TILES = not _IS_X86 or torch.cpu._is_amx_tile_supported()


def compute_dtype(q: Tensor, *, backward: bool) -> torch.dtype:
    """The dtype of a pass for queries [..., L, D]; an additive mask must have it."""
    if q.dtype == torch.float16 and not _MULTIPLIES_FLOAT16:
        return torch.float32
    if backward and q.dtype == torch.bfloat16 and not _MULTIPLIES_TILES:
        rows, dim = q.shape[-2:]
        return torch.float32 if rows < _LARGER_BLOCKS and dim <= _LARGEST_HEAD_DIM else q.dtype
    return q.dtype


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out [B, H, L, D] in the dtype of q, and lse [B, H, L] (float32; float64 for float64); with as many heads of keys
    as of queries.
    """
    dtype = compute_dtype(q, backward=False)
    out, lse = _forward_op(*(x.to(dtype) for x in (q, k, v)), 0.0, causal, attn_mask=mask, scale=scale)
    return out.to(q.dtype), lse


def attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the dtype of the computation; out and lse may belong to a larger softmax."""
    dtype = compute_dtype(q, backward=True)
    operands = (x.to(dtype) for x in (dout, q, k, v, out))
    dq, dk, dv = _backward_op(*operands, lse, 0.0, causal, attn_mask=mask, scale=scale)
    return dq, dk, dv
