"""torch's memory-efficient (cutlass) attention: the fallback for float32 and for GPUs older than sm_80.

Windows only under a causal mask. K/V heads are repeated for grouped queries. Strides are 32-bit in the kernel; torch
refuses a tensor that needs more.
For packed sequences the kernel pads lse to the longest one: 4 bytes for each sequence, head and position in it, which
is a lot if one sequence is far longer than many others.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dilabench.backends.adapt import CUDA_KERNEL, Call, adapted, adapted_packed
from dilabench.backends.band import Band

# The kernel writes and reads lse rows in aligned groups of this many queries; an infinite lse gives weight 0.
LSE_ALIGNMENT = 32
NO_MASK, CAUSAL_FROM_TOP_LEFT, CAUSAL_FROM_BOTTOM_RIGHT = 0, 1, 2


def _forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    sequences = call.sequences
    if sequences is None:
        out, lse = _run(q, k, v, call, None, None, None, None)
        return out, lse[:, :, : q.shape[1]]
    bounds = sequences.cu_seqlens, sequences.cu_seqlens_k, sequences.longest, sequences.longest_k
    out, padded_lse = _run(q[None], k[None], v[None], call, *bounds)
    sequence, place = _places(sequences.cu_seqlens, q.shape[0])
    return out[0], padded_lse[sequence, :, place].T.contiguous()


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    sequences = call.sequences
    if sequences is None:
        padded_lse = torch.nn.functional.pad(lse, (0, -lse.shape[2] % LSE_ALIGNMENT), value=float("inf"))
        return _run_backward(dout, q, k, v, out, padded_lse, call, None, None, q.shape[1], k.shape[1])
    rows = sequences.longest + -sequences.longest % LSE_ALIGNMENT
    padded_lse = lse.new_full((len(sequences.cu_seqlens) - 1, lse.shape[0], rows), float("inf"))
    sequence, place = _places(sequences.cu_seqlens, q.shape[0])
    padded_lse[sequence, :, place] = lse.T
    bounds = sequences.cu_seqlens, sequences.cu_seqlens_k, sequences.longest, sequences.longest_k
    tensors = dout[None], q[None], k[None], v[None], out[None]
    dq, dk, dv = _run_backward(*tensors, padded_lse, call, *bounds)
    return dq[0], dk[0], dv[0]


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    longest: int | None,
    longest_k: int | None,
) -> tuple[Tensor, Tensor]:
    """out, and lse with the kernel's row length."""
    bounds = cu_seqlens, cu_seqlens_k, longest, longest_k
    out, lse, *_ = torch.ops.aten._efficient_attention_forward(
        q, k, v, None, *bounds, 0.0, _mask(call), True, scale=call.scale, window_size=_window_size(call.band)
    )
    return out, lse


def _run_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    padded_lse: Tensor,
    call: Call,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    longest: int,
    longest_k: int,
) -> tuple[Tensor, Tensor, Tensor]:
    # The state of the random generator is read only with dropout.
    unread = torch.empty((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = torch.ops.aten._efficient_attention_backward(
        dout,
        q,
        k,
        v,
        None,
        # The kernel receives out's batch and head strides, and assumes a row stride of H·D.
        out.contiguous(),
        cu_seqlens,
        cu_seqlens_k,
        longest,
        longest_k,
        padded_lse,
        0.0,
        unread,
        unread,
        _mask(call),
        False,
        scale=call.scale,
        window_size=_window_size(call.band),
    )
    return dq, dk, dv


def _mask(call: Call) -> int:
    if not call.band.causal:
        return NO_MASK
    return CAUSAL_FROM_TOP_LEFT if call.sequences is None else CAUSAL_FROM_BOTTOM_RIGHT


def _window_size(band: Band) -> int | None:
    """Keys that a query sees, itself included. Raises ValueError for a window that looks ahead."""
    if band.windowed and not band.causal:
        raise ValueError(f"{band} looks ahead; sdpa-efficient has only causal windows, use another backend")
    return band.left + 1 if band.windowed else None


def _places(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The sequence of each token, and its position in it, without a host synchronisation."""
    token = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    sequence = torch.bucketize(token, cu_seqlens[1:], right=True)
    return sequence, token - cu_seqlens[sequence]


# Correct past 2^32 elements on an H200.
PLAIN = replace(CUDA_KERNEL, value_dim=True, grouped_heads=False, forward_span=None, backward_span=None)
attend, attend_backward = adapted(_forward, _backward, PLAIN)
# No aligned ends: under a window over more keys than queries its backward pass was wrong on an H200 (torch 2.11).
packed = adapted_packed(_forward, _backward, PLAIN)
