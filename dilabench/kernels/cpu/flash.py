"""dilabench's flash attention for CPUs (flash.cpp): any head dim, strides, grouped heads and bands; sums in float32.

Queries are aligned to the last keys: with M queries and L keys, query i is at the position of key i + L - M.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, log
from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

from dilabench.kernels.cpu.compiled import CONSTANTS, FEW_ROWS, library, openmp_parallel, why_unavailable

QUERIES, KEYS, _, BACKWARD_TILES, BEHIND_ROW = CONSTANTS.values()
# Rows of dk and dv, while they are summed, are vectors of any width.
LANES = 16
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Floating-point operations that are worth another thread.
LEAST_FLOPS = 1_000_000

# The structures Call, Place and Lse of the C++, and the arguments of its functions.
_CALL, _PLACE, _LSE = "11q3P2q3f2iPqPq", "P3q", "P5q"
_PACKED = {
    "flash_forward": Struct(_CALL + 4 * _PLACE + _LSE).pack,
    "flash_backward": Struct(_CALL + "q" + 5 * _PLACE + _LSE + 3 * _PLACE).pack,
}


class Mask(NamedTuple):
    """A query at p sees keys p - left to p + right, -1 is unbounded; each counts as `times` keys. Scores are capped as
    softcap · tanh(s / softcap), unless that is 0.
    """

    left: int
    right: int
    scale: float
    times: int = 1
    softcap: float = 0.0


@dataclass(frozen=True, slots=True)
class Blocks:
    """Which keys blocks of queries may see, with both counted from the first; a `Mask` hides more of them.

    rows: queries of a block. lists: their number; successive heads of queries share one. spans: int64 [lists * blocks +
    1], block i of list l sees ``ranges[spans[l * blocks + i] : spans[l * blocks + i + 1]]``. ranges: int64 [R, 2],
    ascending ranges of keys, first and end. hidden: int32 [S, 2, L], for each key the rows that it is hidden from,
    first and end. pairs: of all lists.
    """

    rows: int
    lists: int
    spans: Tensor
    ranges: Tensor
    hidden: Tensor
    pairs: int


def serves(dtype: torch.dtype) -> bool:
    """Return True if the kernel takes numbers of this type, and is built and loaded here."""
    return dtype in TYPES and why_unavailable() is None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    onto: bool = False,
    blocks: Blocks | None = None,
) -> tuple[Tensor, Tensor]:
    """out [B, M, H, D] and lse [B, H, M], both float32, of q [B, M, H, D] and k, v [B, L, K, D], of one type.

    The last dim of each is contiguous. `out`, `lse`: tensors for the results, float32, any strides; lse may be [S, G,
    H, M] where S times G are the batch. `onto`: they hold the results of other keys, to merge with. `blocks`: the
    visible keys, by default all. Rows that see no key are 0 and -inf.
    """
    B, M, H, D = q.shape
    if out is None:
        out = torch.empty_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)
    if lse is None:
        lse = q.new_empty((B, H, M), dtype=torch.float32)
    threads = _threads(2, q, k, mask, blocks)
    _, L, K, _ = k.shape
    rows = M * (H // K)
    if blocks is None and rows <= FEW_ROWS and M:
        # As many parts as give every thread work, of no fewer keys than those that are copied together.
        parts = max(1, min(-(-2 * threads // max(1, B)), L // (2 * KEYS)))
        partial = B * parts * H * M * (whole_vectors(D) + BEHIND_ROW)
        of_thread = room_of("few", K, rows, D)
        room = q.new_empty(threads * of_thread + partial, dtype=torch.float32)
        _launch("flash_forward", q, k, mask, None, onto, room, (threads, of_thread, parts), (q, k, v, out, lse), lse)
        return out, lse
    room = q.new_empty((threads, room_of("forward", D)), dtype=torch.float32)
    _launch("flash_forward", q, k, mask, blocks, onto, room, (*room.shape, 0), (q, k, v, out, lse), lse)
    return out, lse


def attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Mask,
    dq: Tensor | None = None,
    onto: tuple[Tensor, Tensor, Tensor] | None = None,
    blocks: Blocks | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq like q, dk and dv like k, in float32; out and lse may belong to a larger softmax.

    `dq`: tensor for the result. `onto`: dq, dk and dv of other keys or queries, which are added to in place. `blocks`:
    as of `attend`. The same bits in every call with the same number of threads: if heads of keys are fewer, each part
    of the queries has separate sums.
    """
    B, L, K, D = k.shape
    threads = _threads(5, q, k, mask, blocks)
    groups_of_queries = q.shape[2] // K * -(-q.shape[1] // (QUERIES * BACKWARD_TILES))
    parts = max(1, min(groups_of_queries, _parts(threads, B * K)))
    if onto is not None:
        dq = onto[0]
    elif dq is None:
        dq = torch.empty_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)
    if parts > 1:
        # Each part adds to separate sums.
        sums = q.new_zeros((2, parts * B, K, L, whole_vectors(D)), dtype=torch.float32)
        dk, dv = sums.transpose(2, 3)
    else:
        rows = B, L, K, D
        dk, dv = onto[1:] if onto else (q.new_empty(rows, dtype=torch.float32), q.new_empty(rows, dtype=torch.float32))
    room = q.new_empty((threads, room_of("backward", D, L if parts == 1 else 0)), dtype=torch.float32)
    places = (dout, q, k, v, out, lse, dq, dk, dv)
    _launch("flash_backward", q, k, mask, blocks, onto is not None, room, (*room.shape, 0), places, lse, parts)
    if parts == 1:
        return dq, dk, dv
    dk, dv = (x.unflatten(0, (parts, B)).sum(0)[..., :D] for x in (dk, dv))
    return (dq, onto[1].add_(dk), onto[2].add_(dv)) if onto else (dq, dk, dv)


