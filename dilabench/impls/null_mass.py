"""Null masses: zero keys and sinks. They add to the denominator of a row's softmax and to nothing else.

With a mass n beside its keys, a row's lse becomes log(exp(lse) + n) and its out shrinks by exp(lse - lse')
(semantics.md §2). The standard backward from that out and lse is exact, for a null mass has no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dilabench.patterns.dilated import DilatedPattern
from dilabench.workload.spec import Workload


def log_zero_keys(
    workload: Workload,
    device: torch.device,
    dtype: torch.dtype | None = None,
    *,
    rows: Tensor | None = None,
    apart: bool = False,
) -> Tensor | None:
    """log of how many zero keys each row sees, [1, H, R], -inf for none; None where no row of the workload sees any.

    dtype: by default that of the workload's lse. rows: [R] positions on the CPU, by default all. apart: [parts, H, R],
    of each part of the pattern by itself.
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


def log_zero_keys_of_documents(
    pattern: DilatedPattern,
    num_heads: int,
    num_kv_heads: int,
    bounds: Sequence[int],
    device: torch.device,
    apart: bool = False,
) -> tuple[Tensor, ...]:
    """As `log_zero_keys` for documents from ``bounds[i]`` to ``bounds[i + 1]`` where nothing is causal: [1, H, T], or
    with `apart` [H, T] of each branch, float32, also where no row sees a zero key. Made on the device.
    """
    edges = torch.tensor(bounds, dtype=torch.int32).to(device)
    row = torch.arange(bounds[-1], dtype=torch.int32, device=device)
    document = torch.bucketize(row, edges[1:], right=True, out_int32=True)
    length = edges.diff()[document]
    place = row - edges[document]
    counts: list[Tensor] = []
    of_head = pattern.branch_of_head(num_heads)
    for index, (w, r) in enumerate(pattern.branches):
        segment = length.clamp(max=w)
        inside = place % segment
        kept = torch.minimum(segment, length - (place - inside))
        # Where the rate divides the segment, only the last one can lack positions.
        lacks = -(-segment // r) if w % r else torch.where(kept + place - inside == length, -(-segment // r), 0)
        takes_part = [of_head is None or of_head[head] == index for head in range(num_heads)]
        of_heads = [
            pattern.head_offset(head, r, num_heads, num_kv_heads) if takes_part[head] else -1
            for head in range(num_heads)
        ]
        offset = torch.tensor(of_heads, dtype=torch.int32).to(device)[:, None]
        there = (inside % r == offset) & (lacks > 0)
        counts.append(torch.where(there, lacks - (kept - offset + (r - 1)) // r, 0))
    summed = counts if apart else [sum(counts[1:], counts[0])[None]]
    return tuple(count.float().log_() for count in summed)


def _places(seeing: range, start: int, rows: Tensor | None) -> slice | Tensor:
    """Where the positions `seeing` of the sequence that begins at `start` stand among the rows."""
    if rows is None:
        return slice(start + seeing.start, start + seeing.stop, seeing.step)
    inside = rows - start
    return (inside >= seeing.start) & (inside < seeing.stop) & ((inside - seeing.start) % seeing.step == 0)


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """-sum over rows of exp(sink - lse) · (dout·out), [H]: the share of a key of value 0 times what it takes away.

    0 for a sink of inf, which takes everything.
    """
    share = (sink[:, None].to(lse.dtype) - lse).exp().masked_fill(lse.isinf(), 0.0)
    taken = (dout.to(lse.dtype) * out).sum(-1).transpose(1, 2)
    return -(share * taken).sum((0, 2)).to(sink.dtype)
