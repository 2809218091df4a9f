"""The oracle: the formula itself (semantics.md §1), from explicit C, in blocks so that memory is bounded.

`build` returns it as an implementation in float64. `attend_rows` and `attend_rows_backward` evaluate the formula for a
sample of query rows. They compute in float64, or in the plain way in the inputs' own dtype, to measure rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.impls.null_mass import log_zero_keys
from dilabench.impls.summed import Part, parts_of
from dilabench.impls.visible_keys import key_groups, visible
from dilabench.kernels.lse import add_null_mass_
from dilabench.workload.spec import Workload
from dilabench.workload.visibility import alike_heads

# Largest number of scores per matrix: 32 MiB in float64; about four such matrices are alive at a time.
MAX_BLOCK_SCORES = 2**22
# Limits of heads, rows and keys with cached blocks: megabytes at most.
FEW_PAIRS = 2**22
_keep: ContextVar[Callable[..., tuple[Block, ...]] | None] = ContextVar("keep", default=None)
_heads: ContextVar[Sequence[int] | None] = ContextVar("heads", default=None)


def build(workload: Workload, context: BuildContext) -> Reference | ReferenceOfSum:
    """The oracle as an implementation; computes in float64, returns q's dtype."""
    is_sum = any(parts_of(workload, context.device, torch.float64))
    return ReferenceOfSum(workload) if is_sum else Reference(workload)


class Reference:
    """AttentionFn of the formula, exact and detached gradients, padded [B, N, H, D] and packed [T, H, D]."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.with_lse(q, k, v)[0]

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out in q's dtype, and lse [B, H, N] (packed: [H, T]) in float64, which carries no gradient."""
        packed = q.ndim == 3
        if packed:
            q, k, v = q[None], k[None], v[None]
        rows = torch.arange(self.workload.seq_len, device="cpu")
        out, lse = differentiable_rows(q, k, v, self.workload, rows, torch.float64)
        out = out.to(q.dtype)
        return (out[0], lse[0]) if packed else (out, lse)


