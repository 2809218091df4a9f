"""Sums of attentions under gates (semantics.md §5): out = sum_a g_a · attention_a(q, k_a, v_a), a softmax each.

A workload of one softmax is the sum of one attention without gates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dilabench.engine.verify.oracle.blocks import RowsOf
from dilabench.workload.spec import Workload
from dilabench.workload.visibility import alike_heads, covered


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """One attention of a sum: its workload, and its gates [N, H] in float64 on the CPU, None for a factor of 1.

    A key is the mean of `pool` positions and stands at the last of them; the next one is `stride` positions later.
    """

    workload: Workload
    gates: Tensor | None = None
    pool: int = 1
    stride: int = 1

    def gated(self, x: Tensor, rows: RowsOf, dtype: torch.dtype) -> Tensor:
        """out or dout [B, R, H, D] of some queries ([R] on the CPU), times the gates, in `dtype`; as it is without."""
        if self.gates is None:
            return x
        if isinstance(rows, Tensor):
            gates = self.gates[rows + self.workload.first_row][..., None]
        else:
            gates = rows.gates(self.gates, self.workload.first_row)
        return x.to(dtype) * gates.to(x.device, dtype)

    def keys(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """k or v [B, N, K, D] as this attention has them: means, computed in `dtype`, and 0 where no mean stands."""
        if self.pool == 1:
            return x
        x = x.to(dtype)
        means = torch.zeros_like(x)
        if x.shape[1] >= self.pool:
            means[:, self.pool - 1 :: self.stride] = x.unfold(1, self.pool, self.stride).mean(-1)
        return means

    def of_positions(self, gradient: Tensor) -> Tensor:
        """The gradient of x from that of `keys(x)`: a position has a share of every mean that counts it."""
        if self.pool == 1:
            return gradient
        shares = gradient[:, self.pool - 1 :: self.stride] / self.pool
        firsts = torch.arange(shares.shape[1], device=gradient.device) * self.stride
        of_x = torch.zeros_like(gradient)
        # Positions of one strip are distinct, so that each gets one share.
        for strip in range(0, self.pool, self.stride):
            width = min(self.stride, self.pool - strip)
            positions = firsts[:, None] + torch.arange(strip, strip + width, device=gradient.device)
            of_x[:, positions.flatten()] += shares.repeat_interleave(width, 1)
        return of_x


def attentions(workload: Workload) -> tuple[Attention, ...]:
    """The attentions whose sum is the workload: itself, if it is one softmax.

    Raises ValueError for a sum over packed sequences, in which blocks would restart.
    """
    summands = workload.pattern.summands(workload.shapes[0])
    if not summands:
        return (Attention(workload),)
    if workload.layout == "packed":
        raise ValueError(f"{workload.pattern.label()} is not computed over packed sequences; use layout=padded")
    return tuple(
        Attention(workload.model_copy(update={"pattern": pattern}), torch.from_numpy(gates), pool, stride)
        for pattern, pool, gates, stride in summands
    )


def is_sum(workload: Workload) -> bool:
    """Whether the workload is a sum of attentions, not one softmax."""
    return bool(workload.pattern.summands(workload.shapes[0]))


def out_of_ones(workload: Workload) -> Tensor:
    """[M, H] float64 on the CPU: what out is where all values are 1 and no zero key is seen.

    A softmax gives 1 to a row that sees a key, and 0 to others; in a sum it is multiplied by its gate.
    """
    total = torch.zeros(workload.rows, workload.num_heads, dtype=torch.float64)
    for attention in attentions(workload):
        ones = torch.zeros_like(total)
        for heads in alike_heads(attention.workload):
            ones[:, heads] = torch.from_numpy(covered(attention.workload, heads[0]))[:, None].double()
        total += ones if attention.gates is None else ones * attention.gates[workload.first_row :]
    return total
