"""Block-sparse attention on CPUs: by dilabench's flash kernel over lists of visible keys. If that cannot run, by
torch's, once per block of queries over its visible key blocks.

The latter takes any dtype, block size and head dim. Time and memory follow the mask: hidden blocks are never read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilabench.impls.operator_rules import last_dim_contiguous
from dilabench.kernels.block_sparse.lists import visible_tiles
from dilabench.kernels.block_sparse.plan import Plan
from dilabench.kernels.cpu import aten_flash, flash
from dilabench.kernels.cpu.flash import Blocks, Mask

# Blocks of queries whose visible blocks of keys are found in one call; memory grows with their number.
_BLOCKS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """One kernel call: query rows of some query heads, the heads of k and v that they read, and the key rows they see.

    `partly`: causal edge, window or bounds of columns hide some of the pairs.
    """

    heads: slice
    kv_heads: slice
    rows: slice
    keys: slice | Tensor
    partly: bool


def blocked_forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float) -> tuple[Tensor, Tensor]:
    """out [B, N, H, D] and lse [B, H, N] (float32; float64 for float64) over the blocks of the plan.

    q [B, N, H, D]; k, v [B, N, K, D] (or as many rows as the plan has keys) with H a multiple of K. Raises ValueError
    on shapes that do not fit the plan.
    """
    plan.check(q, k, v)
    q, k, v = map(last_dim_contiguous, (q, k, v))
    out = torch.zeros(q.shape, dtype=q.dtype, device="cpu")
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=_sum_dtype(q), device="cpu")
    tame = aten_flash.is_tame(q, k, scale)
    for block in _query_blocks(plan, q, k):
        inputs = _queries(q, block), _keys(k, block, q), _keys(v, block, q)
        mask, empty = _mask(block, plan, q.device, aten_flash.compute_dtype(inputs[0], backward=False))
        block_out, block_lse = aten_flash.attend(*inputs, mask=mask, scale=scale, tame=tame)
        if empty is not None:
            # The kernel divides by zero in a row that sees nothing.
            block_out = block_out.masked_fill(empty[:, None], 0.0)
            block_lse = block_lse.masked_fill(empty, -torch.inf)
        out[:, block.rows, block.heads] = block_out.transpose(1, 2)
        lse[:, block.heads, block.rows] = block_lse
    return out, lse


def blocked_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: Plan, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the shapes and dtypes of q, k, v, from an out and lse that may belong to a larger softmax."""
    plan.check(q, k, v)
    dout, q, k, v, out = map(last_dim_contiguous, (dout, q, k, v, out))
    dq = torch.zeros(q.shape, dtype=q.dtype, device="cpu")
    dk, dv = (torch.zeros(x.shape, dtype=_sum_dtype(x), device="cpu") for x in (k, v))
    # exp(-inf - 0) is 0: rows that see no key contribute zero.
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    tame = aten_flash.is_tame(q, k, scale)
    for block in _query_blocks(plan, q, k):
        inputs = _queries(q, block), _keys(k, block, q), _keys(v, block, q)
        mask, _ = _mask(block, plan, q.device, aten_flash.compute_dtype(inputs[0], backward=True))
        results = _queries(out, block), lse[:, block.heads, block.rows]
        tensors = _queries(dout, block), *inputs, *results
        gradients = aten_flash.attend_backward(*tensors, mask=mask, scale=scale, tame=tame)
        dq[:, block.rows, block.heads] = gradients[0].transpose(1, 2)
        _add_keys(dk, block, gradients[1])
        _add_keys(dv, block, gradients[2])
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _query_blocks(plan: Plan, q: Tensor, k: Tensor) -> Iterable[QueryBlock]:
    """The calls of a plan, query heads that share their mask together.

    With bounds of columns they are made for each pass: memory is then O(keys), not O(pairs of blocks).
    """
    if plan.hidden is not None:
        return _make_query_blocks(plan, q, k)
    key = "query blocks", q.shape[2], k.shape[2]
    return plan.keep(key, lambda: list(_make_query_blocks(plan, q, k)))


