"""Values instead of attention, to time what remains of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Values(torch.autograd.Function):
    """The values of each query's own token, [B, M, H, D], the last ones. Gradients of query and key are there, and 0,
    so that the layers before them have their backward pass.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [B, H, M, D], key and value [B, K, N, D]."""
        ctx.save_for_backward(query, key)
        own = value[:, :, -query.shape[2] :]
        return own.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sums over the heads that share a value."""
        query, key = ctx.saved_tensors
        dvalue = dout.transpose(1, 2).unflatten(1, (key.shape[1], -1)).sum(2)
        return torch.zeros_like(query), torch.zeros_like(key), dvalue
