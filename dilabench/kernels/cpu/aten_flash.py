"""torch's flash attention kernel for CPUs, in float32 where that is faster than in half precision.

On an AMD EPYC with AVX-512 (two threads, torch 2.13, 8,192 rows in segments of 32 to 1,024, head dims 32 to 192) the
backward pass in float16 took 2.8 to 11 times as long as in float32 with all conversions, the forward pass 1.3 to 2.6
times: without float16 instructions, products are computed element by element. In bfloat16 the backward pass took 1.0 to
8.5 times as long up to head dim 128 for fewer than 192 rows, where the kernel takes blocks of 32 queries, and 0.6 to
1.3 times for more.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_forward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# From this many queries on the kernel takes blocks of 64.
_LARGER_BLOCKS = 192
_LARGEST_HEAD_DIM = 128


@cache
def _multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies float16, or tiles of bfloat16, fast enough.

    Both were measured only on x86, and without tile registers, which multiply bfloat16 several times as fast. torch
    cannot be asked while it traces a call, so that no import asks.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return bool(torch.cpu._is_amx_tile_supported())


def compute_dtype(q: Tensor, *, backward: bool) -> torch.dtype:
    """The dtype of a pass for queries [..., L, D]; an additive mask must have it."""
    if q.dtype == torch.float16 and not _multiplies(q.dtype):
        return torch.float32
    if backward and q.dtype == torch.bfloat16 and not _multiplies(q.dtype):
        rows, dim = q.shape[-2:]
        return torch.float32 if rows < _LARGER_BLOCKS and dim <= _LARGEST_HEAD_DIM else q.dtype
    return q.dtype


def is_tame(q: Tensor, k: Tensor, scale: float) -> bool:
    """Whether no product of q and k [..., D] can be NaN or inf, so that adding -inf to it hides it.

    True of tensors without numbers, whose memory is traced.
    """
    if isinstance(q, FakeTensor):
        return True
    most = _most(q, scale)
    return all(-most <= low and high <= most for low, high in (map(Tensor.item, x.aminmax()) for x in (q, k)))


def _most(q: Tensor, scale: float) -> float:
    """The largest number in queries and keys for which no sum of their products overflows."""
    wide = torch.promote_types(q.dtype, torch.float32)
    most = math.sqrt(torch.finfo(wide).max / (2 * q.shape[-1] * max(1.0, scale)))
    return min(most, torch.finfo(q.dtype).max)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    tame: bool = True,
) -> tuple[Tensor, Tensor]:
    """out [B, H, L, D] in the dtype of q, and lse [B, H, L] (float32; float64 for float64); with as many heads of keys
    as of queries.

    mask: [L, S], -inf where it hides a key and else 0. tame: `is_tame`. A row of the mask must leave one key, or out
    and lse mean nothing.
    """
    dtype = compute_dtype(q, backward=False)
    q_in, k_in, v_in = (x.to(dtype) for x in (q, k, v))
    if mask is None or tame:
        out, lse = _forward_op(q_in, k_in, v_in, 0.0, causal, attn_mask=mask, scale=scale)
        return out.to(q.dtype), lse
    rows, keys = _wild(q_in, k_in, mask, scale)
    masked = q_in.masked_fill(rows, 0), k_in.masked_fill(keys, 0), v_in
    out, lse = _forward_op(*masked, 0.0, False, attn_mask=mask, scale=scale)
    for row, seen in _alone(rows, mask):
        out[row], lse[row[:3]] = _forward_op(q_in[row], k_in[seen], v_in[seen], 0.0, False, scale=scale)
    return out.to(q.dtype), lse


def attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    tame: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the dtype of the computation; out and lse may belong to a larger softmax."""
    dtype = compute_dtype(q, backward=True)
    dout, q, k, v, out = (x.to(dtype) for x in (dout, q, k, v, out))
    if mask is None or tame:
        dq, dk, dv = _backward_op(dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
        return dq, dk, dv
    rows, keys = _wild(q, k, mask, scale)
    # Without dout and out a row has no gradients and gives none.
    dout_in, q_in, out_in = (x.masked_fill(rows, 0) for x in (dout, q, out))
    given = dout_in, q_in, k.masked_fill(keys, 0), v, out_in, lse.masked_fill(rows[..., 0], 0)
    dq, dk, dv = _backward_op(*given, 0.0, False, attn_mask=mask, scale=scale)
    for row, seen in _alone(rows, mask):
        given = dout[row], q[row], k[seen], v[seen], out[row], lse[row[:3]]
        dq[row], dk_part, dv_part = _backward_op(*given, 0.0, False, scale=scale)
        dk[seen] += dk_part
        dv[seen] += dv_part
    return dq, dk, dv


def _wild(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """[B, H, L, 1] and [B, H, S, 1]: the rows that hold, or see a key that holds, a number for which products may
    overflow, and such keys. The mask cannot be added to these rows.
    """
    most = _most(q, scale)
    # NaN is not less either.
    of_rows, of_keys = (~(x.abs() <= most).all(-1, keepdim=True) for x in (q, k))
    of_rows |= ((mask == 0).to(torch.float32) @ of_keys.to(torch.float32)) > 0
    return of_rows, of_keys


_Place = tuple[Any, ...]


def _alone(rows: Tensor, mask: Tensor) -> Iterator[tuple[_Place, _Place]]:
    """The place of each such row in [B, H, L, D], and the places of the keys that it sees, as batches of one head."""
    for batch, head, row, _ in rows.nonzero().tolist():
        seen = (mask[row] == 0).nonzero()[:, 0]
        if len(seen):
            of_head = slice(batch, batch + 1), slice(head, head + 1)
            yield (*of_head, slice(row, row + 1)), (*of_head, seen)