def _make_query_blocks(plan: Plan, q: Tensor, k: Tensor) -> Iterator[QueryBlock]:
    size, seen_by = plan.block_size, plan.visibility
    heads_per_mask, group = q.shape[2] // plan.mask_heads, q.shape[2] // k.shape[2]
    for mask_head in range(plan.mask_heads):
        heads = slice(mask_head * heads_per_mask, (mask_head + 1) * heads_per_mask)
        kv_heads = slice(heads.start // group, -(-heads.stop // group))
        for index in range(-(-plan.rows // size)):
            tiles = visible_tiles(seen_by, torch.tensor([index], device="cpu"), size, size, plan.hidden_tiles(size))
            some, whole = (x.numpy() for x in tiles)
            seen = plan.seen_blocks(mask_head, index)
            seen = seen[some[0, seen]]
            if len(seen):
                queries = slice(index * size, min(plan.rows, (index + 1) * size))
                keys = _key_rows(seen, size, plan.keys)
                yield QueryBlock(heads, kv_heads, queries, keys, not whole[0, seen].all())


def _key_rows(blocks: npt.NDArray[np.int64], size: int, rows: int) -> slice | Tensor:
    """The rows of ascending blocks: a slice, without a copy, if they are neighbours."""
    if blocks[-1] - blocks[0] == len(blocks) - 1:
        return slice(int(blocks[0]) * size, min(rows, (int(blocks[-1]) + 1) * size))
    index = (torch.from_numpy(blocks).long()[:, None] * size + torch.arange(size, device="cpu")).flatten()
    return index[index < rows]


def _mask(
    block: QueryBlock, plan: Plan, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """The additive mask [rows, keys], and which rows see nothing; None if there is nothing to hide."""
    if not block.partly or (plan.left < 0 and plan.right < 0 and plan.hidden is None):
        return None, None
    keys = torch.arange(plan.keys, device="cpu")[block.keys] if isinstance(block.keys, slice) else block.keys
    rows = torch.arange(plan.rows, device="cpu")[block.rows, None]
    ahead = keys - rows
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if plan.right >= 0:
        hidden |= ahead > plan.right
    if plan.left >= 0:
        hidden |= ahead < -plan.left
    for starts, stops in plan.bounds(device)[:, :, block.keys]:
        hidden |= (rows >= starts) & (rows < stops)
    mask = torch.zeros(hidden.shape, dtype=dtype, device="cpu").masked_fill_(hidden, -torch.inf)
    empty = hidden.all(1)
    return mask, empty if empty.any() else None


def _queries(x: Tensor, block: QueryBlock) -> Tensor:
    """[B, heads, rows, D], a view."""
    return x[:, block.rows, block.heads].transpose(1, 2)


def _keys(x: Tensor, block: QueryBlock, q: Tensor) -> Tensor:
    """[B, query heads, keys, D]: the kernel reads past the end when there are fewer heads of keys than of queries."""
    rows = x[:, :, block.kv_heads]
    rows = rows[:, block.keys] if isinstance(block.keys, slice) else rows.index_select(1, block.keys)
    group = q[:, :, block.heads].shape[2] // rows.shape[2]
    return (rows if group == 1 else rows.repeat_interleave(group, 2)).transpose(1, 2)


def _add_keys(total: Tensor, block: QueryBlock, part: Tensor) -> None:
    """Add [B, query heads, keys, D] to the rows and heads of total [B, N, K, D] that they came from."""
    target = total[:, :, block.kv_heads]
    rows = part.unflatten(1, (target.shape[2], -1)).sum(2, dtype=total.dtype).transpose(1, 2)
    if isinstance(block.keys, slice):
        target[:, block.keys] += rows
    else:
        target.index_add_(1, block.keys, rows)


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def listed_forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float) -> tuple[Tensor, Tensor]:
    """As `blocked_forward`, for the types that `flash.serves`."""
    mask, blocks = plan.keep(("listed", q.shape, k.shape, v.shape, scale), partial(_listed, plan, scale, q, k, v))
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        q, k, v = map(last_dim_contiguous, (q, k, v))
    out, lse = flash.attend(q, k, v, mask, blocks=blocks)
    return out.to(q.dtype), lse


def listed_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: Plan, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `blocked_backward`, for the types that `flash.serves`."""
    mask, blocks = plan.keep(("listed", q.shape, k.shape, v.shape, scale), partial(_listed, plan, scale, q, k, v))
    if not dout.stride(-1) == q.stride(-1) == k.stride(-1) == v.stride(-1) == out.stride(-1) == 1:
        dout, q, k, v, out = map(last_dim_contiguous, (dout, q, k, v, out))
    dq, dk, dv = flash.attend_backward(dout, q, k, v, out, lse, mask, blocks=blocks)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _listed(plan: Plan, scale: float, q: Tensor, k: Tensor, v: Tensor) -> tuple[Mask, Blocks]:
    """The mask and the lists of a plan, for tensors of these shapes."""
    plan.check(q, k, v)
    return Mask(plan.left, plan.right, scale), plan.keep("ranges of keys", lambda: _blocks(plan))


def _blocks(plan: Plan) -> Blocks:
    size, count = plan.block_size, -(-plan.rows // plan.block_size)
    seen_by, hidden = plan.visibility, plan.hidden_tiles(size)
    lists: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(plan.mask_heads)]
    pairs = 0
    for first in range(0, count, _BLOCKS_AT_ONCE):
        queries = torch.arange(first, min(count, first + _BLOCKS_AT_ONCE), device="cpu")
        some = visible_tiles(seen_by, queries, size, size, hidden)[0].numpy()
        for index, of_block in enumerate(some, first):
            for mask_head, of_head in enumerate(lists):
                seen = plan.seen_blocks(mask_head, index)
                ranges = _ranges(seen[of_block[seen]], size, plan.keys)
                of_head.append(ranges)
                pairs += min(size, plan.rows - index * size) * int((ranges[:, 1] - ranges[:, 0]).sum())
    found = [*chain.from_iterable(lists)]
    spans = torch.tensor([0, *accumulate(map(len, found))], device="cpu")
    return Blocks(
        size, plan.mask_heads, spans, torch.from_numpy(np.concatenate(found)), plan.bounds(torch.device("cpu")), pairs
    )


def _ranges(blocks: npt.NDArray[np.int64], size: int, keys: int) -> npt.NDArray[np.int64]:
    """[R, 2] of ascending blocks: neighbours are one range of keys."""
    begins = np.flatnonzero(np.diff(blocks, prepend=-2) > 1)
    ends = np.append(begins[1:], len(blocks))[: len(begins)] - 1
    return np.stack((blocks[begins] * size, np.minimum((blocks[ends] + 1) * size, keys)), axis=1)
