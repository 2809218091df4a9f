"""Block-sparse attention on CPUs by our own flash kernel (`kernels.cpu.flash`), which walks over lists of seen keys."""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilabench.kernels.block_sparse.lists import visible_tiles
from dilabench.kernels.block_sparse.plan import Plan
from dilabench.kernels.cpu import flash
from dilabench.kernels.cpu.flash import Blocks, Mask


def listed_forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float) -> tuple[Tensor, Tensor]:
    """As `on_cpu.blocked_forward`, for the types that `flash.serves`."""
    plan.check(q, k, v)
    q, k, v = (_readable(x) for x in (q, k, v))
    out, lse = flash.attend(q, k, v, Mask(plan.left, plan.right, scale), blocks=_blocks_of(plan))
    return out.to(q.dtype), lse


def listed_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: Plan, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `on_cpu.blocked_backward`, for the types that `flash.serves`."""
    plan.check(q, k, v)
    dout, q, k, v, out = (_readable(x) for x in (dout, q, k, v, out))
    mask = Mask(plan.left, plan.right, scale)
    dq, dk, dv = flash.attend_backward(dout, q, k, v, out, lse, mask, blocks=_blocks_of(plan))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _readable(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _blocks_of(plan: Plan) -> Blocks:
    return plan.keep("ranges of keys", lambda: _blocks(plan))


def _blocks(plan: Plan) -> Blocks:
    size, count = plan.block_size, -(-plan.rows // plan.block_size)
    found, spans, pairs = [], [0], 0
    for mask_head, index in product(range(plan.mask_heads), range(count)):
        seen = plan.seen_blocks(mask_head, index)
        some, _ = visible_tiles(plan.visibility, np.array([index]), size, size, plan.hidden_tiles(size))
        ranges = _ranges(seen[some[0, seen]], size, plan.keys)
        found.append(ranges)
        spans.append(spans[-1] + len(ranges))
        pairs += min(size, plan.rows - index * size) * int((ranges[:, 1] - ranges[:, 0]).sum())
    given = torch.tensor(spans), torch.from_numpy(np.concatenate(found)), plan.bounds(torch.device("cpu"))
    return Blocks(size, plan.mask_heads, *given, pairs)


def _ranges(blocks: npt.NDArray[np.int64], size: int, keys: int) -> npt.NDArray[np.int64]:
    """[R, 2] of rising blocks: neighbours are one range of keys."""
    begins = np.flatnonzero(np.diff(blocks, prepend=-2) > 1)
    ends = np.append(begins[1:], len(blocks))[: len(begins)] - 1
    return np.stack((blocks[begins] * size, np.minimum((blocks[ends] + 1) * size, keys)), axis=1)
