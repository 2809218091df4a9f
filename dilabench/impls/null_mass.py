"""Null masses: zero keys and sinks. They add only to the denominator of a row's softmax.

With a mass n in addition to its keys, a row's lse becomes log(exp(lse) + n) and its out shrinks by exp(lse - lse')
(semantics.md §2). The standard backward from that out and lse is exact, because a null mass has no gradient.
"""

from __future__ import annotations

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


class ZeroKeysOfDocuments:
    """As `log_zero_keys` for packings of sequences without a causal mask, made on the device without waiting for it.

    A row of a segment sees the same number of zero keys in every head that has it: only the set of heads differs.
    """

    def __init__(self, pattern: DilatedPattern, num_heads: int, num_kv_heads: int, device: torch.device) -> None:
        of_head = pattern.branch_of_head(num_heads)
        offsets = [
            [
                pattern.head_offset(head, r, num_heads, num_kv_heads) if of_head in (None, branch) else -1
                for head, of_head in enumerate(of_head or [None] * num_heads)
            ]
            for branch, (_, r) in enumerate(pattern.branches)
        ]
        # [branches, H, 1], and [branches, 1] of each of the others.
        self._offsets = torch.tensor(offsets, dtype=torch.int32).to(device)[..., None]
        self._segments, self._rates = torch.tensor(pattern.branches, dtype=torch.int32).to(device).T[..., None]
        self._divided = self._segments % self._rates == 0

    def __call__(self, edges: Tensor, tokens: int, apart: bool) -> tuple[Tensor, ...]:
        """[1, H, T] of sequences from ``edges[i]`` to ``edges[i + 1]``, or with `apart` [H, T] of each branch; float32,
        also where no row sees a zero key. edges: int32 on the device, up to T.
        """
        row = torch.arange(tokens, dtype=torch.int32, device=edges.device)
        sequence = torch.bucketize(row, edges[1:], right=True)
        start, stop = edges[sequence], edges[1:][sequence]
        segment = torch.minimum(self._segments, stop - start)
        inside = (row - start) % segment
        left = stop - (row - inside)
        kept = torch.minimum(segment, left)
        residue = inside % self._rates
        behind = self._rates - 1
        # The rows of a padded segment on a residue, minus the existing ones; if the rate divides the segment, only the
        # last one of a sequence can lack rows.
        lacking = (segment + behind) // self._rates - (kept - residue + behind) // self._rates
        lacking.masked_fill_(self._divided & (kept < left), 0)
        of_branches = [*zip(residue, lacking.float(), self._offsets, strict=True)]
        if apart:
            # Kernels are compiled for addresses that are multiples of 16 bytes, as separate allocations have.
            return tuple(torch.where(own == offsets, keys.log(), -torch.inf) for own, keys, offsets in of_branches)
        counts = torch.zeros((1, self._offsets.shape[1], tokens), device=edges.device)
        for own, keys, offsets in of_branches:
            counts += torch.where(own == offsets, keys, 0.0)
        return (counts.log_(),)


def _places(seeing: range, start: int, rows: Tensor | None) -> slice | Tensor:
    """The rows of the positions `seeing` of the sequence that begins at `start`."""
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
