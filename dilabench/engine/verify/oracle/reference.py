"""The oracle as the implementation `reference`, and as a function that autograd differentiates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dilabench.engine.verify.oracle.formula import attend_rows, attend_rows_backward, sink_gradient
from dilabench.engine.verify.oracle.sums import is_sum
from dilabench.workload.spec import Workload


class Reference:
    """The formula, exact and detached gradients, over padded [B, M, H, D] and packed [T, H, D]; computes in float64."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.with_lse(q, k, v)[0]

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out in q's dtype, and lse [B, H, M] (packed: [H, T]) in float64, which carries no gradient."""
        packed = q.ndim == 3
        if packed:
            q, k, v = q[None], k[None], v[None]
        rows = torch.arange(self.workload.rows, device="cpu")
        out, lse = differentiable_rows(q, k, v, self.workload, rows, torch.float64)
        out = out.to(q.dtype)
        return (out[0], lse[0]) if packed else (out, lse)


def build(workload: Workload, _context: object = None) -> Callable[..., Tensor]:
    """The implementation: it needs no backend, no buffers and no ranks."""
    reference = Reference(workload)
    # Each attention of a sum has its own lse, so that there is none to return.
    return reference.__call__ if is_sum(workload) else reference


def differentiable_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    workload: Workload,
    rows: Tensor,
    dtype: torch.dtype,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attend_rows` for autograd: out [B, M, H, D] is zero outside `rows`, lse is [B, H, R] and carries no gradient.

    Gradients depend only on the rows of dout at `rows`. sink: [H], for one softmax whose merge gradient is exact.
    """
    return _AttendRows.apply(q, k, v, sink, workload, rows, dtype)


class _AttendRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        workload: Workload,
        rows: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        out_rows, lse = attend_rows(q, k, v, workload, rows, dtype, sink)
        ctx.save_for_backward(q, k, v, out_rows, lse, sink)
        ctx.workload, ctx.rows, ctx.dtype = workload, rows, dtype
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        if len(rows) == q.shape[1]:
            return out_rows, lse
        out = out_rows.new_zeros(*q.shape[:-1], v.shape[-1])
        out[:, rows] = out_rows
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        if dout is None:
            return (None,) * 7
        q, k, v, out, lse, sink = ctx.saved_tensors
        dout_rows = dout[:, ctx.rows]
        dq_rows, dk, dv = attend_rows_backward(dout_rows, q, k, v, out, lse, ctx.workload, ctx.rows, dtype=ctx.dtype)
        dq = dq_rows.new_zeros(q.shape)
        dq[:, ctx.rows] = dq_rows
        dsink = None if sink is None else sink_gradient(dout_rows, out, lse, sink)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink, None, None, None
