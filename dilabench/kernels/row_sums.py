# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""Row sums for the backward pass, in the order in which the fused kernels read rows: class by class."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from dilabench.kernels.launches import Launches, run


class StatsLayout(NamedTuple):
    """Rows of N tokens as [R, segments, rows]: token t at class t mod R and row t // R, ``segment_rows`` to a segment.

    ``rows`` is that many or more; a row that no token has holds infinity and 0, so that its weights are 0.
    """

    modulus: int
    segments: int
    segment_rows: int
    rows: int

    @classmethod
    def of(cls, length: int, modulus: int = 1, segment_rows: int | None = None, tile: int = 1) -> StatsLayout:
        """Of N tokens in segments of so many rows, all in one by default; each begins with a tile of its own."""
        most = -(-length // modulus)
        segment_rows = min(segment_rows or most, most)
        return cls(modulus, -(-most // segment_rows), segment_rows, -(-segment_rows // tile) * tile)

    def is_filled_by(self, length: int) -> bool:
        """Whether N tokens leave no row without one."""
        return self.modulus * self.segments * self.rows == length


@triton.jit(do_not_specialize=["length", "segments", "segment_rows", "stats_rows", "R"])
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
    R,
    segments,
    segment_rows,
    stats_rows,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    # delta = rowsum(out * dout) and the base-2 lse, written as [B, H, R, segments, stats_rows].
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
    row = tokens // R
    segment = ((batch * n_heads + head) * R + tokens % R) * segments + row // segment_rows
    target = segment * stats_rows + row % segment_rows
    # exp2(x - inf) is 0: a row that sees no key contributes nothing.
    log2_lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
    tl.store(log2_lse_ptr + target, log2_lse, valid)
    tl.store(delta_ptr + target, delta, valid)


def row_sums(
    out: Tensor, dout: Tensor, lse: Tensor, layout: StatsLayout, known: Launches | None = None
) -> tuple[Tensor, Tensor]:
    """(lse * log2(e), rowsum(out * dout)) of out, dout [B, N, H, D], lse [B, H, N]: float32 ``[B, H, *layout]``.

    known: launches of the pass, which may have this one.
    """
    batch, length, num_heads, dim = out.shape
    out, dout = (x if x.stride(-1) == 1 else x.contiguous() for x in (out, dout))
    shape = (batch, num_heads, layout.modulus, layout.segments, layout.rows)
    if layout.is_filled_by(length):
        log2_lse, delta = lse.new_empty(shape), lse.new_empty(shape)
    else:
        log2_lse, delta = lse.new_full(shape, float("inf")), lse.new_zeros(shape)
    tensors = {"out": out, "dout": dout, "lse": lse, "log2_lse": log2_lse, "delta": delta}
    if known is not None and known.repeat("row sums", tensors):
        return log2_lse, delta
    columns = triton.next_power_of_2(dim)
    rows = max(1, 4096 // columns)
    arguments = {
        **{f"{name}_ptr": x for name, x in tensors.items()},
        **dict(zip(("out_b", "out_n", "out_h"), out.stride(), strict=False)),
        **dict(zip(("dout_b", "dout_n", "dout_h"), dout.stride(), strict=False)),
        "length": length,
        "n_heads": num_heads,
        "R": layout.modulus,
        "segments": layout.segments,
        "segment_rows": layout.segment_rows,
        "stats_rows": layout.rows,
        "HEAD_DIM": dim,
        "DIM": columns,
        "ROWS": rows,
    }
    launched = run(_row_sums_kernel, (triton.cdiv(length, rows) * batch * num_heads,), arguments)
    if known is not None:
        known.keep("row sums", launched, tensors)
    return log2_lse, delta


def reordered(sums: tuple[Tensor, Tensor], length: int, old: StatsLayout, new: StatsLayout) -> tuple[Tensor, Tensor]:
    """``sums`` of `row_sums` of N tokens in one layout, in another."""
    if old == new:
        return sums
    log2_lse, delta = sums
    return _reordered(log2_lse, length, old, new, float("inf")), _reordered(delta, length, old, new, 0.0)


def _reordered(sums: Tensor, length: int, old: StatsLayout, new: StatsLayout, empty: float) -> Tensor:
    by_token = sums[..., : old.segment_rows].permute(0, 1, 3, 4, 2).flatten(2)[..., :length]
    missing = new.modulus * new.segments * new.segment_rows - length
    by_row = pad(by_token, (0, missing), value=empty).unflatten(2, (new.segments, new.segment_rows, new.modulus))
    return pad(by_row.permute(0, 1, 4, 2, 3), (0, new.rows - new.segment_rows), value=empty).contiguous()
