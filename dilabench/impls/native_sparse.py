"""`native-sparse`: the three attentions of NSA under gates: to means of blocks and in a window by the block-sparse
kernels, to selected blocks by those or, if tokens select for themselves, by the kernels for that.

The compressed one attends means of blocks: N queries on N / stride keys. Backward gives each attention its own out and
lse and dout times its gates; the gradient of a gate is dout times the out that it is multiplied with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.impls.block_sparse.planned import Planned, kernels_for, plan_of_columns, require_whole_plan
from dilabench.impls.call import Computation
from dilabench.impls.operator_rules import first_derivatives, outside_compilers
from dilabench.impls.selected import selected_blocks
from dilabench.impls.summed import Part, block_means, block_means_backward, parts_of


def build(workload: Any, context: BuildContext) -> GatedSum:
    """Plans and gates are made here. Raises ValueError for a pattern that is no sum of attentions."""
    parts = list(parts_of(workload, context.device, getattr(torch, workload.dtype)))
    if not parts:
        raise ValueError(f"{workload.pattern.label()} is no sum of attentions")
    built = [(computation, part) for part in parts if (computation := _computation(part, context)) is not None]
    attentions = tuple(Attention(part.pool, part.stride, computation) for computation, part in built)
    return GatedSum(attentions, torch.stack([part.gates for _, part in built]))


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention: its keys are means of `pool` positions, one every `stride`."""

    pool: int
    stride: int
    computation: Computation

    def keys(self, x: Tensor) -> Tensor:
        """k or v [B, N, K, D] as the computation has them."""
        return x if self.pool == 1 else block_means(x, self.pool, self.stride)

    def add_gradient(self, total: Tensor, part: Tensor) -> None:
        """Add the gradient of `keys(x)` to that of x, in place."""
        if self.pool == 1:
            total += part
        else:
            whole = block_means_backward(part, self.pool, self.stride)
            total[:, : whole.shape[1]] += whole


@dataclass(frozen=True, slots=True)
class GatedSum:
    """out = sum_p gates[p] · attention_p(q, k, v). `gates` [parts, N, H]: the pattern's."""

    parts: tuple[Attention, ...]
    gates: Tensor

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out [B, N, H, D] of q [B, N, H, D] and k, v [B, N, K, D]; differentiable."""
        return self.with_gates(q, k, v, self.gates)

    def attentions(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The outs and lses of all attentions, outside autograd."""
        results = [part.computation.forward(q, part.keys(k), part.keys(v)) for part in self.parts]
        return [out for out, *_ in results], [lse for _, lse, *_ in results]

    def with_gates(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        """The same under other gates [parts, N, H]; differentiable in them, too."""
        out: Tensor = outside_compilers(_GatedSum.apply, self, q, k, v, gates)
        return out


class _GatedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: GatedSum, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        outs, lses = function.attentions(q, k, v)
        ctx.function = function
        ctx.save_for_backward(q, k, v, gates, *outs, *lses)
        return _gated_sum(outs, gates)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        gradients = partial(_gradients, ctx.function, ctx.needs_input_grad[4])
        dq, dk, dv, *of_gates = first_derivatives(gradients, dout, *ctx.saved_tensors)
        return None, dq, dk, dv, of_gates[0] if of_gates else None


def _gradients(
    function: GatedSum, of_gates: bool, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, *results: Tensor
) -> tuple[Tensor, ...]:
    """dq, dk, dv, and the gradient of the gates if requested."""
    outs, lses = results[: len(results) // 2], results[len(results) // 2 :]
    wide = torch.promote_types(q.dtype, torch.float32)
    dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
    of_queries = []
    for part, gated_dout, out, lse in zip(function.parts, _gated(dout, gates), outs, lses, strict=True):
        keys, values = part.keys(k), part.keys(v)
        dq, *shares = part.computation.backward(gated_dout, q, keys, values, out, lse)
        of_queries.append(dq)
        for total, share in zip((dk, dv), shares, strict=True):
            part.add_gradient(total, share.to(wide))
    found = _sum(of_queries), dk.to(q.dtype), dv.to(q.dtype)
    if not of_gates:
        return found
    return *found, torch.stack([(dout * out).sum((0, -1)) for out in outs]).to(gates.dtype)


def _gated_sum(outs: Sequence[Tensor], gates: Tensor) -> Tensor:
    if outs[0].device.type == "cuda":
        # Triton is not installed everywhere, and only CUDA needs it.
        from dilabench.kernels.gates import gated_sum

        return gated_sum(outs, gates)
    return _sum([out * gate[..., None] for out, gate in zip(outs, gates, strict=True)])


def _gated(dout: Tensor, gates: Tensor) -> list[Tensor]:
    """dout as each attention gets it."""
    if dout.device.type == "cuda":
        from dilabench.kernels.gates import gated

        return gated(dout, gates)
    return [(dout * gate[..., None]).contiguous() for gate in gates]


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum, in float32 or wider, in the dtype of the parts; overwrites the first."""
    if parts[0].device.type == "cuda":
        from dilabench.kernels.combine import sum_parts_

        sum_parts_(parts[0], [(part, 0) for part in parts])
        return parts[0]
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    return torch.stack([part.to(wide) for part in parts]).sum(0).to(parts[0].dtype)


def _computation(part: Part, context: BuildContext) -> Computation | None:
    """An attention's computation over its keys; None if it has no key at all."""
    workload = part.workload
    selected = workload.pattern.selects
    if selected is not None and selected.per_token:
        return selected_blocks.build(workload, context)
    kernels = kernels_for(context.device, getattr(torch, workload.dtype))
    if part.pool == 1:
        return Planned(kernels, require_whole_plan(workload), workload.softmax_scale)
    (shape,) = workload.shapes
    keys = np.arange(part.pool - 1, shape.length, part.stride)
    hidden = workload.pattern.hidden_rows(shape)
    if not len(keys) or hidden is None:
        return None
    seen = hidden.over(shape, np.arange(shape.length), keys)
    return Planned(kernels, plan_of_columns(shape, seen, len(keys)), workload.softmax_scale)
