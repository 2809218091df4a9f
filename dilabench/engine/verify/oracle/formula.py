"""The formula (semantics.md §1) at some query rows, forward and backward, in blocks so that memory is bounded.

It computes in float64, or in the plain way in the inputs' own dtype, to measure rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dilabench.engine.verify.oracle.blocks import Block, RowsOf, accumulation_dtype, blocks, zero_keys
from dilabench.engine.verify.oracle.sums import Attention, attentions
from dilabench.workload.spec import Workload

# Gets each block with its scores, their weights P, and its values.
EachBlock = Callable[[Block, Tensor, Tensor, Tensor], None]


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    workload: Workload,
    rows: RowsOf,
    dtype: torch.dtype = torch.float64,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out [B, R, H, Dv] and lse [B, H, R] of the queries `rows` ([R] int64 on the CPU, ascending), all heads.

    q is [B, M, H, D], k [B, N, K, D], v [B, N, K, Dv]; query i is at position N - M + i. In float64 this is the
    oracle. In another `dtype` it is the plain computation that tolerances come from: matrix products rounded to it,
    softmax in at least float32. sink: [H], the logit of a mass that every row of a head sees. For a sum of attentions,
    lse holds all of them, [B, attentions·H, R], and each has the sink. Of `SingleRows`, H and R are 1.
    """
    outs, lses = [], []
    for attention in attentions(workload):
        keys, values = (attention.keys(x, dtype) for x in (k, v))
        out, lse = softmax_rows(q, keys, values, attention.workload, rows, dtype, sink=sink)
        outs.append(attention.gated(out, rows, dtype))
        lses.append(lse)
    return (outs[0], lses[0]) if len(outs) == 1 else (torch.stack(outs).sum(0), torch.cat(lses, 1))


