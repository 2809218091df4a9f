"""What steps of models share: targets, their losses, and values instead of attention, to time what remains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dilabench.workload.spec import Workload

SEED = 0


def drawn_targets(workload: Workload) -> Tensor:
    """A target of each token, [B, N], always the same."""
    assert workload.model is not None
    shape = workload.batch_size, workload.seq_len
    return torch.randint(workload.model.vocabulary, shape, generator=torch.Generator().manual_seed(SEED))


def losses(logits: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """The loss of each token, [B, N, 1], of logits [B, N, V] in at least float32; dtype: of the model."""
    wide = logits.to(torch.promote_types(dtype, torch.float32)).flatten(0, 1)
    return functional.cross_entropy(wide, targets.flatten(), reduction="none").view(*targets.shape, 1)


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
