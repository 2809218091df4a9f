"""FlashAttention 2 as built into torch: float16 and bfloat16 on sm_80 and newer, head dim up to 256, windows, GQA.

Any outer strides are read in place; the backward copies out and dout when they are views (inside torch). Past 2^31
elements the backward ended in an illegal memory access on an H200 (torch 2.11); the forward is right there.
Its causal mask and windows start from the last query at the last key, as in FlashAttention 2.1 and newer.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dilabench.backends.adapt import CUDA_KERNEL, Call, Sequences, adapted, adapted_packed
from dilabench.backends.band import Band


def _forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward.default(
        q, k, v, *_bounds(q, k, call.sequences), 0.0, call.band.causal, False, scale=call.scale, **_window(call.band)
    )
    return out, lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    # The random generator's state and the tensor after it are read only with dropout.
    unread = torch.empty(2, dtype=torch.int64, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward.default(
        dout,
        q,
        k,
        v,
        out,
        lse,
        *_bounds(q, k, call.sequences),
        0.0,
        call.band.causal,
        unread,
        unread,
        scale=call.scale,
        **_window(call.band),
    )
    return dq, dk, dv


def _bounds(q: Tensor, k: Tensor, sequences: Sequences | None) -> tuple[Tensor | None, Tensor | None, int, int]:
    """The starts of sequences among queries and keys, None in a batch; and the longest of both."""
    if sequences is None:
        return None, None, q.shape[1], k.shape[1]
    return sequences.cu_seqlens, sequences.cu_seqlens_k, sequences.longest, sequences.longest_k


def _window(band: Band) -> dict[str, int]:
    """The kernel's window, if there is one; torch treats an absent one as unbounded."""
    return {"window_size_left": band.left, "window_size_right": band.right} if band.windowed else {}


PLAIN = replace(CUDA_KERNEL, forward_span=None)
attend, attend_backward = adapted(_forward, _backward, PLAIN, derivative="of any layout")
packed = adapted_packed(_forward, _backward, replace(PLAIN, aligns_ends=True))
