"""Sums of attentions under gates (`Pattern.summands`): out = sum_p g_p · attention_p(q, k_p, v_p), a softmax each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilabench.workload.spec import Workload
from dilabench.workload.visibility import covered


@dataclass(frozen=True, slots=True)
class Part:
    """One attention of a sum: its own workload, how many positions a key is the mean of, and its gates [N, H]."""

    workload: Workload
    pool: int
    gates: Tensor

    def keys(self, x: Tensor) -> Tensor:
        """k or v [B, N, K, D] as this attention has them: means at the last position of each whole block, else 0."""
        if self.pool == 1:
            return x
        keys = x.new_zeros(x.shape)
        keys[:, self.pool - 1 :: self.pool] = block_means(x, self.pool)
        return keys

    def keys_backward(self, gradient: Tensor) -> Tensor:
        """The transpose of `keys`: the gradient of x from that of `keys(x)`."""
        if self.pool == 1:
            return gradient
        whole = block_means_backward(gradient[:, self.pool - 1 :: self.pool], self.pool)
        of_x = torch.zeros_like(gradient)
        of_x[:, : whole.shape[1]] = whole
        return of_x


def block_means(x: Tensor, pool: int) -> Tensor:
    """[B, N // pool, K, D]: the means of whole blocks of `pool` positions of x [B, N, K, D]."""
    whole = x.shape[1] // pool
    return x[:, : whole * pool].unflatten(1, (whole, pool)).mean(2)


def block_means_backward(gradient: Tensor, pool: int) -> Tensor:
    """The transpose of `block_means`: [B, n, K, D] -> [B, n · pool, K, D]."""
    return (gradient / pool).repeat_interleave(pool, 1)


def parts_of(workload: Workload, device: torch.device, dtype: torch.dtype) -> Iterator[Part]:
    """The attentions whose sum is the workload, empty if it is one softmax; gates in `dtype`.

    Raises ValueError for packed sequences, in which blocks would restart.
    """
    shapes = workload.shapes
    if not workload.pattern.summands(shapes[0]):
        return
    if workload.layout == "packed":
        raise ValueError(f"{workload.pattern.label()} is not computed over packed sequences; use layout=padded")
    for pattern, pool, gates in workload.pattern.summands(shapes[0]):
        alone = workload.model_copy(update={"pattern": pattern})
        yield Part(alone, pool, torch.from_numpy(gates).to(device, dtype))


def sum_of_gates(parts: Sequence[Part]) -> Tensor:
    """[N, H]: what out is where all values are 1: the gates of the attentions in which a row sees a key."""
    total = torch.zeros_like(parts[0].gates)
    for part in parts:
        for head in range(part.gates.shape[1]):
            total[:, head] += part.gates[:, head] * torch.from_numpy(covered(part.workload, head)).to(total.device)
    return total
