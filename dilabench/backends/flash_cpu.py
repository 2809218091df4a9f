"""dilabench's flash attention for CPUs, C++ compiled at first use: float32, half precision, windows, grouped heads."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from dilabench.backends.adapt import Call, Plain, adapted
from dilabench.backends.band import Band
from dilabench.contracts import MergingKernel
from dilabench.kernels.cpu import flash
from dilabench.kernels.cpu.flash import Mask
from dilabench.workload.spec import UNBOUNDED, Window


def _forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    mask = Mask(call.band.left, call.band.right, call.scale, softcap=call.softcap)
    out, lse = flash.attend(
        q, k, v, mask, call.place if call.place is not None and call.place.dtype == torch.float32 else None
    )
    return out.to(q.dtype), lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    mask, place = Mask(call.band.left, call.band.right, call.scale, softcap=call.softcap), call.place
    place = place if place is not None and place.dtype == torch.float32 else None
    dq, dk, dv = flash.attend_backward(dout, q, k, v, out, lse, mask, place)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


attend, attend_backward = adapted(_forward, _backward, Plain(softcap=True, aligns_ends=True, places_results=True))


def _merge(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    window: Window = UNBOUNDED,
    scale: float,
    fresh: bool,
    count: int,
) -> None:
    mask = _mask(q.shape[1], k.shape[1], causal, window, scale, count)
    flash.attend(q, k, v, mask, out, lse, onto=not fresh)


def _add_gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    causal: bool,
    window: Window = UNBOUNDED,
    scale: float,
    count: int,
) -> None:
    mask = _mask(q.shape[1], k.shape[1], causal, window, scale, count)
    flash.attend_backward(dout, q, k, v, out, lse, mask, onto=(dq, dk, dv))


@lru_cache(maxsize=256)
def _mask(queries: int, keys: int, causal: bool, window: Window, scale: float, count: int) -> Mask:
    band = Band.of(causal, window, queries, keys)
    return Mask(band.left, band.right, scale, count)


merging = MergingKernel(_merge, _add_gradients, frozenset(flash.TYPES), torch.float32)
