"""FlexAttention: a compiled Triton kernel with the band as block mask.

The library has no backward from a given out and lse, so it is derived from its autograd: with s the share that these
keys have in the larger softmax, s = exp(lse_here - lse), the larger out is a sum of s·out_here over sets of keys, hence

    d out_here = s · dout        d lse_here = s · rowsum(dout · (out_here - out))

This is exact and costs one more forward than a plain backward.

Packed sequences have a separate mask: for each query the first key that it sees and the first that it does not. The
mask function reads both from tensors, so that other bounds, masks and windows over as many tokens need no compilation;
its blocks are computed from the bounds on the device, in time linear in tokens. Each list of blocks is as long as the
number of blocks, from which the library derives the tokens: 16 bytes for each pair of blocks of 128 tokens.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from dilabench.backends.adapt import CUDA_KERNEL, Call, Sequences, adapted, adapted_packed
from dilabench.backends.band import Band
from dilabench.kernels.streams import record, wait_for
from dilabench.kernels.varlen import TileReach, keys_seen, tiles_seen

BLOCK = 128


# Else fewer than 128 queries go to the kernel for decoding, which finds no tile where the query heads of one key/value
# head have more than a block of rows together.
NOT_DECODING: flex.FlexKernelOptions = {"FORCE_USE_FLEX_ATTENTION": True}


def _call(
    q: Tensor, k: Tensor, v: Tensor, mask: flex.BlockMask | None, scale: float, score: Callable[..., Tensor] | None
) -> tuple[Tensor, Any]:
    return flex.flex_attention(
        q,
        k,
        v,
        score_mod=score,
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options=NOT_DECODING,
        return_aux=flex.AuxRequest(lse=True),
    )


def _capped(softcap: float) -> Callable[..., Tensor] | None:
    """The score function of softcap · tanh(s / softcap); None without a cap."""
    if not softcap:
        return None

    def score(s: Tensor, _b: Tensor, _h: Tensor, _i: Tensor, _j: Tensor) -> Tensor:
        return softcap * torch.tanh(s / softcap)

    return score


@functools.lru_cache(maxsize=64)
def _compiled(softcap: float, *_key: object) -> tuple[Callable[..., tuple[Tensor, Any]], Callable[..., Tensor] | None]:
    """A compiled kernel for each class of shapes, and its score function.

    torch.compile gives up on one function after eight classes. `fullgraph` turns a silent fallback to the quadratic
    eager form into an error.
    """
    own_code = types.FunctionType(_call.__code__.replace(), _call.__globals__)
    return torch.compile(own_code, fullgraph=True, dynamic=False), _capped(softcap)


@functools.lru_cache(maxsize=32)
def _block_mask(band: Band, length: int, device: torch.device) -> flex.BlockMask:
    left = band.left if band.left >= 0 else length
    right = band.right if band.right >= 0 else length

    def visible(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j >= i - left) & (j <= i + right)

    mask = flex.create_block_mask(visible, None, None, length, length, device=str(device))
    wait_for(mask.kv_indices)
    return mask


def _forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    mask = None if call.band.full else _block_mask(call.band, q.shape[1], q.device)
    return _run(q, k, v, mask, call, call.band)


def _run(
    q: Tensor, k: Tensor, v: Tensor, mask: flex.BlockMask | None, call: Call, kind: object
) -> tuple[Tensor, Tensor]:
    """out [B, M, H, D] and lse [B, H, M]; calls over masks of one kind share a compiled function."""
    if mask is not None:
        record(mask.as_tuple())
    run, score = _compiled(call.softcap, q.shape, k.shape, v.shape, q.dtype, q.device, kind, q.requires_grad)
    heads_first = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out, extra = run(*heads_first, mask, call.scale, score)
    return out.transpose(1, 2), extra.lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    return _differentiated(functools.partial(_forward, call=call), dout, q, k, v, out, lse)


def _differentiated(
    forward: Callable[..., tuple[Tensor, Tensor]],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from a given out [B, M, H, D] and lse [B, H, M]."""
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out_here, lse_here = forward(q, k, v)
    share = torch.exp(lse_here.detach() - lse)
    dlse_here = share * (dout.float() * (out_here.detach().float() - out.float())).sum(-1).transpose(1, 2)
    dout_here = (dout * share.transpose(1, 2).unsqueeze(-1)).to(dout.dtype)
    dq, dk, dv = torch.autograd.grad((out_here, lse_here), (q, k, v), (dout_here, dlse_here))
    return dq, dk, dv


