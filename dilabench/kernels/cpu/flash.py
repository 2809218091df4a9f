"""Our flash attention for CPUs (flash.cpp): any head dim, strides, grouped heads and bands; sums in float32.

Queries stand at the last keys: of M queries over L keys the one at row i stands at key i + L - M.
"""

from __future__ import annotations

import ctypes
from math import gcd

import torch
from torch import Tensor

from dilabench.kernels.cpu.compiled import library, openmp_parallel

QUERIES, KEYS = 64, 64
FORWARD_TILES, BACKWARD_TILES = 4, 2
# Rows of dk and dv, while they are summed, are vectors of any width.
LANES = 16
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Floating-point operations that are worth another thread.
LEAST_FLOPS = 1_000_000


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "heads", "key_heads", "queries", "keys", "head_dim")),
        ("left", ctypes.c_int64),
        ("right", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int32),
        ("room", ctypes.c_void_p),
        ("of_thread", ctypes.c_int64),
        ("parallel", ctypes.c_void_p),
    )


class _Place(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "row")))


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, left: int, right: int, scale: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out [B, M, H, D] and lse [B, H, M], both float32, of q [B, M, H, D] and k, v [B, L, K, D], of one type.

    The last dim of each is contiguous. A query at p sees keys p - left to p + right; -1 is unbounded. `out`: where to
    write it, float32. Rows that see nothing are 0 and -inf.
    """
    B, M, H, D = q.shape
    if out is None:
        out = q.new_empty(q.shape, dtype=torch.float32)
    lse = q.new_empty((B, H, M), dtype=torch.float32)
    threads = _threads(4 * D * _pairs(q, k, left, right))
    room = q.new_empty(threads * forward_room(D), dtype=torch.float32)
    _launch("flash_forward", (q, k, left, right, scale, threads, room), (q, k, v, out, lse))
    return out, lse


def attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    left: int,
    right: int,
    scale: float,
    dq: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq like q, dk and dv like k, in float32; out and lse, contiguous, may be those of a larger softmax.

    The same bits in every call with as many threads: where the heads of keys are fewer, each part of the queries has
    sums of its own.
    """
    B, _, _, D = q.shape
    L, K = k.shape[1:3]
    if dq is None:
        dq = q.new_empty(q.shape, dtype=torch.float32)
    threads = _threads(10 * D * _pairs(q, k, left, right))
    parts = _parts(threads, B * K)
    sums = q.new_zeros((2, parts, B, K, L, whole_vectors(D)), dtype=torch.float32)
    room = q.new_empty(threads * backward_room(D), dtype=torch.float32)
    tensors = (dout, q, k, v, out, lse, dq, *sums)
    _launch("flash_backward", (q, k, left, right, scale, threads, room), tensors, parts)
    del room
    dk, dv = sums.squeeze(1) if parts == 1 else sums.sum(1)
    return dq, *(x[..., :D].transpose(1, 2) for x in (dk, dv))


def forward_room(head_dim: int) -> int:
    """Numbers that a thread of a forward pass takes; a multiple of 16."""
    tile = 2 * head_dim * QUERIES + 2 * QUERIES
    return FORWARD_TILES * tile + 2 * KEYS * head_dim + KEYS * QUERIES + QUERIES


def backward_room(head_dim: int) -> int:
    """Numbers that a thread of a backward pass takes; a multiple of 16."""
    tile = (3 * head_dim + 2 * whole_vectors(head_dim)) * QUERIES + 2 * QUERIES
    return BACKWARD_TILES * tile + 2 * KEYS * head_dim + 2 * KEYS * QUERIES + QUERIES


def whole_vectors(head_dim: int) -> int:
    """Numbers of a row of dk and dv while they are summed."""
    return -(-head_dim // LANES) * LANES


def _launch(
    function: str, call: tuple[Tensor, Tensor, int, int, float, int, Tensor], tensors: tuple[Tensor, ...], *more: int
) -> None:
    """Call the C++. All memory is asked for outside: where it is traced, nothing is launched (`engine.trace`)."""
    q, k, left, right, scale, threads, room = call
    B, M, H, D = q.shape
    told = _Call(
        *(B, H, k.shape[2], M, k.shape[1], D, left, right, scale, threads),
        *(room.data_ptr(), room.numel() // threads, openmp_parallel()),
    )
    # Strides of [B, M, H, D]; other tensors are contiguous.
    places = (
        ctypes.byref(_Place(x.data_ptr(), x.stride(0), x.stride(2), x.stride(1)))
        if x.ndim == 4
        else ctypes.c_void_p(x.data_ptr())
        for x in tensors
    )
    numbers = (ctypes.c_int64(one) for one in more)
    getattr(_compiled(), function)(ctypes.byref(told), TYPES[q.dtype], *numbers, *places)


def _compiled() -> ctypes.CDLL:
    return library("flash.cpp", QUERIES=QUERIES, KEYS=KEYS, FORWARD_TILES=FORWARD_TILES, BACKWARD_TILES=BACKWARD_TILES)


def _pairs(q: Tensor, k: Tensor, left: int, right: int) -> int:
    """About so many pairs of a query and a key that it sees."""
    seen = k.shape[1] if left < 0 else min(k.shape[1], left + 1)
    ahead = 1 if right < 0 or left >= 0 else 2
    return q.shape[0] * q.shape[1] * q.shape[2] * seen // ahead


def _parts(threads: int, items: int) -> int:
    """Parts of the queries that give every thread as many of them, nearly so where that would take many."""
    if items >= 4 * threads:
        return 1
    return min(threads // gcd(threads, items), 4 * -(-threads // items))


def _threads(flops: int) -> int:
    return max(1, min(torch.get_num_threads(), flops // LEAST_FLOPS))
