"""torch's flash attention kernel for CPUs: float64, float32, bfloat16 and float16, any strides and head dim.

It knows no window; a windowed call runs over blocks of queries, each with the keys that it can see and a small mask.
It reads past the end when there are fewer K/V heads than query heads, hence `grouped_heads=False`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from dilabench.backends.adapt import Call, Plain, adapted
from dilabench.backends.band import Band
from dilabench.kernels.cpu import aten_flash

QUERY_BLOCK = 256
# Blocks in the middle of a sequence, and of equal segments, share a mask. Elements of the largest cached one.
MOST_KEPT = 1 << 20


def _forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    if call.band.windowed:
        return _forward_windowed(q, k, v, call.band, call.scale)
    out, lse = aten_flash.attend(*_heads_first(q, k, v), causal=call.band.causal, scale=call.scale)
    return out.transpose(1, 2), lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    if call.band.windowed:
        return _backward_windowed(dout, q, k, v, out, lse, call.band, call.scale)
    dout, q, k, v, out = _heads_first(dout, q, k, v, out)
    gradients = aten_flash.attend_backward(dout, q, k, v, out, lse, causal=call.band.causal, scale=call.scale)
    dq, dk, dv = (x.to(q.dtype) for x in _heads_first(*gradients))
    return dq, dk, dv


def _forward_windowed(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    tame = aten_flash.is_tame(q, k, scale)
    for start in range(0, q.shape[1], QUERY_BLOCK):
        rows = q[:, start : start + QUERY_BLOCK]
        first, end, mask = _block_mask(rows, start, k.shape[1], band, backward=False)
        block = _heads_first(rows, k[:, first:end], v[:, first:end])
        out, lse = aten_flash.attend(*block, mask=mask, scale=scale, tame=tame)
        outs.append(out.transpose(1, 2))
        lses.append(lse)
    return (torch.cat(outs, 1), torch.cat(lses, 2)) if len(outs) > 1 else (outs[0], lses[0])


def _backward_windowed(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Band, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    tame = aten_flash.is_tame(q, k, scale)
    sum_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros(x.shape, dtype=sum_dtype, device=x.device) for x in (k, v))
    for start in range(0, q.shape[1], QUERY_BLOCK):
        rows = slice(start, min(q.shape[1], start + QUERY_BLOCK))
        first, end, mask = _block_mask(q[:, rows], start, k.shape[1], band, backward=True)
        douts, queries, outs = _heads_first(dout[:, rows], q[:, rows], out[:, rows])
        keys, values = _heads_first(k[:, first:end], v[:, first:end])
        results = outs, lse[:, :, rows]
        tensors = douts, queries, keys, values, *results
        gradients = aten_flash.attend_backward(*tensors, mask=mask, scale=scale, tame=tame)
        dq[:, rows], dk_part, dv_part = _heads_first(*gradients)
        dk[:, first:end] += dk_part
        dv[:, first:end] += dv_part
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _block_mask(
    rows: Tensor, start: int, num_keys: int, band: Band, *, backward: bool
) -> tuple[int, int, Tensor | None]:
    """(first, end) of the keys that a block of queries sees, and its additive mask in the dtype of the pass."""
    count = rows.shape[1]
    first, end = band.keys_of(start, start + count, num_keys)
    if not band.hides(start, start + count, first, end):
        return first, end, None
    # Tensors made during a memory trace belong to the trace and are not cached.
    cached = count * (end - first) <= MOST_KEPT and torch._C._len_torch_dispatch_stack() == 0
    dtype = aten_flash.compute_dtype(rows.transpose(1, 2), backward=backward)
    return first, end, (_kept_mask if cached else _mask)(band, count, first - start, end - start, dtype)


def _mask(band: Band, count: int, first: int, end: int, dtype: torch.dtype) -> Tensor:
    """The additive mask of `count` queries and the keys from `first` to `end`, counted from the first query.

    Each row of the mask is the next one shifted by a key: all are windows of one row, so no comparison is made twice.
    """
    with torch.inference_mode(False):
        hidden = band.hidden_ahead(torch.arange(first - (count - 1), end, device="cpu"))
        row = torch.zeros(hidden.shape, dtype=dtype, device="cpu").masked_fill_(hidden, float("-inf"))
        # The flipped view is not contiguous by rows, and torch's kernel would copy it in every call.
        return row.unfold(0, end - first, 1).flip(0).contiguous()


_kept_mask = lru_cache(maxsize=16)(_mask)


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in tensors)


attend, attend_backward = adapted(_forward, _backward, Plain(grouped_heads=False))