def _packed_forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    mask = _mask_of_sequences(call, q, k)
    out, lse = _run(q[None], k[None], v[None], mask, call, "packed")
    return out[0], lse[0]


def _packed_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    mask = _mask_of_sequences(call, q, k)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return _run(q, k, v, mask, call, "packed")

    dq, dk, dv = _differentiated(forward, *(x[None] for x in (dout, q, k, v, out, lse)))
    return dq[0], dk[0], dv[0]


def _mask_of_sequences(call: Call, q: Tensor, k: Tensor) -> flex.BlockMask:
    assert call.sequences is not None
    return packed_mask(call.sequences, call.band, q.shape[0], k.shape[0])


def packed_mask(sequences: Sequences, band: Band, rows: int, keys: int) -> flex.BlockMask:
    """The mask of packed sequences over `rows` queries and `keys` keys, cached for calls with the same bounds."""
    bounds = sequences.cu_seqlens, sequences.cu_seqlens_k
    if any(tensor.is_inference() for tensor in bounds):
        # Inference tensors have no version counter.
        return _packed_mask.__wrapped__(*bounds, (), band, rows, keys)
    return _packed_mask(*bounds, tuple(tensor._version for tensor in bounds), band, rows, keys)


# Only two entries, because one takes 16 MiB at 128K tokens and 1 GiB at a million.
@functools.lru_cache(maxsize=2)
def _packed_mask(
    cu_seqlens: Tensor, cu_seqlens_k: Tensor, _written: tuple[int, ...], band: Band, rows: int, keys: int
) -> flex.BlockMask:
    """The tensors are cache keys by identity, not by content; `_written`: their version counters."""
    seen = keys_seen(cu_seqlens, cu_seqlens_k, rows, band.left, band.right)
    seeing = keys_seen(cu_seqlens_k, cu_seqlens, keys, band.right, band.left)
    first, stop = (x.to(torch.int32) for x in seen)

    def visible(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j >= first[i]) & (j < stop[i])

    kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices = _lists(tiles_seen(seen, BLOCK, BLOCK), keys)
    q_num_blocks, q_indices, full_q_num_blocks, full_q_indices = _lists(tiles_seen(seeing, BLOCK, BLOCK), rows)
    wait_for(full_q_indices)
    return flex.BlockMask(
        seq_lengths=(rows, keys),
        kv_num_blocks=kv_num_blocks,
        kv_indices=kv_indices,
        full_kv_num_blocks=full_kv_num_blocks,
        full_kv_indices=full_kv_indices,
        q_num_blocks=q_num_blocks,
        q_indices=q_indices,
        full_q_num_blocks=full_q_num_blocks,
        full_q_indices=full_q_indices,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=visible,
    )


def _lists(tiles: TileReach, num_keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers and indices of partly visible blocks, then of fully visible ones: int32 [1, 1, blocks] and
    [1, 1, blocks, blocks of keys], whose ends are undefined."""
    blocks = -(-num_keys // BLOCK)
    place = torch.arange(blocks, device=tiles.first.device)
    full = tiles.full_stop - tiles.full_first
    before = (tiles.full_first - tiles.first).unsqueeze(1)
    # Partly visible blocks are before and behind the fully visible ones.
    partly = tiles.first.unsqueeze(1) + place + torch.where(place < before, 0, full.unsqueeze(1))
    lists = partly, tiles.full_first.unsqueeze(1) + place
    counts = tiles.stop - tiles.first - full, full
    (some, wholes), (some_count, whole_count) = (
        [x.clamp(max=blocks - 1).to(torch.int32)[None, None] for x in lists],
        [x.to(torch.int32)[None, None] for x in counts],
    )
    return some_count, some, whole_count, wholes


PLAIN = replace(CUDA_KERNEL, head_dim_multiple=16, value_dim=True, softcap=True)
attend, attend_backward = adapted(_forward, _backward, PLAIN)
packed = adapted_packed(_packed_forward, _packed_backward, replace(PLAIN, aligns_ends=True))
