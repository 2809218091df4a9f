"""Our own flash attention for CPUs, in C++, compiled at first use: float32, half precision, windows, grouped heads."""

from __future__ import annotations

import torch
from torch import Tensor

from dilabench.backends.adapt import Plain, adapted
from dilabench.backends.band import Band
from dilabench.kernels.cpu import flash


def _forward(
    q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    place = out if out is not None and out.dtype == torch.float32 else None
    found, lse = flash.attend(q, k, v, left=band.left, right=band.right, scale=scale, out=place)
    return found.to(q.dtype), lse


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    band: Band,
    scale: float,
    dq: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    place = dq if dq is not None and dq.dtype == torch.float32 else None
    sides = {"left": band.left, "right": band.right}
    of_queries, *of_keys = flash.attend_backward(dout, q, k, v, out, lse, **sides, scale=scale, dq=place)
    dk, dv = (x.to(k.dtype) for x in of_keys)
    return of_queries.to(q.dtype), dk, dv


attend, attend_backward = adapted(_forward, _backward, Plain(aligns_ends=True, places_results=True))
