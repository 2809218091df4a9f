# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""Row sums for the backward pass, in the order in which the fused kernels read rows: class by class."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["length", "stats_rows", "R"])
def _row_sums_kernel(
    out_ptr,
    dout_ptr,
    lse_ptr,
    log2_lse_ptr,
    delta_ptr,
    out_b,
    out_n,
    out_h,
    dout_b,
    dout_n,
    dout_h,
    length,
    n_heads,
    stats_rows,
    R,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    # delta = rowsum(out * dout) and the base-2 lse, written class by class: [B, H, R, stats_rows].
    pid = tl.program_id(0)
    head = (pid % n_heads).to(tl.int64)
    rest = pid // n_heads
    blocks = tl.cdiv(length, ROWS)
    tokens = (rest % blocks) * ROWS + tl.arange(0, ROWS)
    batch = (rest // blocks).to(tl.int64)
    valid = tokens < length
    columns = tl.arange(0, DIM)[None, :]
    there = valid[:, None] & (columns < HEAD_DIM)
    at = tokens.to(tl.int64)
    out = tl.load(out_ptr + batch * out_b + head * out_h + at[:, None] * out_n + columns, there, 0.0)
    dout = tl.load(dout_ptr + batch * dout_b + head * dout_h + at[:, None] * dout_n + columns, there, 0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    lse = tl.load(lse_ptr + (batch * n_heads + head) * length + at, valid, 0.0)
    target = ((batch * n_heads + head) * R + tokens % R) * stats_rows + tokens // R
    # exp2(x - inf) is 0: a row that sees no key contributes nothing.
    log2_lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
    tl.store(log2_lse_ptr + target, log2_lse, valid)
    tl.store(delta_ptr + target, delta, valid)


def row_sums(out: Tensor, dout: Tensor, lse: Tensor, modulus: int = 1, beyond: int = 0) -> tuple[Tensor, Tensor]:
    """(lse * log2(e), rowsum(out * dout)) of out, dout [B, N, H, D], lse [B, H, N]: float32 ``[B, H, R, rows]``.

    rows: those of the longest class and so many ``beyond``; a row beyond the sequence has infinity and 0, so that its
    weights are 0.
    """
    batch, length, num_heads, dim = out.shape
    out, dout = (x if x.stride(-1) == 1 else x.contiguous() for x in (out, dout))
    log2_lse, delta = _empty_rows(lse, length, modulus, beyond)
    columns = triton.next_power_of_2(dim)
    rows = max(1, 4096 // columns)
    _row_sums_kernel[(triton.cdiv(length, rows) * batch * num_heads,)](
        out,
        dout,
        lse,
        log2_lse,
        delta,
        *out.stride()[:3],
        *dout.stride()[:3],
        length,
        num_heads,
        log2_lse.shape[-1],
        R=modulus,
        HEAD_DIM=dim,
        DIM=columns,
        ROWS=rows,
    )
    return log2_lse, delta


def reordered(sums: tuple[Tensor, Tensor], length: int, modulus: int, beyond: int) -> tuple[Tensor, Tensor]:
    """``sums`` of `row_sums` for another modulus and more or fewer rows beyond. length: N."""
    results = _empty_rows(sums[0], length, modulus, beyond)
    if sums[0].shape == results[0].shape:
        return sums
    whole = length // modulus
    for old, new in zip(sums, results, strict=True):
        by_token = old.transpose(-1, -2).flatten(-2)[..., :length]
        new[..., :whole] = by_token[..., : whole * modulus].unflatten(-1, (-1, modulus)).transpose(-1, -2)
        if whole * modulus < length:
            new[..., : length % modulus, whole] = by_token[..., whole * modulus :]
    return results


def _empty_rows(like: Tensor, length: int, modulus: int, beyond: int) -> tuple[Tensor, Tensor]:
    """Tensors for (log2 lse, delta), filled with infinity and 0 for rows beyond the sequence."""
    shape = (*like.shape[:2], modulus, -(-length // modulus) + beyond)
    if shape[-1] * modulus == length:
        return like.new_empty(shape), like.new_empty(shape)
    return like.new_full(shape, float("inf")), like.new_zeros(shape)
