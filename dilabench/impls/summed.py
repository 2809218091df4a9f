"""Sums of attentions under gates (`Pattern.summands`): out = sum_p g_p · attention_p(q, k_p, v_p), a softmax each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dilabench.workload.spec import Workload


@dataclass(frozen=True, slots=True)
class Part:
    """One attention of a sum: its own workload, how many positions a key is the mean of, its gates [N, H], and
    positions from one mean to the next."""

    workload: Workload
    pool: int
    gates: Tensor
    stride: int

    def keys(self, x: Tensor) -> Tensor:
        """k or v [B, N, K, D] as this attention has them: means at the last position of each whole block, else 0."""
        if self.pool == 1:
            return x
        keys = x.new_zeros(x.shape)
        keys[:, self.pool - 1 :: self.stride] = block_means(x, self.pool, self.stride)
        return keys


def block_means(x: Tensor, pool: int, stride: int) -> Tensor:
    """[B, n, K, D]: the means of whole blocks of `pool` positions, one every `stride`, of x [B, N, K, D]."""
    return x.unfold(1, pool, stride).mean(-1) if x.shape[1] >= pool else x[:, :0]


def block_means_backward(gradient: Tensor, pool: int, stride: int) -> Tensor:
    """The transpose of `block_means`, for `pool` a multiple of `stride`: [B, n, K, D] gives the gradient of the first
    (n - 1) · stride + pool positions.
    """
    count, overlap = gradient.shape[1], pool // stride
    if not count:
        return gradient
    strips = gradient.new_zeros((gradient.shape[0], count + overlap - 1, *gradient.shape[2:]))
    for shift in range(overlap):
        strips[:, shift : shift + count] += gradient
    return (strips / pool).repeat_interleave(stride, 1)


def parts_of(workload: Workload, device: torch.device, dtype: torch.dtype) -> Iterator[Part]:
    """The attentions whose sum is the workload, empty if it is one softmax; gates in `dtype`.

    Raises ValueError for packed sequences, in which blocks would restart.
    """
    shapes = workload.shapes
    if not workload.pattern.summands(shapes[0]):
        return
    if workload.layout == "packed":
        raise ValueError(f"{workload.pattern.label()} is not computed over packed sequences; use layout=padded")
    for pattern, pool, gates, stride in workload.pattern.summands(shapes[0]):
        alone = workload.model_copy(update={"pattern": pattern})
        yield Part(alone, pool, torch.from_numpy(gates).to(device, dtype), stride)
