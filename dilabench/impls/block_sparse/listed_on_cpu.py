"""Block-sparse attention on CPUs by our own flash kernel (`kernels.cpu.flash`), which walks over lists of seen keys."""

from __future__ import annotations

from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilabench.impls.union.union import last_dim_contiguous
from dilabench.kernels.block_sparse.lists import visible_tiles
from dilabench.kernels.block_sparse.plan import Plan
from dilabench.kernels.cpu import flash
from dilabench.kernels.cpu.flash import Blocks, Mask


def listed_forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float) -> tuple[Tensor, Tensor]:
    """As `on_cpu.blocked_forward`, for the types that `flash.serves`."""
    plan.check(q, k, v)
    q, k, v = (last_dim_contiguous(x) for x in (q, k, v))
    out, lse = flash.attend(q, k, v, Mask(plan.left, plan.right, scale), blocks=_blocks_of(plan))
    return out.to(q.dtype), lse


def listed_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: Plan, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `on_cpu.blocked_backward`, for the types that `flash.serves`."""
    plan.check(q, k, v)
    dout, q, k, v, out = (last_dim_contiguous(x) for x in (dout, q, k, v, out))
    mask = Mask(plan.left, plan.right, scale)
    dq, dk, dv = flash.attend_backward(dout, q, k, v, out, lse, mask, blocks=_blocks_of(plan))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _blocks_of(plan: Plan) -> Blocks:
    return plan.keep("ranges of keys", lambda: _blocks(plan))


def _blocks(plan: Plan) -> Blocks:
    size, count = plan.block_size, -(-plan.rows // plan.block_size)
    seen_by, hidden = plan.visibility, plan.hidden_tiles(size)
    lists: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(plan.mask_heads)]
    pairs = 0
    for index in range(count):
        some = visible_tiles(seen_by, torch.tensor([index]), size, size, hidden)[0].numpy()
        for mask_head, of_head in enumerate(lists):
            seen = plan.seen_blocks(mask_head, index)
            ranges = _ranges(seen[some[0, seen]], size, plan.keys)
            of_head.append(ranges)
            pairs += min(size, plan.rows - index * size) * int((ranges[:, 1] - ranges[:, 0]).sum())
    found = [*chain.from_iterable(lists)]
    spans = torch.tensor([0, *accumulate(map(len, found))])
    return Blocks(
        size, plan.mask_heads, spans, torch.from_numpy(np.concatenate(found)), plan.bounds(torch.device("cpu")), pairs
    )


def _ranges(blocks: npt.NDArray[np.int64], size: int, keys: int) -> npt.NDArray[np.int64]:
    """[R, 2] of rising blocks: neighbours are one range of keys."""
    begins = np.flatnonzero(np.diff(blocks, prepend=-2) > 1)
    ends = np.append(begins[1:], len(blocks))[: len(begins)] - 1
    return np.stack((blocks[begins] * size, np.minimum((blocks[ends] + 1) * size, keys)), axis=1)
