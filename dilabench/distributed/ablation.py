"""What a parallel call costs without its communication, and without its computation.

exposed communication = the whole call - computation alone; it is hidden where communication alone is longer than that.
Results computed this way are wrong on purpose; only their times are used.
"""

# ruff: noqa: ARG001 (what stands in for something takes what that takes)
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dilabench.contracts import BuildContext, LoadedBackend
from dilabench.distributed.single_rank import SingleRank


def computation_only(context: BuildContext) -> BuildContext:
    """What to build with for a call that computes everything and sends nothing."""
    assert context.world is not None
    return replace(context, world=SingleRank.silenced(context.world))


def communication_only(context: BuildContext) -> BuildContext:
    """What to build with for a call that packs, sends and merges everything and runs no attention kernel."""
    return replace(context, backend=idle(context.require_backend()))


def idle(backend: LoadedBackend) -> LoadedBackend:
    """The backend without its kernels, that for packed sequences too: results of the right shapes, never computed."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, out: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        *lead, rows, heads, _ = q.shape
        lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        return torch.empty_like(q) if out is None else out, q.new_empty((*lead, heads, rows), dtype=lse_dtype)

    def attend_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        dq: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(q) if dq is None else dq, torch.empty_like(k), torch.empty_like(v)

    packed = backend.packed and backend.packed._replace(attend=attend, attend_backward=attend_backward)
    return replace(backend, attend=attend, attend_backward=attend_backward, packed=packed)
