"""`torch.nn.functional.scaled_dot_product_attention` on any device, by whichever kernel torch dispatches to there.

That function returns no lse: plain products in float32 (float64 for float64) give it, in blocks of queries.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dilabench.backends.band import Band
from dilabench.workload.spec import UNBOUNDED, Window

# Bytes of the scores of a block.
BLOCK_BYTES = 64 * 2**20


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: Window = UNBOUNDED, scale: float
) -> tuple[Tensor, Tensor]:
    """`contracts.Attend`. Supports M != L with any mask: the last query is at the position of the last key."""
    B, M, H, _ = q.shape
    L, ahead = k.shape[1], k.shape[1] - M
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.full((B, H, M), float("-inf"), dtype=compute, device=q.device)
    if q.numel() == 0 or L == 0:
        return torch.zeros_like(q), lse
    band = Band.of(causal, window, M, L)
    at_once = band.full or (M == L and band.causal and not band.windowed)
    keys, values = (_repeated(x, H).transpose(1, 2) for x in (k, v))
    with _no_autocast(q.device):
        if at_once:
            queries = q.transpose(1, 2)
            out = scaled_dot_product_attention(queries, keys, values, is_causal=band.causal, scale=scale)
            out = out.transpose(1, 2)
        else:
            out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        rows = max(1, BLOCK_BYTES // (compute.itemsize * B * H * L))
        for start in range(0, M, rows):
            stop = min(M, start + rows)
            first, end = band.keys_of(start + ahead, stop + ahead, L)
            if first == end:
                continue
            queries = q[:, start:stop].transpose(1, 2)
            hidden = band.hidden(start + ahead, stop + ahead, first, end, q.device)
            scores = queries.to(compute).mul(scale) @ keys[:, :, first:end].to(compute).transpose(-1, -2)
            if hidden is not None:
                scores.masked_fill_(hidden, float("-inf"))
            lse[:, :, start:stop] = scores.logsumexp(-1)
            if not at_once:
                block = queries, keys[:, :, first:end], values[:, :, first:end]
                mask = None if hidden is None else ~hidden
                block_out = scaled_dot_product_attention(*block, attn_mask=mask, scale=scale)
                # Kernels differ in the result of a row that sees no key.
                blind = (lse[:, :, start:stop] == float("-inf")).unsqueeze(-1)
                out[:, start:stop] = block_out.masked_fill(blind, 0.0).transpose(1, 2)
    return out, lse


def _repeated(x: Tensor, num_heads: int) -> Tensor:
    """K or V [B, L, K, D] with the heads of each group repeated: not every kernel takes grouped heads."""
    group = num_heads // x.shape[2]
    return x if group == 1 else x.repeat_interleave(group, 2)


def _no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Compute in the tensors' dtypes, like kernels; autocast would round them."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
