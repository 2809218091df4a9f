"""Null masses: zero keys and sinks. They add only to the denominator of a row's softmax.

With a mass n in addition to its keys, a row's lse becomes log(exp(lse) + n) and its out shrinks by exp(lse - lse')
(semantics.md §2). The standard backward from that out and lse is exact, because a null mass has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dilabench.workload.spec import Workload


def log_zero_keys(
    workload: Workload,
    device: torch.device,
    dtype: torch.dtype | None = None,
    *,
    rows: Tensor | None = None,
    apart: bool = False,
) -> Tensor | None:
    """log of the number of zero keys that each row sees, [1, H, R], -inf for none; None if no row of the workload sees
    any.

    dtype: by default the dtype of the workload's lse. rows: [R] positions on the CPU, by default all. apart: [parts, H,
    R], separately for each part of the pattern.
    """
    zero_keys = [
        (head, start, keys)
        for (start, _), shape in zip(workload.sequences, workload.shapes, strict=True)
        for head in range(workload.num_heads)
        for keys in workload.pattern.zero_keys(shape, head)
    ]
    if not zero_keys:
        return None
    lead = workload.pattern.parts if apart else 1, workload.num_heads
    dtype = dtype or torch.promote_types(getattr(torch, workload.dtype), torch.float32)
    counts = torch.zeros(*lead, workload.seq_len if rows is None else len(rows), dtype=dtype, device="cpu")
    for head, start, keys in zero_keys:
        counts[keys.part if apart else 0, head, _places(keys.rows, start, rows)] += keys.count
    return counts.log_().to(device)


def _places(seeing: range, start: int, rows: Tensor | None) -> slice | Tensor:
    """The rows of the positions `seeing` of the sequence that begins at `start`."""
    if rows is None:
        return slice(start + seeing.start, start + seeing.stop, seeing.step)
    inside = rows - start
    return (inside >= seeing.start) & (inside < seeing.stop) & ((inside - seeing.start) % seeing.step == 0)


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sink: Tensor, dlse: Tensor | None = None) -> Tensor:
    """-sum over rows of exp(sink - lse) · (dout·out - dlse), [H]: the share of a key of value 0 times what it takes
    away, less what lse gains.

    0 for a sink of inf, which takes everything.
    """
    share = (sink[:, None].to(lse.dtype) - lse).exp().masked_fill(lse.isinf(), 0.0)
    taken = (dout.to(lse.dtype) * out).sum(-1).transpose(-1, -2)
    if dlse is not None:
        taken = taken - dlse
    # Packed sequences have no axis of items.
    return -(share * taken).sum((0, 2) if lse.ndim == 3 else 1).to(sink.dtype)


# Parts of dlse, each a column of values: three of bfloat16 have the digits of a float32.
_PARTS = 3


def lse_gradients(
    gradients: Callable[..., tuple[Tensor, ...]],
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *kept: Any,
) -> tuple[Tensor, Tensor]:
    """dq and dk of lse, by a second backward pass of any kernel that takes a given out and lse.

    With weights p, d lse_i / d s_ij is p_ij, and that pass gives p_ij · (dout_i·v_j - dout_i·out_i). With ones in the
    first columns of v, an out of zeros, and dlse in those columns of dout, that is p_ij · dlse_i.
    """
    of_rows = dlse.to(lse.dtype).masked_fill(lse.isinf(), 0.0).transpose(1, 2)
    dout, ones = torch.zeros_like(out), torch.zeros_like(v)
    parts = 1 if out.dtype == torch.float64 else min(_PARTS, v.shape[-1])
    for column in range(parts):
        part = of_rows if column + 1 == parts else of_rows.bfloat16().to(lse.dtype)
        dout[..., column], ones[..., column] = part.to(out.dtype), 1
        of_rows = of_rows - part
    dq, dk, _ = gradients(dout, q, k, ones, torch.zeros_like(out), lse, *kept)
    return dq, dk


def with_lse_gradient(gradients: Callable[..., tuple[Tensor, ...]], dout: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    """dq, dk, dv of `gradients`, plus the share of lse, whose gradient is the last of `given`."""
    *others, dlse = given
    dq, dk, dv = gradients(dout, *others)
    more_dq, more_dk = lse_gradients(gradients, dlse, *others)
    return dq + more_dq, dk + more_dk, dv


def with_sink_gradient(
    gradients: Callable[..., tuple[Tensor, ...]],
    summed: Callable[[Tensor], Tensor] | None,
    has_dlse: bool,
    dout: Tensor,
    *given: Tensor,
) -> tuple[Tensor, ...]:
    """dq, dk, dv of `gradients`, and that of the sink, which is given last, with has_dlse behind the gradient of lse;
    out and lse are those with the sink. summed: adds up the gradients of ranks.
    """
    *others, sink = given
    found = gradients(dout, *others)
    of_sink = sink_gradient(dout, others[3], others[4], sink, others[-1] if has_dlse else None)
    return *found, of_sink if summed is None else summed(of_sink)
