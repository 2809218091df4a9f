# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""Row sums for the backward pass, in the order in which the fused kernels read rows: class by class.

A row has two of them, lse and rowsum(out * dout). They are stored in blocks of sixteen rows or more, first one kind,
then the other. A kernel that reads both needs one address, because the other is at a fixed distance. It needs no masks:
a tile begins with a block, and rows without a token hold `_NO_TOKEN`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dilabench.kernels.fused.branch_group import SPAN_COLUMNS
from dilabench.kernels.fused.tile_walk import find_spans
from dilabench.kernels.launch_cache import Launch, LaunchCache, stride_unit
from dilabench.kernels.row_programs import row_program

# Rows of a block, which is always complete, so that reads are of sixteen bytes or more.
STATS_BLOCK = 16
_BLOCK = tl.constexpr(STATS_BLOCK)
_SPAN_COLUMNS = tl.constexpr(SPAN_COLUMNS)

# exp2(x - lse) is 0 for an lse so large, and its product with a difference from so large a sum, which is finite, too.
_NO_TOKEN = 1e38


class StatsLayout(NamedTuple):
    """Rows of N tokens as [R, segments, rows]: token t of a segment of ``segment_tokens`` at class t mod R and row
    t // R.

    ``rows`` is as many as a class has or more, a multiple of ``block``, the rows that stand together.
    """

    modulus: int
    segments: int
    segment_tokens: int
    rows: int
    block: int = STATS_BLOCK

    @classmethod
    def of(
        cls,
        length: int,
        modulus: int = 1,
        segment_tokens: int | None = None,
        tile: int = STATS_BLOCK,
        block: int = STATS_BLOCK,
    ) -> StatsLayout:
        """The layout of ``length`` tokens in segments (by default one), each of which begins with a new tile."""
        segment_tokens, tile = min(segment_tokens or length, length), max(tile, block)
        tiles = -(-segment_tokens // (modulus * tile))
        return cls(modulus, -(-length // segment_tokens), segment_tokens, tiles * tile, block)

    def is_filled_by(self, length: int) -> bool:
        """Whether N tokens leave no row without one."""
        return self.modulus * self.segments * self.rows == length


class OneClass(NamedTuple):
    """Only the rows of one class of each head: their own ``lse`` [B, H, n] float32, while other rows are merged into
    the lse of all; the class of each head, [H] int32; and the rows of a segment.
    """

    lse: Tensor
    classes: Tensor
    segment_rows: int


@triton.jit
def stats_places(row):
    """The offset of lse * log2(e) of rows from the first row of a segment of a class; rowsum(out * dout) is
    `STATS_BLOCK` further.
    """
    return _places(row, _BLOCK)


@triton.jit
def _places(row, BLOCK: tl.constexpr):
    return (row // BLOCK) * (2 * BLOCK) + row % BLOCK


_STRIDES = tuple(f"{name}_{axis}" for name in ("out", "dout") for axis in "bnh")


@triton.jit(
    do_not_specialize=(
        *_STRIDES,
        "length",
        "n_heads",
        "R",
        "segments",
        "segment_tokens",
        "segment_rows",
        "stored",
        "n_rows",
        "stats_rows",
        "n_spans",
    )
)
def _bwd_preprocess_kernel(
    out_ptr,
    dout_ptr,
    lse_ptr,
    own_lse_ptr,
    classes_ptr,
    delta_ptr,
    stats_ptr,
    spans_ptr,
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
    segment_tokens,
    segment_rows,
    stored,
    n_rows,
    stats_rows,
    n_spans,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FOUND: tl.constexpr,
    NO_TOKEN: tl.constexpr,
):
    # delta = rowsum(out * dout) and the base-2 lse, written as [B, H, R, segments, stats_rows / block, 2, block].
    pid = tl.program_id(0)
    head = (pid % n_heads).to(tl.int64)
    rest = pid // n_heads
    blocks = tl.cdiv(n_rows, ROWS)
    first = (rest % blocks) * ROWS
    row = first + tl.arange(0, ROWS)
    batch = (rest // blocks).to(tl.int64)
    first_stats, segment, out_row = 0, 0, row
    if classes_ptr is None:
        # Rows are tokens. For documents, `segments` is 1.
        if spans_ptr is not None:
            span_ptr = spans_ptr + find_spans(spans_ptr, first, row, n_spans, ROWS, 0) * _SPAN_COLUMNS
            first_token, first_stats = tl.load(span_ptr), tl.load(span_ptr + 2)
        else:
            segment = row // segment_tokens
            first_token = segment * segment_tokens
        inside = row - first_token
        residue, class_row, tokens = inside % R, inside // R, row
        valid = row < n_rows
    else:
        # These are the rows of the statistics, some of them without a token.
        if spans_ptr is not None:
            span_ptr = spans_ptr + find_spans(spans_ptr, first, row, n_spans, ROWS, 2) * _SPAN_COLUMNS
            first_token, end = tl.load(span_ptr), tl.load(span_ptr + 1)
            inside = row - tl.load(span_ptr + 2)
            out_row = tl.load(span_ptr + 3) + inside
        else:
            from_segment = row // stats_rows
            first_token = from_segment * segment_tokens
            end = tl.minimum(segment_tokens, length - first_token)
            inside = row - from_segment * stats_rows
            out_row = from_segment * segment_rows + inside
        residue, class_row = tl.load(classes_ptr + head), row
        inside = inside.to(tl.int64) * R + residue
        tokens = first_token + inside
        valid = (row < n_rows) & (inside < end)
    at = tokens.to(tl.int64)
    row_at = (batch * n_heads + head) * length + at
    lse = tl.load(lse_ptr + row_at, valid, float("-inf"))
    if own_lse_ptr is not None:
        own = tl.load(own_lse_ptr + (batch * n_heads + head) * stored + out_row, valid, float("-inf"))
        lse = tl.where(own == float("-inf"), float("-inf"), lse)
    if FOUND:
        delta = tl.load(delta_ptr + row_at, valid, 0.0)
    else:
        columns = tl.arange(0, DIM)[None, :]
        # `out` is undefined in rows that see no key, so these rows are masked.
        there = (lse != float("-inf"))[:, None] & (columns < HEAD_DIM)
        out_at = (batch * out_b + head * out_h + out_row.to(tl.int64)[:, None] * out_n) * UNIT
        dout_at = (batch * dout_b + head * dout_h + at[:, None] * dout_n) * UNIT
        out = tl.load(out_ptr + out_at + columns, there, 0.0)
        dout = tl.load(dout_ptr + dout_at + columns, there, 0.0)
        delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
        if delta_ptr is not None:
            tl.store(delta_ptr + row_at, delta, valid)
    target = ((batch * n_heads + head) * R + residue) * segments + segment
    target = 2 * (target * stats_rows + first_stats) + _places(class_row, BLOCK)
    # exp2(x - inf) is 0: a row that sees no key contributes nothing.
    log2_lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
    if classes_ptr is not None:
        log2_lse, delta = tl.where(valid, log2_lse, NO_TOKEN), tl.where(valid, delta, NO_TOKEN)
        valid = row < n_rows
    tl.store(stats_ptr + target, log2_lse, valid)
    tl.store(stats_ptr + target + BLOCK, delta, valid)


def bwd_preprocess(
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    layout: StatsLayout,
    cache: LaunchCache,
    name: Hashable,
    delta: Tensor | None = None,
    found: bool = False,
    one_class: OneClass | None = None,
    spans: Tensor | None = None,
) -> Tensor:
    """lse * log2(e) and rowsum(out * dout) of out, dout [B, N, H, D], lse [B, H, N]: float32
    ``[B, H, R, segments, rows / block, 2, block]``.

    cache: of the pass, in which this launch has a name. delta: memory for rowsum(out * dout), like lse, for the next of
    several layouts, which then reads neither out nor dout (``found``). one_class: out [B, n, H, D] has only rows of one
    class, and only statistics of these are written. spans: the super-segments of documents
    (`fused.packing.DocumentLists.spans`), whose rows follow each other in the layout.
    """
    batch, length, num_heads, _ = dout.shape
    out, dout = (x if x.stride(-1) == 1 else x.contiguous() for x in (out, dout))
    shape = (batch, num_heads, layout.modulus, layout.segments, layout.rows // layout.block, 2, layout.block)
    # If there is one class, the launch writes all rows that are read.
    filled = one_class is not None or layout.is_filled_by(length)
    stats = lse.new_empty(shape) if filled else lse.new_full(shape, _NO_TOKEN)
    tensors = {"out": out, "dout": dout, "lse": lse, "stats": stats}
    if delta is not None:
        tensors["delta"] = delta
    if one_class is not None:
        tensors["own_lse"] = one_class.lse
    if spans is not None:
        tensors["spans"] = spans
    cache.launch(name, [tensors], lambda: [_launch(tensors, layout, found, one_class)])
    return stats


def _launch(tensors: dict[str, Tensor], layout: StatsLayout, found: bool, one_class: OneClass | None) -> Launch:
    out, dout = tensors["out"], tensors["dout"]
    batch, length, num_heads, dim = dout.shape
    columns, unit = triton.next_power_of_2(dim), stride_unit(out, dout)
    rows, num_warps = row_program("bwd_preprocess", columns)
    n_rows = layout.segments * layout.rows if one_class else length
    arguments = {
        "delta_ptr": None,
        "own_lse_ptr": None,
        "spans_ptr": None,
        "classes_ptr": one_class.classes if one_class else None,
        **{f"{name}_ptr": x for name, x in tensors.items()},
        **dict(zip(_STRIDES, (step // unit for x in (out, dout) for step in x.stride()[:3]), strict=True)),
        "length": length,
        "n_heads": num_heads,
        "R": layout.modulus,
        "segments": layout.segments,
        "segment_tokens": layout.segment_tokens,
        "segment_rows": one_class.segment_rows if one_class else 0,
        "stored": out.shape[1],
        "n_rows": n_rows,
        "stats_rows": layout.rows,
        "n_spans": len(tensors["spans"]) if "spans" in tensors else 0,
        "UNIT": unit,
        "HEAD_DIM": dim,
        "DIM": columns,
        "ROWS": rows,
        "num_warps": num_warps,
        "BLOCK": layout.block,
        "FOUND": found,
        "NO_TOKEN": _NO_TOKEN,
    }
    programs = triton.cdiv(n_rows, rows) * batch * num_heads
    kind = (out.dtype, dout.dtype, dim, unit, layout.block, found, *tensors)
    return Launch(_bwd_preprocess_kernel, lambda _: ((programs,), arguments), False, kind)
