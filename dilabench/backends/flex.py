"""FlexAttention: a compiled Triton kernel with the band as block mask.

The library has no backward from a given out and lse, so it is derived from its autograd: with s the share that these
keys have in the larger softmax, s = exp(lse_here - lse), the larger out is a sum of s·out_here over sets of keys, hence

    d out_here = s · dout        d lse_here = s · rowsum(dout · (out_here - out))

This is exact and costs one more forward than a plain backward.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from dilabench.backends.adapt import CUDA_KERNEL, adapted
from dilabench.backends.band import Band

# torch 2.9 replaced return_lse=True (a tuple with lse) by return_aux (a tuple with a record).
_ASK_FOR_LSE: dict[str, Any] = (
    {"return_aux": flex.AuxRequest(lse=True)} if hasattr(flex, "AuxRequest") else {"return_lse": True}
)


def _call(q: Tensor, k: Tensor, v: Tensor, mask: flex.BlockMask | None, scale: float) -> tuple[Tensor, Any]:
    return flex.flex_attention(
        q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1], **_ASK_FOR_LSE
    )


@functools.lru_cache(maxsize=64)
def _compiled(*_key: object) -> Callable[..., tuple[Tensor, Any]]:
    """A compiled kernel for each class of shapes: torch.compile gives up on one function after eight of them.

    `fullgraph` turns what would be a silent fall to the quadratic eager form into an error.
    """
    own_code = types.FunctionType(_call.__code__.replace(), _call.__globals__)
    return torch.compile(own_code, fullgraph=True, dynamic=False)


@functools.lru_cache(maxsize=32)
def _block_mask(band: Band, length: int, device: torch.device) -> flex.BlockMask:
    left = band.left if band.left >= 0 else length
    right = band.right if band.right >= 0 else length

    def visible(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j >= i - left) & (j <= i + right)

    return flex.create_block_mask(visible, None, None, length, length, device=str(device))


def _forward(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
    mask = None if band.full else _block_mask(band, q.shape[1], q.device)
    run = _compiled(q.shape, k.shape, q.dtype, band, q.requires_grad)
    out, lse = run(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, scale)
    return out.transpose(1, 2), lse if isinstance(lse, Tensor) else lse.lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Band, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out_here, lse_here = _forward(q, k, v, band, scale)
    share = torch.exp(lse_here.detach() - lse)
    dlse_here = share * (dout.float() * (out_here.detach().float() - out.float())).sum(-1).transpose(1, 2)
    dout_here = (dout * share.transpose(1, 2).unsqueeze(-1)).to(dout.dtype)
    dq, dk, dv = torch.autograd.grad((out_here, lse_here), (q, k, v), (dout_here, dlse_here))
    return dq, dk, dv


attend, attend_backward = adapted(_forward, _backward, replace(CUDA_KERNEL, head_dim_multiple=16))