@lru_cache(maxsize=256)
def room_of(kind: str, *sizes: int) -> int:
    """Numbers that a thread of a pass takes, as the C++ counts them; a multiple of 16. sizes: of a "forward" pass the
    head dim; of "few" queries the heads of keys, the rows that share one, and the head dim; of a "backward" pass the
    head dim, and the keys that it has sums for.
    """
    count = getattr(library(), f"flash_{kind}_room")
    count.restype = ctypes.c_int64
    numbers: int = count(*map(ctypes.c_int64, sizes))
    return numbers


def whole_vectors(head_dim: int) -> int:
    """Numbers of a row in vectors of any width."""
    return -(-head_dim // LANES) * LANES


def _launch(
    function: str,
    q: Tensor,
    k: Tensor,
    mask: Mask,
    blocks: Blocks | None,
    onto: bool,
    room: Tensor,
    of_room: tuple[int, int, int],
    tensors: tuple[Tensor, ...],
    lse: Tensor,
    *numbers: int,
) -> None:
    """Call the C++. All memory is allocated outside; while memory is traced, no call is made (`engine.trace`). of_room:
    threads, numbers of the room for each, and parts of the keys of few queries, else 0.

    Raises ValueError while torch.jit.trace records, which cannot see the call, and for a tensor whose memory does not
    hold its values.
    """
    if torch._C._is_tracing():
        raise ValueError(
            f"{function} under torch.jit.trace, which records operators of torch alone; trace "
            "dilabench.attention.attention or dilated_attention, which are one operator"
        )
    # Tensors of callers come first.
    if any(map(Tensor.is_neg, tensors[:4])):
        raise _without_values(next(x for x in tensors[:4] if x.is_neg()))
    B, M, H, D = q.shape
    L, (threads, of_thread, parts) = k.shape[1], of_room
    seen: tuple[int, ...] = (L - M, mask.left, mask.right, max(M, 1), H, 0, 0, 0, 0, 0)
    if blocks is not None:
        places = blocks.spans.data_ptr(), blocks.ranges.data_ptr(), blocks.hidden.data_ptr()
        seen = (0, mask.left, mask.right, blocks.rows, H // blocks.lists, *places, len(blocks.hidden), L)
    arguments = [B, H, k.shape[2], M, L, D, *seen, mask.scale, log(mask.times), mask.softcap, threads, onto]
    arguments += room.data_ptr(), of_thread, openmp_parallel(), parts, *numbers
    for x in tensors:
        address = x.data_ptr()
        if not address and x.numel():
            raise _without_values(x)
        if x is lse:
            # [B, H, M], or [S, G, H, M] if S times G are the batch.
            *outer, batch, head, row = x.stride()
            arguments += address, outer[0] if outer else 0, x.shape[-3], batch, head, row
        else:
            batch, row, head, _ = x.stride()
            arguments += address, batch, head, row
    getattr(library(), function)(_PACKED[function](*arguments), TYPES[q.dtype])


def _without_values(x: Tensor) -> ValueError:
    return ValueError(
        f"the memory of a tensor {list(x.shape)} on {x.device} does not hold its values (a meta or zero tensor, or "
        "a negative view); give a copy, x.resolve_neg().clone(), on a CPU"
    )


def _parts(threads: int, items: int) -> int:
    """The number of parts of the queries that gives every thread the same number, or nearly so."""
    if items >= 4 * threads:
        return 1
    return min(threads // gcd(threads, items), 2 * -(-threads // items))


def _threads(products: int, q: Tensor, k: Tensor, mask: Mask, blocks: Blocks | None) -> int:
    """The number of threads that this many products are worth, by their floating-point operations."""
    if blocks is not None:
        batch, _, heads, dim = q.shape
        flops = 2 * batch * heads // blocks.lists * blocks.pairs * dim
    else:
        seen = k.shape[1] if mask.left < 0 else min(k.shape[1], mask.left + 1)
        flops = 2 * q.numel() * seen // (2 if mask.left < 0 <= mask.right else 1)
    return max(1, min(torch.get_num_threads(), products * flops // LEAST_FLOPS))