def softmax_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    workload: Workload,
    rows: RowsOf,
    dtype: torch.dtype,
    each: EachBlock | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attend_rows` of one softmax. `each` is called with every block.

    n zero keys are keys of score 0 and value 0: they are log n in lse, and nothing in the sum of values. A row that
    sees no key has out 0.
    """
    wide = accumulation_dtype(dtype)
    out = q.new_zeros(q.shape[0], len(rows), q.shape[2], v.shape[3], dtype=dtype)
    lse = q.new_full((q.shape[0], q.shape[2], len(rows)), -torch.inf, dtype=wide)
    zeros = zero_keys(workload, rows, q.device)
    if zeros is not None:
        lse.copy_(zeros.sum(1).log())
    if sink is not None:
        lse.copy_(torch.logaddexp(lse, sink.to(wide)[:, None]))
    has_mass = zeros is not None or sink is not None
    for block in blocks(workload, rows, q):
        scores = block.scores(*block.paired(q, k, workload, dtype), workload.softcap)
        block_lse, values = scores.logsumexp(-1), block.take(v, dtype)
        if has_mass:
            block_lse = torch.logaddexp(block_lse, block.gather(lse.mT))
        block.scatter(lse.mT, block_lse)
        weights = (scores.sub_ if each is None else scores.sub)(finite(block_lse)).exp_().to(dtype)
        block.scatter(out, weights @ values)
        if each is not None:
            each(block, scores, weights, values)
    return out, lse


def attend_rows_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    workload: Workload,
    rows: RowsOf,
    keys: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq [B, R, H, D] of the rows, and dk, dv [B, S, K, D] at the positions `keys` (None: all), from dout [B, R, H, D].

    Exact for a dout that is zero outside `rows`: the gradient is linear in dout, so only those rows contribute. `out`
    and `lse` are the results of `attend_rows` in the same dtype. The gradient of a sum is the sum over its attentions.
    """
    found = [terms.gradients for terms in gradient_terms(dout, q, k, v, out, lse, workload, rows, keys, dtype)]
    if len(found) == 1:
        return found[0]
    dq, dk, dv = (torch.stack(gradients).sum(0) for gradients in zip(*found, strict=True))
    return dq, dk, dv


class GradientTerms(NamedTuple):
    """One attention of a sum in the backward pass: its k and v, its part of dout, its lse.

    `own`: dq, dk, dv of its own k and v, as `softmax_rows_backward` gives them. `gradients`: of the sum's k and v.
    """

    attention: Attention
    keys: Tensor
    values: Tensor
    dout: Tensor
    lse: Tensor
    own: tuple[Tensor, Tensor, Tensor]
    gradients: tuple[Tensor, Tensor, Tensor]


def gradient_terms(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    workload: Workload,
    rows: RowsOf,
    keys: Tensor | None,
    dtype: torch.dtype,
) -> Iterator[GradientTerms]:
    """The terms of `attend_rows_backward`, one for each attention of a sum."""
    for attention, its_lse in zip(attentions(workload), lse.split(q.shape[2], 1), strict=True):
        its_keys, values = (attention.keys(x, dtype) for x in (k, v))
        its_dout, its_out = attention.gated(dout, rows, dtype), out
        if attention.gates is not None:
            its_out, _ = softmax_rows(q, its_keys, values, attention.workload, rows, dtype)
        wanted = own_keys(attention, keys)
        own = softmax_rows_backward(
            its_dout, q, its_keys, values, its_out, its_lse, attention.workload, rows, wanted, dtype
        )
        gradients = own[0], at_keys(attention, own[1], keys), at_keys(attention, own[2], keys)
        yield GradientTerms(attention, its_keys, values, its_dout, its_lse, own, gradients)


def own_keys(attention: Attention, keys: Tensor | None) -> Tensor | None:
    """The keys at which an attention's own dk and dv are needed for those of the sum at `keys`; None for all."""
    return keys if attention.pool == 1 or (keys is not None and not len(keys)) else None


def at_keys(attention: Attention, gradient: Tensor, keys: Tensor | None) -> Tensor:
    """dk or dv of the sum's k or v at the positions `keys`, from that of the attention's own.

    The latter is at these positions already, unless keys are means.
    """
    if attention.pool == 1 or not gradient.shape[1]:
        return gradient
    of_positions = attention.of_positions(gradient)
    return of_positions if keys is None else of_positions[:, keys.to(gradient.device)]


def softmax_rows_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    workload: Workload,
    rows: RowsOf,
    keys: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_rows_backward` of one softmax. P = C exp(s - lse) are its weights, and dP = dout·v. dv is P^T dout.

    The merge gradient "exact" is the derivative of the formula:

        dS[i, j] = P[i, j] · (dP[i, j] - dout[i]·out[i])

    times 1 - tanh²(s / softcap) under a softcap.

    "detached" is LongNet's code: out = sum_b a_b O_b over branches, with a_b = exp(lse_b - lse) held constant. P_b is
    the softmax of branch b alone, so that a_b P_b is its share of P, and

        dS[i, j] = sum_b a_b P_b[i, j] · (dP[i, j] - sum_j' P_b[i, j'] dP[i, j'])

    Zero keys count in lse, lse_b and P_b, and have no gradient.
    """
    wide = accumulation_dtype(dtype)
    size = k.shape[1] if keys is None else len(keys)
    slots = key_slots(keys, k.shape[1], q.device) if size else None
    dq = q.new_zeros(*dout.shape[:-1], q.shape[3], dtype=dtype)
    dk, dv = (q.new_zeros(q.shape[0], size, k.shape[2], x.shape[3], dtype=wide) for x in (q, dout))
    zeros = zero_keys(workload, rows, q.device) if workload.pattern.is_detached else None
    for block in blocks(workload, rows, q):
        row_dout, row_lse = block.gather(dout).to(dtype), block.gather(lse.mT)
        queries, block_keys = block.paired(q, k, workload, dtype)
        scores = block.scores(queries, block_keys, workload.softcap)
        weight_grad = (row_dout @ block.take(v, dtype).mT).to(scores.dtype)
        weights = scores.sub_(finite(row_lse)).exp_().to(dtype).to(scores.dtype)
        if workload.pattern.is_detached:
            masses = None
            if zeros is not None:
                masses = block.masses(zeros)[..., None] * finite(row_lse).neg().exp()[:, None]
            score_grad = _detached(block, weights, weight_grad, masses).to(dtype)
        else:
            mean = (row_dout * block.gather(out)).to(scores.dtype).sum(-1, keepdim=True)
            score_grad = (weights * (weight_grad - mean)).to(dtype)
        if workload.softcap is not None:
            score_grad = (score_grad * block.slopes(queries, block_keys, workload.softcap)).to(dtype)
        block.scatter(dq, score_grad @ block_keys * workload.softmax_scale)
        if size:
            chosen, slot = chosen_keys(block, slots)
            block.add_keys(dk, slot, (score_grad[..., chosen].mT @ queries).to(wide))
            block.add_keys(dv, slot, (weights.to(dtype)[..., chosen].mT @ row_dout).to(wide))
    return dq, dk.to(dtype), dv.to(dtype)


def _detached(block: Block, weights: Tensor, weight_grad: Tensor, masses: Tensor | None) -> Tensor:
    """dS of a detached merge. masses: [B, parts, K', G, 1], the shares of zero keys in the merged softmax."""
    score_grad = torch.zeros_like(weights)
    for part, branch in enumerate(block.branches(weights.dtype)):
        share = weights * branch
        total = share.sum(-1, keepdim=True)
        if masses is not None:
            total += masses[:, part]
        mean = (share * weight_grad).sum(-1, keepdim=True) / total.where(total > 0, 1.0)
        score_grad += share * (weight_grad - mean)
    return score_grad


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """[H]: the gradient of the sink's logits, from the rows' dout, out [B, R, H, D] and lse [B, H, R].

    The sink has the weight exp(sink - lse) in a row, and the value 0: dS of it is the weight times 0 - dout·out.
    """
    mean = (dout.double() * out).sum(-1)
    return -((sink[:, None] - lse).exp() * mean.transpose(1, 2)).sum((0, 2)).to(sink.dtype)


def key_slots(keys: Tensor | None, length: int, device: torch.device) -> Tensor | None:
    """The index of each of `length` positions in `keys`, -1 if absent. None: each is its own."""
    if keys is None:
        return None
    slots = torch.full((length,), -1, device=device, dtype=torch.int64)
    slots[keys.to(device)] = torch.arange(len(keys), device=device, dtype=torch.int64)
    return slots


def chosen_keys(block: Block, slots: Tensor | None) -> tuple[Tensor | slice, Tensor]:
    """Which of the block's keys ([M] bool, or all) have a slot of `key_slots`, and those slots."""
    if slots is None:
        return slice(None), block.keys
    slot = slots[block.keys]
    return slot >= 0, slot[slot >= 0]


def finite(lse: Tensor) -> Tensor:
    """lse [..., R] as a column to subtract; 0 for a row without keys, whose weights are then exp(-inf) = 0."""
    return lse.masked_fill(lse == -torch.inf, 0.0)[..., None]
