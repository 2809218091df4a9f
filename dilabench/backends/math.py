"""Attention in plain PyTorch: any device, dtype and head dim, blocked over queries so that memory stays bounded.

float16 and bfloat16 are computed in float32. Grouped query heads are folded into the rows of their key head, so
keys and values are never repeated.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dilabench.backends.band import Band
from dilabench.workload.spec import UNBOUNDED, Window

# Bytes of one block of scores. About four blocks are alive in the backward pass. A CPU block should fit into caches, a
# GPU block should fill the device.
BLOCK_BYTES, BLOCK_BYTES_ON_CUDA = 8 * 2**20, 256 * 2**20


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: Window = UNBOUNDED,
    scale: float,
    softcap: float = 0.0,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`contracts.Attend`. Supports M != L with any mask: the last query is at the position of the last key."""
    B, M, H, _ = q.shape
    ahead = k.shape[1] - M
    compute = compute_dtype(q.dtype)
    band = Band.of(causal, window, M, k.shape[1])
    out = q.new_empty((B, M, H, v.shape[-1])) if out is None else out
    lse = torch.empty(B, H, M, dtype=compute, device=q.device)
    for b0, b1, rows in _blocks(q, k, compute):
        keys, values = _by_head(k[b0:b1], compute), _by_head(v[b0:b1], compute)
        for start, stop in rows:
            first, end = band.keys_of(start + ahead, stop + ahead, k.shape[1])
            scores = _scores(q[b0:b1, start:stop], keys[:, :, first:end], scale)
            if softcap:
                scores.div_(softcap).tanh_().mul_(softcap)
            _hide(scores, band, start + ahead, stop + ahead, first, end)
            row_lse = scores.logsumexp(-1)
            probabilities = _exp_minus(scores, row_lse)
            out[b0:b1, start:stop] = _by_token(_rows_times(probabilities, values[:, :, first:end])).to(q.dtype)
            lse[b0:b1, :, start:stop] = row_lse.flatten(1, 2)
    return out, lse


def attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    window: Window = UNBOUNDED,
    scale: float,
    softcap: float = 0.0,
    dq: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`contracts.AttendBackward`, with dk and dv summed in float32 (float64 for float64)."""
    compute = compute_dtype(q.dtype)
    num_kv_heads = k.shape[2]
    band, ahead = Band.of(causal, window, q.shape[1], k.shape[1]), k.shape[1] - q.shape[1]
    dq = torch.empty_like(q, memory_format=torch.contiguous_format) if dq is None else dq
    dk = torch.empty_like(k, memory_format=torch.contiguous_format)
    dv = torch.empty_like(v, memory_format=torch.contiguous_format)
    for b0, b1, rows in _blocks(q, k, compute):
        keys, values = _by_head(k[b0:b1], compute), _by_head(v[b0:b1], compute)
        dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)
        for start, stop in rows:
            first, end = band.keys_of(start + ahead, stop + ahead, k.shape[1])
            block = slice(b0, b1), slice(start, stop)
            queries = _by_group(q[block], num_kv_heads).to(compute)
            douts = _by_group(dout[block], num_kv_heads).to(compute)
            delta = (douts * _by_group(out[block], num_kv_heads).to(compute)).sum(-1)
            scores = _scores(q[block], keys[:, :, first:end], scale)
            slopes = None
            if softcap:
                # The derivative of softcap · tanh(s / softcap) is 1 - tanh(s / softcap)².
                slopes = scores.div_(softcap).tanh_().square().neg_().add_(1.0)
                scores.mul_(softcap)
            _hide(scores, band, start + ahead, stop + ahead, first, end)
            row_lse = lse[b0:b1, :, start:stop].to(compute).unflatten(1, (num_kv_heads, -1))
            probabilities = _exp_minus(scores, row_lse)
            dvalues[:, :, first:end] += _columns_times(probabilities, douts)
            dprobabilities = _rows_times(douts, values[:, :, first:end].transpose(-1, -2))
            dscores = probabilities.mul_(dprobabilities.sub_(delta.unsqueeze(-1))).mul_(scale)
            if slopes is not None:
                dscores.mul_(slopes)
            dkeys[:, :, first:end] += _columns_times(dscores, queries)
            dq[block] = _by_token(_rows_times(dscores, keys[:, :, first:end])).to(q.dtype)
        dk[b0:b1] = dkeys.transpose(1, 2).to(k.dtype)
        dv[b0:b1] = dvalues.transpose(1, 2).to(v.dtype)
    return dq, dk, dv


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _blocks(q: Tensor, k: Tensor, compute: torch.dtype) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Batch ranges, each with the query ranges whose scores fit into a block."""
    B, M, H, _ = q.shape
    budget = BLOCK_BYTES_ON_CUDA if q.device.type == "cuda" else BLOCK_BYTES
    fitting_rows = max(1, budget // max(1, compute.itemsize * H * k.shape[1]))
    batches, rows = max(1, fitting_rows // max(1, M)), min(fitting_rows, M)
    for b0 in range(0, B, batches):
        yield b0, min(B, b0 + batches), [(start, min(M, start + rows)) for start in range(0, M, max(1, rows))]


def _by_head(x: Tensor, compute: torch.dtype) -> Tensor:
    """[b, L, K, D] -> [b, K, L, D]: a view if x has the dtype already, else one copy for all query blocks.

    Several query blocks share a view only if b is 1; a batched product then reads the heads with their strides. With b
    above 1 there is a single block, whose products copy a view of several heads.
    """
    return x.transpose(1, 2).to(compute, memory_format=torch.contiguous_format)


def _by_group(x: Tensor, num_kv_heads: int) -> Tensor:
    """[b, m, H, D] -> [b, K, g, m, D]."""
    return x.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)


def _by_token(x: Tensor) -> Tensor:
    """[b, K, g, m, D] -> [b, m, H, D]."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _scores(q: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Scaled q·k [b, K, g, m, l] of a query block [b, m, H, D] and keys [b, K, l, D]."""
    return _rows_times(_by_group(q, keys.shape[1]).to(keys.dtype) * scale, keys.transpose(-1, -2))


def _rows_times(rows: Tensor, matrix: Tensor) -> Tensor:
    """[b, K, g, m, x] times [b, K, x, y] -> [b, K, g, m, y]; the group is part of the rows."""
    return _product(rows.flatten(2, 3), matrix).unflatten(2, rows.shape[2:4])


def _columns_times(weights: Tensor, rows: Tensor) -> Tensor:
    """Transposed [b, K, g, m, l] times [b, K, g, m, D], summed over the group -> [b, K, l, D]."""
    return _product(weights.flatten(2, 3).transpose(-1, -2), rows.flatten(2, 3))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in their dtype, like kernels; autocast would round both."""
    device = a.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return a @ b
    with torch.autocast(device, enabled=False):
        return a @ b


def _hide(scores: Tensor, band: Band, start: int, stop: int, first: int, end: int) -> None:
    hidden = band.hidden(start, stop, first, end, scores.device)
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))


def _exp_minus(scores: Tensor, row_lse: Tensor) -> Tensor:
    """exp(scores - lse) in place; a row with lse -inf sees no key and gets zeros instead of NaN."""
    return scores.sub_(row_lse.masked_fill(row_lse == float("-inf"), float("inf")).unsqueeze(-1)).exp_()
