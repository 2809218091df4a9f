"""cuDNN's fused attention through torch: float16 and bfloat16 on sm_80 and newer, no window, head dims up to 128.

On compute capability 9.0 (H100, H200) head dims of keys and values up to 256, from cuDNN 9.10 on, which torch's wheels
have.

torch caches an execution plan per shape and strides of q, k and v, not of out and dout. A plan for one layout of out
must never be used with another, so out and dout are passed directly only if they have q's layout; otherwise q, out and
dout are all passed as contiguous copies, which is again one layout per key.
cuDNN refuses one query with one key; such a call gets a second query of zeros, whose gradient is zero.
Its backward fails from element 2^31 on: dq and dk were wrong there on an H200 (cuDNN 9.19), without an error.
Its forward is right there, and at 2^34.

There is no packed kernel here. torch's operators `_cudnn_attention_forward` and `_backward` accept bounds of sequences
and give cuDNN ragged layouts, but torch 2.11 to 2.13 never store the execution plan in the cache that they search, so
that every call rebuilds it in 42 ms (fixed later by pytorch/pytorch#191576). torch's `varlen_attn` does not use them
either. Ragged offsets are int32 in elements there.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from dilabench.backends.adapt import CUDA_KERNEL, Call, adapted


def _forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    if call.band.windowed:
        raise ValueError(f"{call.band} is a window, which torch does not pass on to cuDNN; use another backend")
    if refused := q.shape[1] == k.shape[1] == 1:
        q = _with_second_query(q)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        None,
        True,
        0.0,
        call.band.causal,
        False,
        scale=call.scale,
    )
    # The operators' lse is [B, H, M, 1].
    out, lse = out.transpose(1, 2), lse.squeeze(-1)
    return (out[:, :1], lse[:, :, :1]) if refused else (out, lse)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    if refused := q.shape[1] == k.shape[1] == 1:
        q, out, dout = _with_second_query(q), _with_second_query(out), _with_second_query(dout)
        lse = torch.nn.functional.pad(lse, (0, 1))
    if not (_laid_out_like(out, q) and _laid_out_like(dout, q)):
        q, out, dout = q.contiguous(), out.contiguous(), dout.contiguous()
    # The state of the random generator is read only with dropout.
    unread = (_unread if type(q) is Tensor else _unread.__wrapped__)(q.device)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
        dout.transpose(1, 2),
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        out.transpose(1, 2),
        lse.unsqueeze(-1),
        unread,
        unread,
        None,
        None,
        None,
        q.shape[1],
        k.shape[1],
        0.0,
        call.band.causal,
        scale=call.scale,
    )
    dq, dk, dv = dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
    return (dq[:, :1] if refused else dq), dk, dv


@cache
def _unread(device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


def _with_second_query(x: Tensor) -> Tensor:
    """[B, 1, H, D] -> [B, 2, H, D], the second row zero."""
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1))


def _laid_out_like(x: Tensor, q: Tensor) -> bool:
    """Return True for equal strides in all dimensions with more than one element."""
    return x.stride() == q.stride() or all(
        a == b for a, b, size in zip(x.stride(), q.stride(), q.shape, strict=True) if size > 1
    )


attend, attend_backward = adapted(
    _forward, _backward, replace(CUDA_KERNEL, forward_span=None, value_dim=True), derivative="of one layout"
)