class ReferenceOfSum:
    """AttentionFn of a sum of attentions, padded [B, N, H, D]; it has no lse, because each attention has its own."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = torch.arange(self.workload.seq_len, device="cpu")
        return differentiable_rows(q, k, v, self.workload, rows, torch.float64)[0].to(q.dtype)


# Gets each block with its scores, their lse, softmax and values.
EachBlock = Callable[["Block", Tensor, Tensor, Tensor, Tensor], None]


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    workload: Workload,
    rows: Tensor,
    dtype: torch.dtype = torch.float64,
    each: EachBlock | None = None,
) -> tuple[Tensor, Tensor]:
    """out [B, R, H, D] and lse [B, H, R] of the query rows at `rows` ([R] int64 on the CPU, ascending), all heads.

    q is [B, N, H, D], k and v are [B, N, K, D]. In float64 this is the oracle. In another `dtype` it is the plain
    computation that tolerances come from: matrix products rounded to it, softmax in at least float32. For a sum of
    attentions, lse holds all of them, [B, parts·H, R]. each: called with every block, without null masses; not for a
    sum.
    """
    parts = list(parts_of(workload, q.device, dtype))
    if parts:
        k, v = k.to(dtype), v.to(dtype)
        results = [attend_rows(q, part.keys(k), part.keys(v), part.workload, rows, dtype) for part in parts]
        gated = [part.gates[rows][..., None] * result[0] for part, result in zip(parts, results, strict=True)]
        return torch.stack(gated).sum(0), torch.cat([lse for _, lse in results], 1)
    wide = accumulation_dtype(dtype)
    out = q.new_zeros(q.shape[0], len(rows), q.shape[2], q.shape[3], dtype=dtype)
    lse = q.new_full((q.shape[0], q.shape[2], len(rows)), -torch.inf, dtype=wide)
    for block in blocks(workload, rows, q):
        scores = block.scores(*block.paired(q, k, workload, dtype))
        block_lse = scores.logsumexp(-1)
        less = scores.sub_(finite(block_lse)) if each is None else scores.sub(finite(block_lse))
        share, values = less.exp_().to(dtype), block.take(v, workload, dtype)
        out[:, block.index, block.head] = share @ values
        lse[:, block.head, block.index] = block_lse
        if each is not None:
            each(block, scores, block_lse, share, values)
    zero_keys = log_zero_keys(workload, q.device, wide, rows=rows)
    if zero_keys is not None:
        add_null_mass_(out, lse, zero_keys)
    return out, lse


def attend_rows_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    workload: Workload,
    rows: Tensor,
    keys: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq [B, R, H, D] of the rows, and dk, dv [B, S, K, D] at the positions `keys` (None: all), from dout [B, R, H, D].

    Exact for a dout that is zero outside `rows`: the gradient is linear in dout, so only those rows contribute. `out`
    and `lse` are the results of `attend_rows` in the same dtype. P is the softmax of the formula and dP = dout·v. The
    merge gradient "exact" is

        dS[i, j] = P[i, j] · (dP[i, j] - dout[i]·out[i])

    "detached" is LongNet's code: out = sum_b a_b O_b with a_b = exp(lse_b - lse) held constant. It differentiates each
    branch's own softmax P_b, weighted by a_b. a_b P_b = C_b exp(s - lse) is branch b's share of P, hence

        dS[i, j] = sum_b a_b P_b[i, j] · (dP[i, j] - sum_j' P_b[i, j'] dP[i, j'])

    dv is P^T dout under both. Zero keys count in out, lse, lse_b and P_b, and have no gradient. In a sum of attentions,
    each attention's share comes from its own out and lse, and from its gates times dout.
    """
    parts = list(parts_of(workload, q.device, dtype))
    if parts:
        return _sum_backward(parts, dout.to(dtype), q, k, v, lse, rows, keys, dtype)
    wide = accumulation_dtype(dtype)
    slots = key_slots(keys, q.shape[1], q.device)
    size = q.shape[1] if keys is None else len(keys)
    dq = q.new_zeros(dout.shape, dtype=dtype)
    dk, dv = (q.new_zeros(q.shape[0], size, k.shape[2], q.shape[3], dtype=wide) for _ in range(2))
    zero_keys = log_zero_keys(workload, q.device, wide, rows=rows, apart=True)
    for block in blocks(workload, rows, q):
        dout_block = dout[:, block.index, block.head].to(dtype)
        queries, block_keys = block.paired(q, k, workload, dtype)
        scores, share_grad = block.scores(queries, block_keys), dout_block @ block.take(v, workload, dtype).mT
        score_grad, share = score_gradient(block, scores, share_grad, out, lse, zero_keys, dout_block, workload)
        dq[:, block.index, block.head] = score_grad @ block_keys * workload.softmax_scale
        chosen, slot = block.wanted(slots)
        kv_head = block.head // workload.group_size
        dk[:, :, kv_head].index_add_(1, slot, (score_grad[..., chosen].mT @ queries).to(wide))
        dv[:, :, kv_head].index_add_(1, slot, (share[..., chosen].mT @ dout_block).to(wide))
    return dq, dk.to(dtype), dv.to(dtype)


class ShareOfSum(NamedTuple):
    """One attention of a sum in the backward pass. `own`: its k and v. `gated`: dout times its gates.

    `gradients`: dq, and dk and dv of `own`.
    """

    part: Part
    own: tuple[Tensor, Tensor]
    gated: Tensor
    lse: Tensor
    gradients: tuple[Tensor, Tensor, Tensor]


def shares_of_sum(
    parts: Sequence[Part],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    rows: Tensor,
    dtype: torch.dtype,
) -> Iterator[ShareOfSum]:
    """The results of `attend_rows_backward` for each attention of a sum; lse [B, parts·H, R]."""
    for part, part_lse in zip(parts, lse.split(q.shape[2], 1), strict=True):
        own = part.keys(k.to(dtype)), part.keys(v.to(dtype))
        out = attend_rows(q, *own, part.workload, rows, dtype)[0]
        gated = dout * part.gates[rows][..., None]
        gradients = attend_rows_backward(gated, q, *own, out, part_lse, part.workload, rows, None, dtype)
        yield ShareOfSum(part, own, gated, part_lse, gradients)


