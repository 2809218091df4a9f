"""Natural sizes of out, lse, dq, dk and dv: the units in which errors are measured (tolerance.py)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dilabench.engine.call.inputs import TORCH_DTYPE
from dilabench.engine.verify.oracle.blocks import Block, RowsOf, blocks
from dilabench.engine.verify.oracle.formula import (
    at_keys,
    chosen_keys,
    finite,
    gradient_terms,
    key_slots,
    own_keys,
    softmax_rows,
)
from dilabench.engine.verify.oracle.sums import attentions, is_sum
from dilabench.engine.verify.oracle.tolerance import eps
from dilabench.workload.spec import Workload


class Rows(NamedTuple):
    """Right results of some rows in float64, and their natural sizes: out [B, R, H, D], lse [B, H, R]."""

    out: Tensor
    lse: Tensor
    size: Tensor
    lse_size: Tensor


def sized_rows(q: Tensor, k: Tensor, v: Tensor, workload: Workload, rows: RowsOf, weight_ulps: float) -> Rows:
    """Return the results of `attend_rows` in float64 and, from the same pass, their natural sizes.

    The size of out is sqrt(sum_j (doubt P v)²) + |out| + weight_ulps · (size of a branch's own out). The size of lse is
    sqrt(sum_j (doubt P)²) + |lse| + 1, because lse changes by the mean error of its scores.

    Branches may be computed separately and merged by weights, which are rounded absolutely. Next to a large share, a
    small one is known to eps and no better. `weight_ulps` is the eps of those weights, the accumulation dtype's, over
    that of out. The sizes of a sum of attentions add up.
    """
    found = []
    for attention in attentions(workload):
        keys, values = (attention.keys(x, torch.float64) for x in (k, v))
        of_softmax = _sized_softmax(q, keys, values, attention.workload, rows, weight_ulps)
        out, size = (attention.gated(x, rows, torch.float64) for x in (of_softmax.out, of_softmax.size))
        found.append(of_softmax._replace(out=out, size=size))
    if len(found) == 1:
        return found[0]
    outs, lses, sizes, lse_sizes = zip(*found, strict=True)
    return Rows(torch.stack(outs).sum(0), torch.cat(lses, 1), torch.stack(sizes).sum(0), torch.cat(lse_sizes, 1))


def _sized_softmax(q: Tensor, k: Tensor, v: Tensor, workload: Workload, rows: RowsOf, weight_ulps: float) -> Rows:
    size = q.new_zeros(q.shape[0], len(rows), q.shape[2], v.shape[3], dtype=torch.float64)
    lse_size = q.new_zeros(q.shape[0], q.shape[2], len(rows), dtype=torch.float64)

    def add(block: Block, scores: Tensor, weights: Tensor, values: Tensor) -> None:
        squares = _doubt(block, *block.paired(q, k, workload, torch.float64), scores).mul_(weights).square_()
        block_size = (squares @ values.square()).sqrt_()
        block.scatter(lse_size.mT, squares.sum(-1).sqrt_())
        if len(block.given) > 1:
            branch_size = _concentration(weights, block)[..., None] * values.abs().amax(-2, keepdim=True)
            block_size.add_(branch_size, alpha=weight_ulps)
        block.scatter(size, block_size)

    out, lse = softmax_rows(q, k, v, workload, rows, torch.float64, each=add)
    lse_size.add_(lse.abs().masked_fill_(lse == -torch.inf, 0.0)).add_(1.0)
    return Rows(out, lse, size.add_(out.abs()), lse_size)


def _shares(block: Block, queries: Tensor, keys: Tensor, lse: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """P of a block, and the number of eps by which it is in doubt. Both [B, K', G, M]."""
    scores = block.scores(queries, keys, softcap)
    doubt = _doubt(block, queries, keys, scores)
    return scores.sub_(finite(block.gather(lse.mT))).exp_(), doubt


def _doubt(block: Block, queries: Tensor, keys: Tensor, scores: Tensor) -> Tensor:
    """The number of eps by which P is in doubt: sqrt(1 + s²), s the size of its score, [B, K', G, M].

    exp turns an absolute error of the score into a relative error of P. The score is rounded in its own size:
    sqrt(sum_d (scale · q)² k²) + |score|. A softcap makes the error of a score smaller, which the size does not show.
    """
    doubt = (queries.square() @ keys.square().mT).sqrt_().add_(scores.abs().masked_fill_(~block.seen, 0.0))
    return doubt.square_().add_(1.0).sqrt_()


def alike_weights(q: Tensor, k: Tensor, lse: Tensor, workload: Workload, rows: Tensor) -> float:
    """How alike the fractions of the weights P are, 0 to 1: |sum P² exp(2 pi i log2 P)| / sum P².

    If they differ, rounding is unbiased on average. If all weights are equal, any kernel rounds all of them to the same
    side. An example is a row that sees one key several times.
    """
    return max(
        _alike_weights(q, attention.keys(k, torch.float64), its_lse, attention.workload, rows)
        for attention, its_lse in zip(attentions(workload), lse.split(q.shape[2], 1), strict=True)
    )


def _alike_weights(q: Tensor, k: Tensor, lse: Tensor, workload: Workload, rows: Tensor) -> float:
    turns, total = torch.zeros(2, dtype=torch.float64, device=q.device), 0.0
    for block in blocks(workload, rows, q):
        share, _ = _shares(block, *block.paired(q, k, workload, torch.float64), lse, workload.softcap)
        weight, angle = share.square(), share.clamp_min(torch.finfo(share.dtype).tiny).log2_().mul_(2 * torch.pi)
        turns += torch.stack([(weight * angle.cos()).sum(), (weight * angle.sin()).sum()])
        total += float(weight.sum())
    return float(turns.norm()) / total if total else 0.0


def _concentration(weights: Tensor, block: Block) -> Tensor:
    """max over branches of sqrt(sum_j P_b²), [B, K', G], P_b the branch's own softmax: 1 for one key."""
    largest = torch.zeros_like(weights[..., 0])
    for branch in block.branches(torch.float64):
        branch_share = weights * branch
        total = branch_share.sum(-1)
        norm = branch_share.square_().sum(-1).sqrt_()
        largest = torch.maximum(largest, norm / total.where(total > 0, 1.0))
    return largest


def gradient_sizes(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    workload: Workload,
    rows: RowsOf,
    keys: Tensor | None,
    gradients: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """The natural sizes of dq, dk and dv. The terms of dS are P dP and P mean(dP), which may cancel, so both count."""
    if not is_sum(workload):
        return _sizes_of_softmax(dout, q, k, v, lse, workload, rows, keys, gradients)
    dq, dk, dv = (torch.zeros_like(gradient) for gradient in gradients)
    for terms in gradient_terms(dout, q, k, v, gradients[0], lse, workload, rows, keys, torch.float64):
        attention, wanted = terms.attention, own_keys(terms.attention, keys)
        sizes = _sizes_of_softmax(
            terms.dout, q, terms.keys, terms.values, terms.lse, attention.workload, rows, wanted, terms.own
        )
        dq += sizes[0]
        dk += at_keys(attention, sizes[1], keys)
        dv += at_keys(attention, sizes[2], keys)
    return dq, dk, dv


def _sizes_of_softmax(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    workload: Workload,
    rows: RowsOf,
    keys: Tensor | None,
    gradients: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.zeros_like(gradient) for gradient in gradients)
    dtype = TORCH_DTYPE[workload.dtype]
    slots = key_slots(keys, k.shape[1], q.device) if dk.shape[1] else None
    for block in blocks(workload, rows, q):
        queries, block_keys = block.paired(q, k, workload, torch.float64)
        share, doubt = _shares(block, queries, block_keys, lse, workload.softcap)
        dout_block = block.gather(dout).double()
        values = block.take(v, torch.float64)
        # dP = dout·v is itself a sum of rounded terms. Kernels take its mean from an out that is already rounded.
        share_grad = (dout_block.square() @ values.square().mT).sqrt_().add_((dout_block @ values.mT).abs_())
        terms = share_grad.add_((share * share_grad).sum(-1, keepdim=True)).mul_(share)
        terms = _kept(terms.mul_(doubt), block, dtype).square_()
        block.scatter(dq, terms @ block_keys.square_() * workload.softmax_scale**2)
        if dk.shape[1]:
            chosen, slot = chosen_keys(block, slots)
            block.add_keys(dk, slot, terms[..., chosen].mT @ queries.square_())
            weights = _kept(share.mul_(doubt), block, dtype).square_()
            block.add_keys(dv, slot, weights[..., chosen].mT @ dout_block.square_())
    sizes = (dq, dk, dv)
    return tuple(size.sqrt_().add_(gradient.abs()) for size, gradient in zip(sizes, gradients, strict=True))  # type: ignore[return-value]


def _kept(terms: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """Terms of P or dS, each at least so large that its rounding is relative.

    Below the smallest normal number rounding is absolute: eps of that number. Each branch that sees the key may have
    rounded its share, all to the same side. This matters in float16, whose smallest is 6e-5: a P of 16,000 keys.
    """
    smallest = torch.finfo(dtype).tiny
    # In dtypes with the exponents of float32 these numbers are negligible next to any gradient.
    if smallest < eps(torch.float64):
        return terms
    shares = block.given.sum(0) * block.seen
    return torch.maximum(terms, shares.double().mul_(smallest))