def _sum_backward(
    parts: list[Part],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    rows: Tensor,
    keys: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = []
    for share in shares_of_sum(parts, dout, q, k, v, lse, rows, dtype):
        dq, *of_keys = share.gradients
        dk, dv = (x if keys is None else x[:, keys.to(x.device)] for x in map(share.part.keys_backward, of_keys))
        gradients.append((dq, dk, dv))
    dq, dk, dv = (torch.stack(shares).sum(0) for shares in zip(*gradients, strict=True))
    return dq, dk, dv


def differentiable_rows(
    q: Tensor, k: Tensor, v: Tensor, workload: Workload, rows: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`attend_rows` for autograd: out [B, N, H, D] is zero outside `rows`, lse is [B, H, R] and carries no gradient.

    Gradients depend only on the rows of dout at `rows`.
    """
    return _AttendRows.apply(q, k, v, workload, rows, dtype)


class _AttendRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, workload: Workload, rows: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        out_rows, lse = attend_rows(q, k, v, workload, rows, dtype)
        ctx.save_for_backward(q, k, v, out_rows, lse)
        ctx.workload, ctx.rows, ctx.dtype = workload, rows, dtype
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        if len(rows) == q.shape[1]:
            return out_rows, lse
        out = out_rows.new_zeros(q.shape)
        out[:, rows] = out_rows
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        if dout is None:
            return (None,) * 6
        q, k, v, out, lse = ctx.saved_tensors
        dout_rows = dout[:, ctx.rows]
        dq_rows, dk, dv = attend_rows_backward(dout_rows, q, k, v, out, lse, ctx.workload, ctx.rows, dtype=ctx.dtype)
        dq = dq_rows.new_zeros(q.shape)
        dq[:, ctx.rows] = dq_rows
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax and sums: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def key_slots(keys: Tensor | None, length: int, device: torch.device) -> Tensor | None:
    """The index of each of `length` positions in `keys`, -1 if absent. None: each is its own."""
    if keys is None:
        return None
    slots = torch.full((length,), -1, device=device, dtype=torch.int64)
    slots[keys.to(device)] = torch.arange(len(keys), device=device)
    return slots


def finite(lse: Tensor) -> Tensor:
    """lse [..., R] as a column to subtract; 0 for a row without keys, whose shares are then exp(-inf) = 0."""
    return lse.masked_fill(lse == -torch.inf, 0.0)[..., None]


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows of one head and the keys that any of them may see; `index`: the rows' positions in the sample.

    counts: [parts, M]. log_counts: [M], log of their sum, float64. seen: [R, M].
    """

    head: int
    index: Tensor
    rows: Tensor
    keys: Tensor
    counts: Tensor
    log_counts: Tensor
    seen: Tensor

    def take(self, x: Tensor, workload: Workload, dtype: torch.dtype) -> Tensor:
        """The block's keys of k or v, [B, M, D]."""
        return x[:, :, self.head // workload.group_size].index_select(1, self.keys).to(dtype)

    def paired(self, q: Tensor, k: Tensor, workload: Workload, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The block's queries [B, R, D], times the scale of the softmax, and its keys [B, M, D]."""
        return q[:, self.rows, self.head].to(dtype) * workload.softmax_scale, self.take(k, workload, dtype)

    def wanted(self, slots: Tensor | None) -> tuple[Tensor | slice, Tensor]:
        """Which of the block's keys ([M] bool, or all) have a slot of `key_slots`, and those slots."""
        if slots is None:
            return slice(None), self.keys
        slot = slots[self.keys]
        return slot >= 0, slot[slot >= 0]

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """queries·keys + log C, [B, R, M], in the accumulation dtype; -inf if a row does not see the key."""
        scores = queries @ keys.mT
        bias = self.log_counts.to(accumulation_dtype(scores.dtype))
        return scores.to(bias.dtype).add_(bias).masked_fill_(~self.seen, -torch.inf)


def score_gradient(
    block: Block,
    scores: Tensor,
    share_grad: Tensor,
    out: Tensor,
    lse: Tensor,
    zero_keys: Tensor | None,
    dout: Tensor,
    workload: Workload,
) -> tuple[Tensor, Tensor]:
    """dS and P of a block, [B, R, M] in the dtype of dP; dS under merge_grad, formulas at `attend_rows_backward`.

    scores: changed in place. share_grad: dP. dout: of the block. zero_keys: log n of each part, [parts, H, R].
    """
    dtype, share_grad = share_grad.dtype, share_grad.to(scores.dtype)
    share = scores.sub_(finite(lse[:, block.head, block.index])).exp_().to(dtype).to(scores.dtype)
    if not workload.pattern.is_detached:
        mean = (dout * out[:, block.index, block.head]).to(share.dtype).sum(-1, keepdim=True)
        return (share * (share_grad - mean)).to(dtype), share.to(dtype)
    score_grad = torch.zeros_like(share)
    for part, branch in enumerate(block.counts.to(share.dtype) / block.counts.sum(0)):
        branch_share = share * branch
        weight = branch_share.sum(-1, keepdim=True)
        if zero_keys is not None:
            shift = zero_keys[part, block.head, block.index] - lse[:, block.head, block.index]
            weight += shift.exp()[..., None]
        mean = (branch_share * share_grad).sum(-1, keepdim=True) / weight.where(weight > 0, 1.0)
        score_grad += branch_share * (share_grad - mean)
    return score_grad.to(dtype), share.to(dtype)


def blocks(workload: Workload, rows: Tensor, q: Tensor) -> Iterable[Block]:
    """Blocks that cover every (row, head) with a key once.

    Each has at most MAX_BLOCK_SCORES scores, unless one row alone has more.
    """
    keep = _keep.get()
    heads = workload.num_heads if _heads.get() is None else 1
    if keep is None or not 0 < heads * len(rows) * workload.seq_len <= FEW_PAIRS:
        return _blocks(workload, rows, q.shape[0], q.device)
    return keep(workload, rows.numpy().tobytes(), q.shape[0], q.device)


@contextmanager
def only_heads(heads: Sequence[int]) -> Iterator[None]:
    """Skip the blocks of all other heads inside the context: results are right only for these heads."""
    token = _heads.set(heads)
    try:
        with blocks_kept():
            yield
    finally:
        _heads.reset(token)


@contextmanager
def blocks_kept() -> Iterator[None]:
    """Cache the blocks of small workloads inside the context: finding them takes longer than using them."""

    @lru_cache(maxsize=4)
    def found(workload: Workload, rows: bytes, batch: int, device: torch.device) -> tuple[Block, ...]:
        return tuple(_blocks(workload, torch.frombuffer(bytearray(rows), dtype=torch.int64), batch, device))

    token = _keep.set(found)
    try:
        yield
    finally:
        _keep.reset(token)


def _blocks(workload: Workload, rows: Tensor, batch: int, device: torch.device) -> Iterator[Block]:
    left, right = workload.shapes[0].reach
    wanted = _heads.get()
    for alike in alike_heads(workload):
        heads = alike if wanted is None else [head for head in alike if head in wanted]
        # Heads with one selection share its visible keys, because finding them may take longer than attention.
        for group in key_groups(workload, alike[0], rows, device) if heads else ():
            per_row = max(1, batch * len(group.keys))
            height = max(1, MAX_BLOCK_SCORES // per_row)
            log_counts = group.counts.sum(0).double().log_()
            for at, part in zip(range(0, len(group.rows), height), group.rows.split(height), strict=True):
                low = 0 if left is None else int(torch.searchsorted(group.keys, int(part[0]) - left))
                high = (
                    len(group.keys)
                    if right is None
                    else int(torch.searchsorted(group.keys, int(part[-1]) + right, right=True))
                )
                if low >= high:
                    continue
                keys, part_rows = group.keys[low:high], part.to(device)
                seen = visible(workload, part_rows, keys)
                if group.own is not None:
                    seen &= group.own[at : at + height, low:high]
                index, counts = torch.searchsorted(rows, part).to(device), group.counts[:, low:high]
                logs = log_counts[low:high]
                for head in heads:
                    yield Block(head, index, part_rows, keys, counts, logs, seen)
